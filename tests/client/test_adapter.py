"""Wrong options of an adapter are errors in plain Python, before and within the call."""

import httpx
import pytest

from tuneserve_client import Adapter, Client
from tuneserve_client.wire import types


def test_an_adapter_becomes_the_field_of_a_request() -> None:
    every = Adapter(kind="osft", rank=3, unfreeze_ratio=0.5, form="core")
    sent = every.to_wire().model_dump()
    assert sent == {"kind": "osft", "rank": 3, "unfreeze_ratio": 0.5, "form": "core"}
    assert sent.keys() == types.AdapterSpec.model_fields.keys()
    assert Adapter().to_wire().model_dump(exclude_none=True) == {"kind": "lora"}


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'unfreeze'"):
        Adapter(kind="osft", unfreeze=0.5)  # type: ignore[call-arg]


def test_a_value_of_a_wrong_type_is_named_by_the_call() -> None:
    refuses = httpx.MockTransport(lambda request: httpx.Response(400, json={}))
    wrong = Adapter(kind="osft", unfreeze_ratio="much")  # type: ignore[arg-type]
    with (
        Client("http://server", "tml-a", transport=refuses) as client,
        pytest.raises(ValueError, match=r"create_model\(\): unfreeze_ratio is 'much'") as caught,
    ):
        client.create_model("base", adapter=wrong)
    assert type(caught.value) is ValueError
