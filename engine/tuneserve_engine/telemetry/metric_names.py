"""The figures that a worker reports while it runs: their names and meanings.

Figures that end in ``_total`` only grow while the process lives; the others go up and down.
"""

FIGURES = {
    "ready": "1 once every program is compiled or has failed; requests are taken before, too.",
    "programs": "Programs that requests can need.",
    "programs_compiled": "Those that are compiled.",
    "programs_failed": "Those that cannot be: requests that need one fail.",
    "compilations_after_ready_total": "Programs compiled after ready: none is expected.",
    "units_total": "Units of work done.",
    "tokens_trained_total": "Tokens of forward_backward requests, without padding.",
    "tokens_computed_total": "Tokens computed for them, padding included.",
    "policy_tokens_total": "Tokens of policy losses with an advantage other than 0.",
    "policy_logprob_gap_total": "Sum over them of how far the trainer's logprob is from the one "
    "that the token came with: what sampler and trainer differ by, and what training changed "
    "since.",
    "tokens_sampled_total": "Tokens drawn for samples.",
    "lane_steps_total": "Steps of all lanes that decode, idle ones included: how full they were is "
    "tokens_sampled_total over this.",
    "prompt_tokens_total": "Tokens of samples' prompts, once per request.",
    "prompt_tokens_read_total": "Those computed; the others somebody had sent before.",
    "adapters": "Adapters that models of this worker have.",
    "adapters_on_device": "Those in the device's memory.",
    "adapters_paged_in_total": "Adapters brought into the device's memory.",
    "adapters_paged_out_total": "Adapters moved out of it.",
    "points_unreadable_total": "Recovery points that were missing or damaged when a model was "
    "brought back: an older point and the log took their place, or the model was lost; see the "
    "worker's log.",
    "weights_to_decompose": "Weights of the base model whose directions adapters of kind osft "
    "share, while they are computed; 0 at other times.",
    "weights_decomposed": "Those of them that are done.",
    "device_seconds_total": "Time that units took on the device.",
    "device_seconds_overhead_total": "The part of it that no request is charged with: replay, "
    "passes that failed, samples that were given up when a worker stopped.",
    "host_seconds_total": "Time in which there was work and the device had nothing to do: the "
    "host was at it, or adapters were on their way.",
    "model_flops_total": "Model FLOPs of requests that have ended: 4 per token and parameter for "
    "gradients, 2 for what is only computed forward.",
    "device_peak_flops": "What the device can do in a second, as the setting of that name says; 0 "
    "if it does not.",
    "memory_base_model_bytes": "Of the device's memory, planned for the base model's weights; this "
    "and the next four are all that the worker takes.",
    "memory_training_bytes": "Planned for what training computes.",
    "memory_sampling_bytes": "Planned for what sampling reads, keeps and computes.",
    "memory_adapters_bytes": "Planned for adapters with their moments and gradients.",
    "memory_free_bytes": "Kept free: what programs need besides, and fragmentation.",
    "page_wait_seconds_total": "Time that units waited for their adapters, part of "
    "tuneserve_host_seconds_total.",
}
"""The meanings of the figures, by the names under which a worker reports them."""
