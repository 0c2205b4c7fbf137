"""Which names look like a misspelling of another."""

import pytest

from tuneserve_engine.core.misspelt import meant

KNOWN = ("weights", "target_tokens", "temperature", "top_p", "beta2")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("wieghts", "weights"),
        ("weight", "weights"),
        ("Weights_", "weights"),
        ("targetTokens", "target_tokens"),
        ("tempreature", "temperature"),
    ],
)
def test_a_letter_swapped_left_out_or_put_in_and_another_style_are_misspellings(
    name: str, known: str
) -> None:
    assert meant(name, KNOWN) == known


@pytest.mark.parametrize("name", ["top_k", "beta3", "ref_weights", "token_weights_2", "w" * 33])
def test_names_that_may_be_meant_are_not(name: str) -> None:
    assert meant(name, KNOWN) is None
