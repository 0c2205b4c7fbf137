"""How strictly request bodies are read."""

import pytest
from pydantic import Field, ValidationError

from tuneserve_client.wire.body import MAX_INT32, Metadata, ModelSeq, Request, Response


class Inner(Request):
    size: int = 0


class Body(Request):
    seq_id: ModelSeq = 1
    inner: Inner = Inner()
    numbers: list[int] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class Answer(Response):
    name: str | None = None


def test_unknown_fields_are_named_with_their_place_and_a_type_is_not() -> None:
    body = Body.model_validate({"new": 1, "type": "body", "inner": {"newer": 2, "size": 3}})
    assert body.unknown_fields() == [
        ("", "new", {"seq_id", "numbers", "metadata"}),
        ("inner.", "newer", set()),
    ]


def test_a_list_has_one_error_however_many_elements_are_wrong() -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"numbers": ["a"] * 1000})
    assert caught.value.error_count() == 1
    assert caught.value.errors()[0]["loc"] == ("numbers", 0)


def test_numbers_and_booleans_in_metadata_become_texts() -> None:
    sent = {"text": "a", "number": 3, "fraction": 0.5, "flag": True}
    assert Body.model_validate({"metadata": sent}).metadata == {
        "text": "a",
        "number": "3",
        "fraction": "0.5",
        "flag": "True",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"a": None}},
        {"metadata": {"a": ["b"]}},
        {"metadata": {str(n): "" for n in range(257)}},
        {"seq_id": 0},
        {"seq_id": MAX_INT32 + 1},
        {"seq_id": "1"},
        {"inner": {"size": 1.5}},
    ],
)
def test_a_value_of_another_type_or_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Body.model_validate(wrong)


def test_an_answer_ignores_unknown_fields() -> None:
    assert Answer.model_validate({"name": "a", "new": 1}) == Answer(name="a")
