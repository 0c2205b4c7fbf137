"""Which names look like a misspelling of another."""

import pytest

from tuneserve_engine.core.misspelt import meant

LONG = "a_name_of_thirty_three_characters"
KNOWN = ("weights", "target_tokens", "temperature", "top_p", "beta2", "rank", LONG)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("wieghts", "weights"),
        ("weight", "weights"),
        ("Weights_", "weights"),
        ("targetTokens", "target_tokens"),
        ("tempreature", "temperature"),
        ("rnak", "rank"),
    ],
)
def test_a_letter_swapped_left_out_or_put_in_and_another_style_are_misspellings(
    name: str, known: str
) -> None:
    assert meant(name, KNOWN) == known


@pytest.mark.parametrize("name", ["top_k", "beta3", "rnka", "my_temperature", LONG[:-1] + "z"])
def test_other_names_are_not(name: str) -> None:
    """Other options, other letters, a name that has a known one in it, and a long one."""
    assert len(LONG) == 33
    assert meant(name, KNOWN) is None
