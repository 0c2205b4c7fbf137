"""The container files: everything that they name exists in the code, and nothing is left open."""

import pytest
from pydantic import ValidationError

from tuneserve_server.settings import ApiSettings


def test_an_address_that_others_can_reach_needs_the_operators_word() -> None:
    with pytest.raises(ValidationError, match="trusted_network = true"):
        ApiSettings(host="0.0.0.0")
    assert ApiSettings(host="0.0.0.0", trusted_network=True).host == "0.0.0.0"
