"""The base models that clients may ask for, decided from the workers known to the store."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.store.base import ServedModel, Store
from tuneserve_engine.store.errors import StoreFailed
from tuneserve_server.base_models import BaseModels

pytestmark = pytest.mark.anyio

NOW_S = 10_000.0


def model(name: str, workers: int, silent_s: float = 0.0) -> ServedModel:
    return ServedModel(replace(FAKE_INFO, name=name), workers, NOW_S - silent_s)


class Says:
    """The part of a store that knows the workers."""

    def __init__(self, *models: ServedModel) -> None:
        self.models = list(models)
        self.asked = 0
        self.fails = False

    async def base_models(self) -> list[ServedModel]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise StoreFailed("the disk is full")
        return list(self.models)


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def served(store: Says, clock: Clock | None = None) -> BaseModels:
    return BaseModels(cast(Store, store), "from/settings", clock=clock or Clock())


async def offered(*models: ServedModel) -> list[str]:
    return [each.info.name for each in await served(Says(*models)).offered()]


async def test_only_base_models_with_a_worker_are_offered() -> None:
    assert await offered(model("a", 1), model("b", 2), model("c", 0)) == ["a", "b"]


async def test_without_any_worker_the_most_recently_served_base_models_are_offered() -> None:
    assert await offered(model("a", 0, 5000), model("b", 0, 5900), model("c", 0, 5901)) == [
        "a",
        "b",
    ]
    assert await offered() == []


@pytest.mark.parametrize(
    ("silent_s", "accepted"), [(0.0, True), (899.0, True), (900.0, True), (901.0, False)]
)
async def test_a_name_is_accepted_for_a_quarter_of_an_hour_after_its_last_worker(
    silent_s: float, accepted: bool
) -> None:
    models = served(Says(model("alive", 1), model("gone", 0, silent_s)))
    if accepted:
        assert await models.resolve("gone") == "gone"
        await models.check("gone")
    else:
        for ask in (models.resolve, models.check):
            with pytest.raises(UserError, match=r"'gone' is not served here; .* has 'alive'"):
                await ask("gone")


async def test_without_any_worker_for_long_the_last_names_are_still_accepted() -> None:
    """Clients are not turned away while an operator repairs the only worker."""
    models = served(Says(model("a", 0, 5000)))
    assert await models.resolve("a") == "a"


async def test_before_the_first_worker_the_name_in_the_settings_is_accepted() -> None:
    models = served(Says())
    assert await models.resolve("from/settings") == "from/settings"
    with pytest.raises(UserError, match="this server has 'from/settings'"):
        await models.resolve("a")
    assert await models.info("from/settings") is None


async def test_a_suffix_is_optional_but_an_exact_name_is_preferred() -> None:
    models = served(Says(model("m:4k", 1), model("m:32k", 1), model("other", 1)))
    assert await models.resolve("m:32k") == "m:32k"
    assert await models.resolve("m") == "m:4k"
    assert await models.resolve("m:1k") == "m:4k"
    assert await models.resolve("other:peft") == "other"
    with pytest.raises(UserError):
        await models.check("m")  # a record's own name must be served exactly


async def test_of_two_matching_names_the_one_with_a_worker_is_chosen() -> None:
    assert await served(Says(model("m:4k", 0), model("m:32k", 1))).resolve("m") == "m:32k"


async def test_facts_of_base_models_without_a_worker_stay_known() -> None:
    info = await served(Says(model("a", 1), model("old", 0, 1e6))).info("old")
    assert info is not None and info.name == "old"


async def test_an_error_does_not_repeat_a_long_name_whole() -> None:
    with pytest.raises(UserError) as error:
        await served(Says()).resolve("x" * 10_000)
    assert len(str(error.value)) < 500


async def test_the_store_is_queried_up_to_twice_a_second() -> None:
    store, clock = Says(model("a", 1)), Clock()
    models = served(store, clock)
    for _ in range(10):
        await models.known()
    assert store.asked == 1
    clock.now_s += 0.5
    await asyncio.gather(*(models.known() for _ in range(10)))
    assert store.asked == 2


async def test_a_worker_that_has_just_started_is_found() -> None:
    store = Says(model("a", 1))
    models = served(store)
    await models.known()
    store.models.append(model("b", 1))
    assert await models.resolve("b") == "b"


async def test_a_failing_store_fails_all_waiting_callers_at_once_and_is_queried_again() -> None:
    store = Says(model("a", 1))
    store.fails = True
    models = served(store)
    results = await asyncio.gather(*(models.known() for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [StoreFailed] * 5
    assert store.asked == 1
    store.fails = False
    assert [each.info.name for each in await models.known()] == ["a"]


async def test_a_cancelled_caller_does_not_cancel_the_shared_query() -> None:
    store = Says(model("a", 1))
    models = served(store)
    leaving, staying = (asyncio.create_task(models.known()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert len(await staying) == 1
    assert store.asked == 1


@pytest.mark.parametrize("suffix", [":peft:64", ":peft:1", ":64", ":peft", ":peft:other"])
async def test_a_suffix_may_ask_for_a_context_that_fits(suffix: str) -> None:
    assert FAKE_INFO.context_length == 64
    assert await served(Says(model("a", 1))).resolve(f"a{suffix}") == "a"


@pytest.mark.parametrize("suffix", [":peft:65", ":262144", ":peft:" + "9" * 200])
async def test_a_longer_context_than_the_served_one_is_refused(suffix: str) -> None:
    with pytest.raises(UserError, match=r"asks for a context of \d+ tokens.* 'a' with 64: ask"):
        await served(Says(model("a", 1))).resolve(f"a{suffix}")


async def test_the_exact_name_is_served_whatever_it_ends_in() -> None:
    assert await served(Says(model("a:peft:128", 1))).resolve("a:peft:128") == "a:peft:128"
