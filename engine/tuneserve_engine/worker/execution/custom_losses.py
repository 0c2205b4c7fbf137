"""Requests of custom losses: a forward pass, the graph on the host, and a backward pass.

The backward pass is that of ``cross_entropy``, weighted by minus the derivative of the custom loss
by each logprob: both losses have the same gradient. So a custom loss needs no program of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tuneserve_engine.backend.base import DeviceFailed, FloatArray
from tuneserve_engine.custom_loss.evaluate import LossDatum, LossResult, evaluate
from tuneserve_engine.worker.codecs.training import TrainingData
from tuneserve_engine.worker.execution.gradients import (
    GradientRequest,
    GradientRunner,
    Results,
    deferred,
)
from tuneserve_engine.worker.execution.packing import unpack

_SURROGATE = "cross_entropy"


def run_requests(
    runner: GradientRunner,
    requests: Sequence[GradientRequest],
    on_micro_batch_done: Callable[[], None],
    halvings: int,
) -> Results:
    """Return the result of every request, of custom losses and others.

    The graphs are evaluated one after another. Meanwhile ``on_micro_batch_done`` is called, so that
    batches of other tenants can run. A graph that fails is the failure of its request alone.
    """
    custom = [each for each in requests if each.request.data.custom is not None]
    if not custom:
        return runner.run_requests(requests, on_micro_batch_done, halvings)
    scored = runner.run_passes(
        [_with_data(each, _forward(each.request.data)) for each in custom],
        on_micro_batch_done,
        halvings,
    )
    results: Results = {}
    ready = {}
    for each in custom:
        request_id, data = each.job.request_id, each.request.data
        finished = scored[request_id]
        if isinstance(finished, Exception):
            results[request_id] = finished
            continue
        try:
            logprobs, _ = unpack(finished.packed, finished.result.outputs, finished.member, data)
            with runner.timer.charge({request_id: 1.0}):
                computed = _computed(data, logprobs, on_micro_batch_done)
        except DeviceFailed:
            raise
        except Exception as error:
            results[request_id] = error
            continue
        if data.forward_only:
            results[request_id] = deferred(finished, replace(data, computed=computed), each.job)
        else:
            ready[request_id] = _with_data(each, _surrogate(data, computed))
    # In the order of the requests: a model's gradients are added in the order of its log.
    left = [
        ready.get(each.job.request_id, each)
        for each in requests
        if each.request.data.custom is None or each.job.request_id in ready
    ]
    if left:
        results |= runner.run_requests(left, on_micro_batch_done, halvings)
    return results


def _with_data(request: GradientRequest, data: TrainingData) -> GradientRequest:
    return request._replace(request=replace(request.request, data=data))


def _forward(data: TrainingData) -> TrainingData:
    return replace(data, loss=_SURROGATE, forward_only=True)


def _computed(
    data: TrainingData, logprobs: Sequence[FloatArray], pause: Callable[[], None]
) -> LossResult:
    assert data.custom is not None
    datums = [
        LossDatum(values, datum.named) for values, datum in zip(logprobs, data.data, strict=True)
    ]
    return evaluate(data.custom, datums, gradient=not data.forward_only, pause=pause)


def _surrogate(data: TrainingData, computed: LossResult) -> TrainingData:
    """Return the request with the weights that give the gradient of the custom loss."""
    weighted = [
        replace(datum, weights=-gradient.reshape(datum.targets.shape), named={})
        for datum, gradient in zip(data.data, computed.gradients, strict=True)
    ]
    return replace(data, loss=_SURROGATE, data=weighted, computed=replace(computed, gradients=[]))
