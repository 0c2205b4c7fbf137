"""Errors about the arguments of a call, under the names that the caller used."""

from collections.abc import Iterator

import httpx
import pytest

from tuneserve_client import AsyncClient, Client
from tuneserve_client.arguments import checked, hint


@pytest.fixture
def client() -> Iterator[Client]:
    refuses = httpx.MockTransport(lambda request: httpx.Response(400, json={}))
    with Client("http://server", "tml-a", transport=refuses) as made:
        yield made


def test_an_unknown_keyword_names_the_nearest_known_one(client: Client) -> None:
    with pytest.raises(TypeError, match=r"create_model\(\) has no argument 'rnak'.*'rank'\?$"):
        client.create_model(rnak=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"set_ttl\(\) has no argument 'zzz'; it takes path, ttl_s"):
        client.set_ttl(zzz=3)  # type: ignore[call-arg]


def test_a_missing_argument_is_named_without_the_asynchronous_class(client: Client) -> None:
    with pytest.raises(TypeError, match="'path'") as caught:
        client.load_model()  # type: ignore[call-arg]
    assert "Async" not in str(caught.value)


def test_a_wrong_value_is_named_as_the_caller_named_it(client: Client) -> None:
    with pytest.raises(ValueError, match=r"rank is 'x'; .*integer") as caught:
        client.create_model("base", rank="x")  # type: ignore[arg-type]
    assert type(caught.value) is ValueError  # pydantic's is a subclass


def test_an_address_without_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'localhost:8410'; it must begin with http"):
        Client("localhost:8410", "tml-a")


@pytest.mark.anyio
async def test_the_asynchronous_client_checks_too() -> None:
    async with AsyncClient("http://server", "tml-a") as client:
        with pytest.raises(TypeError, match="did you mean 'rank'"):
            await client.create_model(rnak=3)  # type: ignore[call-arg]


class Loss:
    @checked
    def pick(self, loss: str, **config: float) -> dict[str, float]:
        return {**config, loss: 1.0}


def test_free_keywords_stay_free_unless_they_resemble_a_parameter() -> None:
    assert Loss().pick("a", clip=2.0) == {"a": 1.0, "clip": 2.0}
    with pytest.raises(TypeError, match="'los'; did you mean 'loss'"):
        Loss().pick("a", los=2.0)


def test_a_name_that_resembles_none_lists_all() -> None:
    assert hint("wieghts", ["weights", "logprobs"]) == "did you mean 'weights'?"
    assert hint("zzz", ["weights", "logprobs"]) == "it takes weights, logprobs"
