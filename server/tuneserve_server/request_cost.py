"""The cost and the timings of a request, as response bodies and as headers of its result."""

from tuneserve_client.wire import types
from tuneserve_engine.core.usage import Totals, Usage


def timings(usage: Usage) -> types.RequestTimings:
    seconds = {
        "total_ms": usage.total_s,
        "held_ms": max(usage.total_s - usage.queued_s - usage.ran_s, 0.0),
        "queue_ms": usage.queued_s,
        "run_ms": usage.ran_s,
        "pack_ms": usage.packed_s,
        "device_ms": usage.device_s,
        "transfer_ms": usage.transfer_s,
    }
    return types.RequestTimings(**{name: round(1000 * each, 3) for name, each in seconds.items()})


def cost(usage: Usage) -> types.RequestCost:
    return types.RequestCost(
        trained_tokens=usage.trained_tokens,
        prompt_tokens=usage.prompt_tokens,
        sampled_tokens=usage.sampled_tokens,
        padded_tokens=usage.padded_tokens,
        flops=usage.flops,
        behind=usage.behind,
        behind_own=usage.behind_own,
        others=usage.others,
    )


def totals(of: Totals) -> types.UsageTotals:
    return types.UsageTotals(
        requests=of.requests,
        device_ms=round(1000 * of.device_s, 3),
        trained_tokens=of.trained_tokens,
        prompt_tokens=of.prompt_tokens,
        sampled_tokens=of.sampled_tokens,
        padded_tokens=of.padded_tokens,
        flops=of.flops,
    )


def headers(usage: Usage | None) -> dict[str, str]:
    """Return ``Server-Timing`` (W3C, shown by browsers) and the cost as ``name=number`` pairs."""
    if usage is None:
        return {}
    told = [(name.removesuffix("_ms"), ms) for name, ms in timings(usage)]
    spent = [(name, getattr(usage, name)) for name in types.RequestCost.model_fields]
    return {
        "Server-Timing": ", ".join(f"{name};dur={ms}" for name, ms in told),
        "X-Tuneserve-Cost": ", ".join(f"{name}={number:.0f}" for name, number in spent),
    }
