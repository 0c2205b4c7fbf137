"""Requests of custom losses, as the official SDK sends them."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

from tests.engine.custom_loss import losses
from tests.engine.custom_loss.traced import text_of
from tests.engine.worker.codecs.test_training import INFO, datum, message
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.worker.codecs import training
from tuneserve_engine.worker.codecs.training import decode_request

RANKS = {"logprobs": 2, "ref": 2, "scale": 0}


def body(*data: types.Datum, ranks: dict[str, int] = RANKS, **texts: str) -> bytes:
    """A request of ``losses.several_targets``, with its graph where the API process puts it."""
    sent = message(*data, loss="custom", config={"loss_id": "s:loss:0", **texts})
    sent.loss_fn_config_v2["graph"].text = text_of(losses.several_targets, ranks)
    raw: bytes = sent.SerializeToString()
    return raw


def sent_datum(**changed: Any) -> types.Datum:
    inputs: dict[str, Any] = {
        "target_tokens": torch.tensor([[2, 3], [4, 5]]),
        "ref": torch.tensor([[-1.0, -2.0], [-3.0, float("-inf")]]),
        "scale": torch.tensor(0.5),
        **changed,
    }
    return datum([1, 2], **{name: each for name, each in inputs.items() if each is not None})


def test_named_inputs_are_read_in_the_ranks_that_the_loss_declares() -> None:
    decoded = decode_request(body(sent_datum()), INFO)
    assert decoded.custom is not None and decoded.custom.name == "several_targets"
    assert (decoded.loss, decoded.config) == ("custom", {})
    (only,) = decoded.data
    assert only.targets.tolist() == [[2, 3], [4, 5]]
    assert only.weights.tolist() == [[0, 0], [0, 0]]
    assert {name: each.shape for name, each in only.named.items()} == {"ref": (2, 2), "scale": ()}
    np.testing.assert_array_equal(only.named["ref"], [[-1, -2], [-3, -np.inf]])
    assert only.named["scale"] == np.float32(0.5)


def test_integers_stay_integers_and_names_of_other_losses_are_inputs_like_any_other() -> None:
    def weighted(logprobs: Any, weights: Any) -> Any:
        return (logprobs * weights).sum(), {}

    given = datum([1, 2, 3], target_tokens=[2, 3, 4], weights=torch.tensor([7, 8]))
    sent = message(given, loss="custom", config={"loss_id": "s:loss:0"})
    sent.loss_fn_config_v2["graph"].text = text_of(weighted, {"logprobs": 1, "weights": 1})
    (decoded,) = decode_request(sent.SerializeToString(), INFO).data
    assert decoded.named["weights"].dtype == np.int64
    assert decoded.named["weights"].tolist() == [7, 8]
    assert decoded.weights.tolist() == [[0], [0], [0]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ref": None}, r"data\[0\].loss_fn_inputs lacks ref"),
        ({"ref": torch.ones(2)}, r"data\[0\].ref has shape \[2\].* rank 2"),
        ({"scale": torch.ones(1)}, r"data\[0\].scale has shape \[1\].* rank 0"),
        ({"target_tokens": torch.tensor([2, 3])}, r"target_tokens has rank 1; .* rank 2"),
        ({"target_tokens": None}, "lacks target_tokens"),
    ],
)
def test_an_input_of_another_rank_is_refused_with_its_name(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        decode_request(body(sent_datum(**changed)), INFO)


def test_a_request_without_a_graph_or_with_more_config_is_refused() -> None:
    sent = message(sent_datum(), loss="custom", config={"loss_id": "s:loss:0"})
    with pytest.raises(UserError, match="no loss_id of a loss that was created"):
        decode_request(sent.SerializeToString(), INFO)
    with pytest.raises(UserError, match="key 'beta' is unknown to custom"):
        decode_request(body(sent_datum(), beta="1"), INFO)


def test_the_numbers_of_all_inputs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MAX_NAMED_ELEMENTS", 14)
    decode_request(body(sent_datum(), sent_datum()), INFO)
    with pytest.raises(UserError, match=r"data\[:3\] has 15 numbers .* up to 14; split it"):
        decode_request(body(*[sent_datum()] * 3), INFO)
