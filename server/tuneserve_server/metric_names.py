"""The names and descriptions of the API process's metrics, those of the store included.

The workers' metrics are in ``tuneserve_engine.telemetry.metric_names``.
"""

PREFIX = "tuneserve_"

HTTP_METRICS = {
    "http_requests_total": "The number of requests answered by this API process, by method, route "
    "and status.",
    "http_request_duration_seconds": "The time that these requests took, answers included. A poll "
    "takes as long as it is held.",
    "body_memory_used_bytes": "The part of `body_memory_bytes` that incoming request bodies take.",
    "text_memory_used_bytes": "The part of `text_memory_bytes` that texts being tokenized take.",
}
STORE_METRICS = {
    "store_unfinished_requests": "The number of requests that have not ended.",
    "store_logged_requests": "The number of ended requests that are stored for replay in case "
    "their worker dies. Each recovery point makes older ones unnecessary.",
    "store_recovery_points": "The number of recovery points of all models.",
}
FILES_METRICS = {
    "unused_files_kept": "1 while unused files are kept until the operator decides: `healthz` "
    "gives the reason.",
}
TENANT_METRICS = {
    "tenant_device_seconds_total": "The device time that the tenant's requests took.",
    "tenant_unfinished_requests": "The number of the tenant's requests that have not ended.",
}
"""The metrics by tenant, shown with the setting ``tenant_metrics``."""

API_METRICS = HTTP_METRICS | STORE_METRICS | FILES_METRICS | TENANT_METRICS
