"""Parts of samples reach the subscription that is referenced, and no other."""

import asyncio
import gc

from tuneserve_engine.core.jobs import EncodedTokenDelta
from tuneserve_engine.store.pubsub import TokenBroker

FIRST, SECOND = EncodedTokenDelta(0, 0, b"a"), EncodedTokenDelta(0, 1, b"b")


def test_a_subscription_has_the_parts_of_its_streams_since_the_last_call() -> None:
    async def test() -> None:
        broker = TokenBroker()
        broker.publish({"s": [FIRST]})  # before the subscription: lost
        heard = broker.subscribe(["s", "t"])
        broker.publish({"s": [FIRST], "other": [SECOND]})
        broker.publish({"t": [SECOND, FIRST]})
        assert await heard.take_deltas() == [("s", FIRST), ("t", SECOND), ("t", FIRST)]
        waiting = asyncio.create_task(heard.take_deltas())
        broker.publish({"s": []})
        await asyncio.sleep(0)
        assert not waiting.done()
        broker.publish({"s": [SECOND]})
        assert await waiting == [("s", SECOND)]

    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_subscription_that_nothing_references_is_gone() -> None:
    broker = TokenBroker()
    heard = broker.subscribe(["s"])
    assert broker.are_heard
    del heard
    gc.collect()
    assert not broker.are_heard
    broker.publish({"s": [FIRST]})
