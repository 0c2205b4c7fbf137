"""Workers publish the tokens of running samples, and subscribers receive them."""

import asyncio

from tests.engine.store.contract.bench import Bench, Contract, sample, scenario
from tuneserve_engine.core.jobs import EncodedTokenDelta, Outcome
from tuneserve_engine.store.pubsub import Subscription, TokenEvents

BYTES = bytes(range(256))


async def told(heard: Subscription, count: int) -> TokenEvents:
    """The next ``count`` parts."""
    found: TokenEvents = []
    async with asyncio.timeout(5):
        while len(found) < count:
            found += await heard.take_deltas()
    assert len(found) == count
    return found


class ProgressContract(Contract):
    @scenario
    async def test_a_subscriber_receives_every_part_in_order(self, bench: Bench) -> None:
        heard = bench.store.subscribe(["a/0", "a/1"])
        parts = [EncodedTokenDelta(n % 3, n, BYTES[n:]) for n in range(5)]
        waiting = asyncio.create_task(told(heard, 4))
        await asyncio.sleep(0.02)
        await bench.queue.publish_tokens({"a/0": parts[:2], "b/0": parts})
        await bench.queue.publish_tokens({"a/1": parts[2:3]})
        await bench.queue.publish_tokens({"a/0": parts[3:4]})
        assert await waiting == [
            ("a/0", parts[0]),
            ("a/0", parts[1]),
            ("a/1", parts[2]),
            ("a/0", parts[3]),
        ]
        await bench.queue.publish_tokens({"a/1": parts[4:]})
        assert await told(heard, 1) == [("a/1", parts[4])]

    @scenario
    async def test_each_subscriber_receives_its_own_topics(self, bench: Bench) -> None:
        one, other = bench.store.subscribe(["one"]), bench.store.subscribe(["other"])
        await bench.queue.publish_tokens(
            {"one": [EncodedTokenDelta(0, 0, b"1")], "other": [EncodedTokenDelta(0, 0, b"2")]}
        )
        assert await told(other, 1) == [("other", EncodedTokenDelta(0, 0, b"2"))]
        assert await told(one, 1) == [("one", EncodedTokenDelta(0, 0, b"1"))]

    @scenario
    async def test_nothing_is_stored_for_later_subscribers(self, bench: Bench) -> None:
        first = bench.store.subscribe(["a"])
        await bench.queue.publish_tokens({"a": [EncodedTokenDelta(0, 0, b"early")]})
        await told(first, 1)
        del first
        await bench.queue.publish_tokens({"a": [EncodedTokenDelta(0, 1, b"unheard")]})
        mark = bench.store.subscribe(["mark"])
        await bench.queue.publish_tokens({"mark": [EncodedTokenDelta(0, 0, b"")]})
        await told(mark, 1)  # earlier parts have arrived too
        heard = bench.store.subscribe(["a"])
        await bench.queue.publish_tokens({"a": [EncodedTokenDelta(0, 2, b"late")]})
        assert await told(heard, 1) == [("a", EncodedTokenDelta(0, 2, b"late"))]

    @scenario
    async def test_publishing_tokens_changes_nothing_about_the_result(self, bench: Bench) -> None:
        request_id = (await bench.store.submit(sample(1))).request_id
        heard = bench.store.subscribe(["a"])
        await bench.queue.publish_tokens({"a": [EncodedTokenDelta(0, 0, b"part")]})
        await told(heard, 1)
        assert await bench.ended(request_id) is None
        await bench.finish(Outcome(request_id, b"whole"))
        assert await bench.ended(request_id) == Outcome(request_id, b"whole")
        await bench.queue.publish_tokens({"a": [EncodedTokenDelta(0, 1, b"too late")]})
        assert await bench.ended(request_id) == Outcome(request_id, b"whole")
