"""The groups of settings in the help of ``tuneserve up``, and the settings that it shows first."""

GROUPS = {
    "Model": """
        base_model base_model_revision base_model_name base_model_tokenizer dtype lora_alpha
        max_rank max_context_tokens rescore_samples stable_reinforce
    """,
    "Network": """
        host port public_url allowed_hosts trusted_proxies trusted_network poll_s retrieve_futures
        header_timeout_s body_timeout_s keep_alive_s
    """,
    "Access": "require_keys token_auth group_access tenant_metrics",
    "Files": """
        data_dir files_dir files_url files_cache_bytes min_free_bytes quarantine_s max_unused_share
        download_ttl_s max_import_bytes
    """,
    "Store": """
        store store_check_s store_durability_asserted store_reserve_bytes lease_ttl_s job_attempts
        sweep_s
    """,
    "Devices": """
        devices hosts host_number hosts_port hosts_key device_peak_flops relative_speed sample_only
        worker_name alive_file
    """,
    "Memory": """
        device_memory_bytes adapter_device_bytes adapter_host_bytes body_memory_bytes
        tenant_body_memory_bytes text_memory_bytes
    """,
    "Batching": "batch_tokens chunk_tokens remat request_slots sample_rows slice_s",
    "Compilation": "compile_ahead compile_cache decompositions",
    "Recovery": "point_s point_steps",
    "Tenants": "tenant_weights tenant_budgets",
    "Limits": """
        max_body_bytes max_decompressed_bytes max_polls_per_tenant max_model_jobs max_model_bytes
        max_tenant_jobs max_tenant_bytes max_tenant_models max_waiting_models max_server_jobs
        max_server_bytes max_tenant_refusals max_tenant_sessions max_server_sessions
        max_tenant_sessions_a_minute max_tenant_samplers_a_minute max_session_samplers
        max_tenant_samplers max_session_metadata_bytes max_checkpoints max_checkpoint_bytes
        max_recording_bytes
    """,
    "Times to live": """
        park_s sample_ttl_s session_ttl_s ended_session_ttl_s gap_ttl_s result_ttl_s
        recording_ttl_s unnamed_saves unnamed_save_s
    """,
    "Logs": "log_level log_format access_log otel",
}
"""The names of the settings of each group, separated by spaces."""

GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}

FIRST = frozenset(
    """
    base_model base_model_name dtype max_context_tokens max_rank host port require_keys data_dir
    store devices device_memory_bytes sample_rows log_level
    """.split()
)
"""The settings that most services set, which ``--help`` shows. ``--help-all`` shows all."""
