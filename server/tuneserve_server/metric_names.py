"""The names and meanings of the API process's metrics, those of the store included.

The workers' metrics are in ``tuneserve_engine.telemetry.metric_names``.
"""

PREFIX = "tuneserve_"

HTTP_FIGURES = {
    "http_requests_total": "Requests answered by this API process, by method, route and status.",
    "http_request_duration_seconds": "How long they took, answers included; polls are held.",
    "body_memory_used_bytes": "What request bodies on their way in take of `body_memory_bytes`.",
    "text_memory_used_bytes": "What texts of which tokens are made take of `text_memory_bytes`.",
}
STORE_FIGURES = {
    "store_unfinished_requests": "Requests that have not ended.",
    "store_logged_requests": "Requests that have ended and are kept, to be done again if their "
    "worker dies: recovery points make them fewer.",
    "store_recovery_points": "Recovery points of all models.",
}
FILES_FIGURES = {
    "unused_files_kept": "1 while unused files are kept until the operator has decided: `healthz` "
    "says why.",
}
TENANT_FIGURES = {
    "tenant_device_seconds_total": "Time of the device that requests of the tenant took.",
    "tenant_unfinished_requests": "Its requests that have not ended.",
}
"""The metrics by tenant, shown with the setting ``tenant_metrics``."""

API_FIGURES = HTTP_FIGURES | STORE_FIGURES | FILES_FIGURES | TENANT_FIGURES
