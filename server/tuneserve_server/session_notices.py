"""The messages that a client gets with its new session, which SDKs show their users."""

from tuneserve_engine.core.records import Scope
from tuneserve_server.base_models import failing, warming
from tuneserve_server.dependencies import Caller

_NEARLY = 0.8
"""The share of a budget from which on its tenant is warned."""


async def notices(caller: Caller) -> tuple[str | None, str | None]:
    """Return what may slow the client down, and what may stop it; None if there is nothing."""
    offered = await caller.served.offered()
    told = [
        f"{each.info.name} is warming up ({progress}); requests run meanwhile, and wait for their "
        "own programs only"
        for each in offered
        if (progress := warming(each)) is not None
    ]
    warnings = [f"{each.info.name}: {text}" for each in offered if (text := failing(each))]
    if not any(each.workers for each in offered):
        warnings.append("no worker is ready: requests are accepted and wait for one")
    elif Scope.TRAIN in caller.scopes and not any(each.trainers for each in offered):
        warnings.append("no worker that trains is ready: training is accepted and waits for one")
    warnings += filter(None, (await _of_budget(caller), caller.disk.warning()))
    return "; ".join(told) or None, "; ".join(warnings) or None


async def _of_budget(caller: Caller) -> str | None:
    budget = await caller.budgets.told(caller.tenant)
    if budget is None or budget.used_device_ms < _NEARLY * budget.limit_device_ms:
        return None
    limit_s = budget.limit_device_ms / 1000
    if budget.used_device_ms >= budget.limit_device_ms:
        spent = "spent"
    else:
        spent = f"spent to {100 * budget.used_device_ms / budget.limit_device_ms:.0f} %"
    return (
        f"your budget of {limit_s:g} device seconds a day is {spent}; the next day begins at "
        f"{budget.resets:%H:%M} UTC"
    )
