"""Checks of futures: their order, their repetition and their failures."""

import time

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_server.conformance.checks import SDK, TRAINING, Checks
from tuneserve_server.conformance.target import (
    POLL_S,
    GradientOutput,
    ServerUnderTest,
    TestedModel,
    expect,
    is_near,
    is_pending,
)
from tuneserve_server.conformance.tensors import datum, floats, integers

CHECKS = Checks()


def example(tokens: int = 6, weight: float = 1.0) -> wire.Datum:
    """Return a datum of a few tokens with one weight everywhere."""
    ids = [5 + n % 30 for n in range(tokens + 1)]
    weights = floats([weight] * tokens)
    return datum(ids[:-1], target_tokens=integers(ids[1:]), weights=weights)


@CHECKS.rule(SDK)
def protobuf_results(target: ServerUnderTest) -> None:
    """Results of forward_backward are protobuf; JSON means a server from before it."""
    output = target.new_model().gradient([example()])
    expect(output.logprobs, "the output has no logprobs")


@CHECKS.rule(SDK)
def metric_names(target: ServerUnderTest) -> None:
    """The name of each metric of forward_backward has exactly one colon; loss:sum is there."""
    output = target.new_model().gradient([example()])
    for name in output.metrics:
        expect(name.count(":") == 1, f"the metric {name!r} has {name.count(':')} colons")
    expect(output.loss > 0, f"loss:sum of positive weights is {output.loss}")


@CHECKS.rule(SDK)
def no_error_in_success(target: ServerUnderTest) -> None:
    """A successful result has no key named error, not even null, and no metric that is null."""
    model = target.new_model()
    model.gradient([example()])
    body = target.result(model.submit_step())
    expect("error" not in body, "the result has a key named error")
    for name, value in (body.get("metrics") or {}).items():
        expect(isinstance(value, int | float), f"the metric {name!r} is {value!r}")


@CHECKS.rule(SDK)
def order(target: ServerUnderTest) -> None:
    """Requests run by their seq_id: the first chunk of a call arrives after the others."""
    model = target.new_model()
    step = model.submit_step(seq_id=3)
    second = model.submit_gradient([example(7)], seq_id=2)
    first = model.submit_gradient([example(5)], seq_id=1)
    for request_id in (first, second):
        target.message(request_id, wire.ForwardBackwardOutput)
    target.result(step)
    model.next_seq = 4
    after = model.gradient([example()], forward_only=True).loss
    expected = _trained_in_order(target)
    expect(
        is_near(after, expected),
        f"the loss afterwards is {after:.6g}; sent in order it is {expected:.6g}",
    )


def _trained_in_order(target: ServerUnderTest) -> float:
    model = target.new_model()
    model.gradient([example(5)])
    model.gradient([example(7)])
    model.step()
    return model.gradient([example()], forward_only=True).loss


@CHECKS.rule(SDK)
def polls_end_in_time(target: ServerUnderTest) -> None:
    """A poll of a request that waits for an earlier one ends before the client gives up at 45 s."""
    model = target.new_model()
    waiting = model.submit_gradient([example()], seq_id=2)
    began_s = time.monotonic()
    response = target.poll(waiting)
    took_s = time.monotonic() - began_s
    expect(took_s < POLL_S, f"the poll took {took_s:.0f} s")
    expect(is_pending(response), f"a waiting request answers {response.status_code}")
    target.message(model.submit_gradient([example()], seq_id=1), wire.ForwardBackwardOutput)
    target.message(waiting, wire.ForwardBackwardOutput)


@CHECKS.rule(SDK)
def repetition(target: ServerUnderTest) -> None:
    """A request that is sent again has the same request_id, and runs once."""
    model, once = target.new_model(), target.new_model()
    for number in (1, 2):
        request_ids = {model.submit_gradient([example()], seq_id=number) for _ in range(2)}
        expect(len(request_ids) == 1, "a repeated request has another request_id")
        once.gradient([example()])
    norms = [target.result(each.submit_step(seq_id=3)).get("metrics") for each in (model, once)]
    model.next_seq = once.next_seq = 4
    losses = [each.gradient([example()], forward_only=True).loss for each in (model, once)]
    expect(
        is_near(*losses),
        f"after repeated requests the loss is {losses[0]:.6g}, not {losses[1]:.6g}",
    )
    expect(norms[0] == norms[1] or not norms[0], "repeated requests changed the gradient's norm")


@CHECKS.rule(SDK)
def results_can_be_read_again(target: ServerUnderTest) -> None:
    """A result can be read more than once, since an answer may be lost on its way."""
    model = target.new_model()
    request_id = model.submit_gradient([example()])
    one = GradientOutput(target.message(request_id, wire.ForwardBackwardOutput))
    other = GradientOutput(target.message(request_id, wire.ForwardBackwardOutput))
    expect(one.logprobs == other.logprobs, "the second reading has other numbers")


@CHECKS.rule(SDK)
def failures(target: ServerUnderTest) -> None:
    """A bad request fails in its future, with 200, error and category, and spends its seq_id."""
    model = target.new_model()
    for request_id in (
        model.submit_gradient([example()], "no_such_loss"),
        model.submit_gradient([datum([5, 6, 7], target_tokens=integers([6]))]),
        model.submit_gradient([datum([5, 2**31 - 1], target_tokens=integers([6, 7]))]),
    ):
        body = target.failure(request_id)
        expect(body.get("category") == "user", f"the category is {body.get('category')!r}")
    expect(model.gradient([example()]).logprobs, "the next request does not run")


@CHECKS.rule(TRAINING)
def taken_names(target: ServerUnderTest) -> None:
    """A checkpoint's name that is taken is a user error of the future; overwrite replaces it."""
    model: TestedModel = target.new_model()
    path = model.saved("save_weights")
    name = path.rpartition("/")[2]
    body = target.failure(model.submit_save("save_weights", name))
    expect(body.get("category") == "user", f"the category is {body.get('category')!r}")
    again = model.saved("save_weights", name, overwrite=True)
    expect(again == path, f"the path is {again!r} after overwriting {path!r}")
