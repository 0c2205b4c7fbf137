"""The routes of usage, training curves and single requests."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tuneserve_client.wire import run_types, types
from tuneserve_client.wire.body import MAX_INT64
from tuneserve_engine.core.records import ModelRecord
from tuneserve_engine.core.usage import CurvePoint, TenantUsage
from tuneserve_server import request_cost
from tuneserve_server.dependencies import CallerDep, reply
from tuneserve_server.errors import UnknownResource
from tuneserve_server.http.openapi import fails

router = APIRouter()

Since = Annotated[
    int, Query(ge=0, le=2**40, description="Unix seconds; the whole day (UTC) counts.")
]
After = Annotated[
    int, Query(ge=0, le=MAX_INT64, description="Return only points after this seq_id.")
]


@router.get("/usage", response_model=types.UsageResponse)
async def usage(caller: CallerDep, since: Since = 0) -> Response:
    """Return the usage of the caller's requests, in total and by model."""
    (used,) = await caller.store.usage(caller.tenant, since) or [TenantUsage(caller.tenant)]
    by_model = [
        types.ModelUsage(name=name, **request_cost.totals(of).model_dump())
        for name, of in used.by_model.items()
    ]
    return reply(
        types.UsageResponse(
            tenant=caller.tenant,
            total=request_cost.totals(used.total),
            by_model=by_model,
            budget=await caller.budgets.told(caller.tenant),
        )
    )


@router.get(
    "/training_runs/{model_id}/curve",
    response_model=run_types.CurveResponse,
    responses=fails(UnknownResource),
)
async def curve(model_id: str, caller: CallerDep, after: After = 0) -> Response:
    """Return the losses and optimizer steps of a model, in the order of its requests."""
    model = await caller.owned(ModelRecord, model_id)
    points = await caller.store.curve(model.key, after=after)
    return reply(run_types.CurveResponse(points=[point_body(each) for each in points]))


def point_body(point: CurvePoint) -> run_types.CurvePointResponse:
    return run_types.CurvePointResponse(
        kind=point.kind,
        seq_id=point.position,
        time=datetime.fromtimestamp(point.time_s, UTC),
        loss_sum=point.loss_sum,
        tokens=point.tokens,
        weight=point.weight,
        step=point.step,
        learning_rate=point.learning_rate,
        grad_norm=point.grad_norm,
    )


@router.get(
    "/requests/{request_id}", response_model=types.RequestResponse, responses=fails(UnknownResource)
)
async def request(request_id: str, caller: CallerDep) -> Response:
    """Return the state of a request and, once it has run, its timings and cost."""
    found = await caller.store.request(request_id)
    if found is None or found.tenant != caller.tenant:
        raise UnknownResource(
            f"this request does not exist, or it is not yours (your tenant: {caller.tenant})"
        )
    usage = found.usage
    return reply(
        types.RequestResponse(
            request_id=request_id,
            kind=found.kind.value,
            status="failed" if found.failed else found.state,
            timings=None if usage is None else request_cost.timings(usage),
            cost=None if usage is None else request_cost.cost(usage),
        )
    )
