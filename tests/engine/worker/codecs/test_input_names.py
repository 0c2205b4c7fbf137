"""Misspelt input names are refused, and ignored ones are logged once."""

import logging

import pytest

from tuneserve_client.wire.proto import wire_pb2 as wire
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.worker.codecs.input_names import check_unread

READ = ("target_tokens", "weights")
KNOWN = (*READ, "advantages", "logprobs")


def datum(*names: str) -> wire.Datum:
    return wire.Datum(loss_fn_inputs={name: wire.Tensor() for name in names})


def check(data: list[wire.Datum]) -> None:
    unread = {name for each in data for name in each.loss_fn_inputs} - {*READ}
    check_unread(unread, data, "cross_entropy", READ, KNOWN)


def test_unread_names_are_logged_once_however_many_datums_have_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    check([datum("advantages", "zzz")] * 3)
    (record,) = caplog.records
    assert record.getMessage() == (
        "cross_entropy does not read 'advantages', 'zzz' in loss_fn_inputs; ignored"
    )


@pytest.mark.parametrize(
    "name", ["wieghts", "weight", "wghts", "Weights", "weights_", "target-tokens"]
)
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(name: str) -> None:
    meant = "weights" if "w" in name.lower() else "target_tokens"
    with pytest.raises(UserError, match=rf"data\[1\].*{name}.*did you mean '{meant}'\?"):
        check([datum(), datum(name)])


@pytest.mark.parametrize("name", ["target_mask", "token_weights", "ref_weights", "w" * 33])
def test_a_name_that_is_composed_or_far_from_any_other_is_ignored(name: str) -> None:
    check([datum(name)])


def test_beside_the_right_name_a_similar_one_is_ignored() -> None:
    check([datum("weights", "wieghts")])
