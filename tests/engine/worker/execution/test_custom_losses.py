"""Custom losses beside the losses of the service: gradients, neighbours, interruptions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.custom_loss.traced import Loss, text_of, theirs
from tests.engine.worker.execution.test_executor import DATUM, GOOD, World, training_body
from tests.engine.worker.execution.test_gradients import Noting, assert_same_gradient
from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.custom_loss import tape
from tuneserve_engine.store.files import new_file_id

OTHER = {"tokens": [4, 5, 6], "target_tokens": [5, 6, 7]}
LOGPROBS = np.array([-0.5, -0.75], "f4")  # of DATUM: see the fake backend
OF_OTHER = np.array([-2 / 8, -4 / 8, -6 / 8], "f4")


def squares(logprobs: Any) -> Any:
    total = (logprobs * logprobs.exp()).sum()
    return total**2, {"custom/total:sum": total, "custom/length:mean": (logprobs < 0).sum()}


def failing(logprobs: Any) -> Any:
    return logprobs[2:].sum() / logprobs[7], {}


def custom_body(loss: Loss, *data: dict[str, Any], **fields: Any) -> bytes:
    request = wire.ForwardBackwardRequest.FromString(training_body(*data, loss="custom", **fields))
    request.loss_fn_config_v2["loss_id"].text = "s:loss:0"
    request.loss_fn_config_v2["graph"].text = text_of(loss, {"logprobs": 1})
    return request.SerializeToString()


@pytest.fixture
def new_world(tmp_path: Path) -> Callable[[], World]:
    def make() -> World:
        world = World(tmp_path / new_file_id(), Noting())
        for name in "ab":
            world.create(name)
        return world

    return make


def weighted(*data: tuple[dict[str, Any], np.ndarray[Any, Any]]) -> bytes:
    """A cross-entropy request with minus the gradients of ``squares`` as weights."""
    return training_body(
        *({**each, "weights": -theirs(squares, lp, {})[1]} for each, lp in data),
    )


def test_a_custom_loss_has_the_gradient_of_the_weighted_cross_entropy(
    new_world: Callable[[], World],
) -> None:
    custom, twin = new_world(), new_world()
    (outcome,) = custom.run(custom.gradient(custom_body(squares, DATUM, OTHER), "a"))
    twin.run(twin.gradient(weighted((DATUM, LOGPROBS), (OTHER, OF_OTHER)), "a"))
    mine = custom.backend.adapter_state("a", optimizer=True, accumulator=True).accumulator
    theirs_ = twin.backend.adapter_state("a", optimizer=True, accumulator=True).accumulator
    assert mine
    for name, tensor in mine.items():
        np.testing.assert_allclose(tensor, theirs_[name], rtol=1e-6)
    output = wire.ForwardBackwardOutput.FromString(outcome.body)
    values = [theirs(squares, each, {}) for each in (LOGPROBS, OF_OTHER)]
    assert output.metrics["loss:sum"] == pytest.approx(sum(value for value, _, _ in values))
    assert output.metrics["custom/total:sum"] == pytest.approx(
        sum(metrics["custom/total:sum"] for _, _, metrics in values)
    )
    assert output.metrics["custom/length:mean"] == 2.5
    data = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    np.testing.assert_array_equal(data, [*LOGPROBS, *OF_OTHER])
    assert outcome.changed and outcome.point is not None
    assert (outcome.point.loss_sum, outcome.point.weight) == (output.metrics["loss:sum"], 0.0)


def test_a_forward_pass_of_a_custom_loss_changes_nothing(new_world: Callable[[], World]) -> None:
    world = new_world()
    (outcome,) = world.run(world.gradient(custom_body(squares, DATUM, forward_only=True), "a"))
    output = wire.ForwardBackwardOutput.FromString(outcome.body)
    assert output.metrics["loss:sum"] == pytest.approx(theirs(squares, LOGPROBS, {})[0])
    assert not outcome.changed
    state = world.backend.adapter_state("a", optimizer=True, accumulator=True)
    assert not any(tensor.any() for tensor in state.accumulator.values())


def test_neighbours_of_custom_losses_keep_their_bits(new_world: Callable[[], World]) -> None:
    together, alone = new_world(), new_world()
    bodies = [GOOD, custom_body(failing, DATUM), custom_body(squares, DATUM), GOOD]
    bodies += [custom_body(squares, OTHER), training_body(DATUM, forward_only=True)]
    models = ["a", "a", "b", "b", "b", "a"]
    one, failed, *rest = together.run(
        *[together.gradient(*each) for each in zip(bodies, models, strict=True)]
    )
    assert failed.rejection is not None and failed.rejection.category == "user"
    assert "data[0], custom loss: node getitem" in failed.rejection.message
    asked = [each for i, each in enumerate(zip(bodies, models, strict=True)) if i != 1]
    for outcome, given in zip([one, *rest], asked, strict=True):
        assert outcome.body == alone.run(alone.gradient(*given))[0].body
    assert_same_gradient(together, alone, "ab")


def test_a_replay_has_the_same_bits(new_world: Callable[[], World]) -> None:
    first, second = new_world(), new_world()
    for world in (first, second):
        world.run(world.gradient(custom_body(squares, DATUM, OTHER), "a"))
    assert_same_gradient(first, second, "a")


def test_other_batches_run_while_a_graph_is_evaluated(
    new_world: Callable[[], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupting batch may have a custom loss, too."""
    monkeypatch.setattr(tape, "PAUSE_UNITS", 1)
    world, alone = new_world(), new_world()
    inner: list[bytes] = []

    def interrupt() -> None:
        if not inner:
            inner.append(b"")
            (outcome,) = world.run(world.gradient(custom_body(squares, OTHER), "b"))
            inner[0] = outcome.body

    job = world.gradient(custom_body(squares, DATUM), "a")
    (outcome,) = world.executor.execute_batch([job], on_micro_batch_done=interrupt).outcomes()
    assert outcome.body == alone.run(alone.gradient(custom_body(squares, DATUM), "a"))[0].body
    assert inner == [alone.run(alone.gradient(custom_body(squares, OTHER), "b"))[0].body]
    assert_same_gradient(world, alone, "ab")


def test_a_loss_whose_gradient_is_not_finite_accumulates_nothing(
    new_world: Callable[[], World],
) -> None:
    def infinite(logprobs: Any) -> Any:
        return torch.sqrt(logprobs - logprobs).sum(), {}

    world = new_world()
    (outcome,) = world.run(world.gradient(custom_body(infinite, DATUM), "a"))
    assert outcome.rejection is not None
    assert "nothing was accumulated" in outcome.rejection.message
    state = world.backend.adapter_state("a", optimizer=True, accumulator=True)
    assert not any(tensor.any() for tensor in state.accumulator.values())
