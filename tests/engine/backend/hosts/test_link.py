"""Connections between the processes of a worker: keys, messages, silence and ends."""

import pickle  # noqa: S403
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tuneserve_engine.backend.hosts import link as links
from tuneserve_engine.backend.hosts.link import Channel, Link, MemberLost, WrongKey

WAIT_S = 10.0
"""Far more than anything here takes."""
KEY = b"sixteen characters"


class Side:
    """One end of a connection, and what happened there."""

    def __init__(self, connected: socket.socket, name: str, silence_s: float, **options: float):
        self.messages: list[object] = []
        self.losses: list[str] = []
        self.lost = threading.Event()
        self.link = Link(
            Channel(connected, silence_s), name, self._on_message, self._on_lost, **options
        )
        self.link.start()

    def _on_message(self, message: object) -> bool:
        self.messages.append(message)
        return message == "beside"

    def _on_lost(self, reason: str) -> None:
        self.losses.append(reason)
        self.lost.set()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        yield one, other


Pair = tuple[socket.socket, socket.socket]


def proofs(pair: Pair, keys: tuple[bytes, bytes]) -> list[BaseException | None]:
    """The errors of two processes that prove their keys to each other."""

    def proved(side: int) -> BaseException | None:
        try:
            Channel(pair[side], WAIT_S).prove(keys[side], leads=side == 0)
        except WrongKey as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(proved, (0, 1)))


def test_only_the_same_key_is_let_in(pair: Pair) -> None:
    assert proofs(pair, (KEY, KEY)) == [None, None]
    assert {type(each) for each in proofs(pair, (KEY, KEY[:-1]))} == {WrongKey}


def test_one_who_sends_back_what_it_gets_has_no_proof(pair: Pair) -> None:
    """The proofs of the two sides differ, and so do those of two connections."""
    mirror, other = pair

    def reflect() -> None:
        while data := mirror.recv(1024):
            mirror.sendall(data)

    threading.Thread(target=reflect, daemon=True).start()
    for leads in (True, False):
        with pytest.raises(WrongKey):
            Channel(other, WAIT_S).prove(KEY, leads=leads)


def test_messages_arrive_whole_and_in_order_whatever_their_size(pair: Pair) -> None:
    one, other = Side(pair[0], "other", WAIT_S), Side(pair[1], "one", WAIT_S)
    sent = [b"x" * size for size in (0, 1, 5_000_000, 17)]
    for message in sent:
        one.link.send(message)
    assert [other.link.receive(WAIT_S) for _ in sent] == sent
    other.link.send("back")
    assert one.link.receive(WAIT_S) == "back"
    assert not one.losses and not other.losses


def test_a_message_that_is_dealt_with_at_once_does_not_wait(pair: Pair) -> None:
    one, other = Side(pair[0], "other", WAIT_S), Side(pair[1], "one", WAIT_S)
    for message in ("beside", "call"):
        one.link.send(message)
    assert other.link.receive(WAIT_S) == "call"
    assert other.messages == ["beside", "call"]


def test_the_end_of_the_other_process_is_noticed_at_once(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", WAIT_S)
    pair[1].close()
    assert one.lost.wait(WAIT_S)
    assert one.losses == ["gpu-1: it has closed the connection"]
    for use in (one.link.receive, lambda: one.link.send("more")):
        with pytest.raises(MemberLost, match="gpu-1, a process of this worker, is lost: it has"):
            use()
    assert len(one.losses) == 1


def test_the_end_of_a_process_that_left_messages_unread_is_an_end_too(pair: Pair) -> None:
    pair[0].sendall(b"not read")  # so that the end of the other side resets the connection
    pair[1].close()
    one = Side(pair[0], "gpu-1", WAIT_S)
    assert one.lost.wait(WAIT_S)
    assert one.losses == ["gpu-1: it has closed the connection"]


def test_a_caller_that_waits_hears_of_the_loss(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.link.receive)
        pair[1].close()
        with pytest.raises(MemberLost):
            waiting.result(WAIT_S)


def test_a_silent_process_is_lost_and_one_with_nothing_to_say_is_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_PING_S", 0.02)
    one, other = Side(pair[0], "gpu-1", 0.4), Side(pair[1], "gpu-0", 0.4)
    time.sleep(1.0)
    assert not one.losses and not other.losses
    mine, silent = socket.socketpair()
    with closing(silent):
        alone = Side(mine, "gpu-2", 0.4)
        assert alone.lost.wait(WAIT_S)
    assert alone.losses == ["gpu-2: it has been silent for too long"]


def test_a_process_that_takes_nothing_is_lost(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", 0.2)
    with pytest.raises(MemberLost):
        one.link.send(b"x" * 50_000_000)


def test_a_late_answer_is_a_loss(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", WAIT_S)
    with pytest.raises(MemberLost, match=r"it has not answered for 0\.1 s"):
        one.link.receive(0.1)
    assert one.lost.is_set()


def test_an_answer_that_nobody_waits_for_shows_processes_out_of_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_PING_S", 0.02)
    one, other = Side(pair[0], "gpu-1", WAIT_S, wait_s=0.3), Side(pair[1], "gpu-0", WAIT_S)
    other.link.send("answered in time")
    assert one.link.receive(WAIT_S) == "answered in time"
    time.sleep(0.4)
    assert not one.losses
    other.link.send("too early")
    assert one.lost.wait(WAIT_S)
    assert "ahead of this process: they are out of step" in one.losses[0]


def test_a_message_that_cannot_be_read_is_a_loss(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", WAIT_S)
    pair[1].sendall((3).to_bytes(8, "big") + b"abc")
    assert one.lost.wait(WAIT_S)
    assert "its message cannot be read" in one.losses[0]


def test_the_last_message_is_read_and_the_end_after_it_is_no_loss(pair: Pair) -> None:
    one = Side(pair[0], "gpu-1", WAIT_S)
    other = Channel(pair[1], WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        one.link.send_last("end")
        ending = pool.submit(one.link.wait_for_end)
        assert pickle.loads(other.receive()) == "end" and not ending.done()  # noqa: S301
        other.close()
        ending.result(WAIT_S)
    assert not one.losses
