"""The scopes of each route that needs a key: a key needs any one of them.

Reading, and routes that both training and sampling need (sessions, results), are open to either
scope. A key that may only sample can change no model and no checkpoint.
"""

from tuneserve_engine.core.records import Scope
from tuneserve_server.errors import ScopeMissing

_TRAIN = frozenset({Scope.TRAIN})
_SAMPLE = frozenset({Scope.SAMPLE})
_ADMIN = frozenset({Scope.ADMIN})
_EITHER = _TRAIN | _SAMPLE
_ANY = _EITHER | {Scope.ADMIN}  # there, an admin key may see all tenants
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

SCOPES: dict[str, frozenset[Scope]] = {
    "POST /client/config": _EITHER,
    "POST /client/dynamic_config": _EITHER,
    "POST /telemetry": _EITHER,
    "GET /get_server_capabilities": _EITHER,
    "POST /create_session": _EITHER,
    "POST /session_heartbeat": _EITHER,
    "POST /sessions/{session_id}/finish": _EITHER,  # a session with models needs train
    "POST /create_model": _TRAIN,
    "POST /get_info": _EITHER,
    "POST /forward_backward": _TRAIN,
    "POST /create_custom_loss": _TRAIN,
    "POST /optim_step": _TRAIN,
    "POST /save_weights": _TRAIN,
    "POST /save_weights_for_sampler": _TRAIN,
    "POST /save_weights_external": _TRAIN,
    "POST /load_weights": _TRAIN,
    "POST /copy_weights": _TRAIN,
    "POST /weights_info": _EITHER,
    "POST /create_sampling_session": _SAMPLE,
    "POST /join_sampling_session": _SAMPLE,
    "GET /samplers/{sampler_id}": _EITHER,
    "POST /asample": _SAMPLE,
    "POST /retrieve_future": _EITHER,
    "POST /retrieve_futures": _SAMPLE,
    "POST /cancel_future": _SAMPLE,
    "GET /training_runs": _ANY,
    "GET /training_runs/search": _EITHER,
    "GET /training_runs/{model_id}": _ANY,
    "PATCH /training_runs/{model_id}": _TRAIN,
    "GET /training_runs/{model_id}/events": _EITHER,
    "POST /training_runs/{model_id}/events": _TRAIN,
    "GET /training_runs/{model_id}/checkpoints": _EITHER,
    "GET /checkpoints": _ANY,
    "POST /checkpoints/import": _TRAIN,
    "POST /checkpoints/search": _EITHER,
    "POST /external_weights_upload_start": _TRAIN,
    "POST /external_weights_upload_finish": _TRAIN,
    f"DELETE {_CHECKPOINT}": _TRAIN,
    f"PUT {_CHECKPOINT}/ttl": _TRAIN,
    f"POST {_CHECKPOINT}/publish": _TRAIN,
    f"DELETE {_CHECKPOINT}/publish": _TRAIN,
    f"GET {_CHECKPOINT}/external_weights_urls": _EITHER,
    f"GET {_CHECKPOINT}/archive": _EITHER,
    "GET /tokenizer": _EITHER,
    "GET /usage": _EITHER,
    "GET /live": _ANY,
    "GET /live/runs": _ANY,
    "GET /live/runs/{model_id}": _ANY,
    "GET /training_runs/{model_id}/curve": _EITHER,
    "GET /requests/{request_id}": _EITHER,
    "POST /sessions/search": _ANY,
    "PUT /sessions/{session_id}/project": _EITHER,
    "GET /sessions/{session_id}/trace_export": _EITHER,
    "POST /auth/token": _ANY,
    "GET /auth/apikey/me": _ANY,
    "DELETE /auth/apikey/me": _ANY,
    "GET /audit": _ADMIN,
    "GET /billing/usage/events": _ANY,
    "GET /billing/usage/checkpoints/current": _ANY,
    "GET /sessions": _ANY,
    "GET /sessions/{session_id}": _ANY,
    "POST /v1/completions": _SAMPLE,
    "POST /v1/chat/completions": _SAMPLE,
    "POST /v1/messages": _SAMPLE,
    "POST /v1/messages/count_tokens": _SAMPLE,
    "POST /v1/responses": _SAMPLE,
    "GET /v1/models": _EITHER,
    "GET /v1/models/{model}": _EITHER,
}
"""The scopes by method and path; paths under ``/api/v1`` are without that prefix."""


def need(wanted: frozenset[Scope], scopes: frozenset[Scope]) -> None:
    """Raise ``ScopeMissing`` if a key with ``scopes`` has none of the ``wanted`` scopes."""
    if scopes.isdisjoint(wanted):
        raise ScopeMissing(
            f"this needs a key with the scope {' or '.join(sorted(wanted))}; yours has "
            f"{' and '.join(sorted(scopes)) or 'no scope'}; ask the operator for another key"
        )
