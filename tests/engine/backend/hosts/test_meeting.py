"""Processes of a worker find each other on real sockets, and let no other in."""

import logging
import pickle  # noqa: S403
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.test_kills_hosts import free_ports
from tuneserve_engine.backend.hosts import link as links
from tuneserve_engine.backend.hosts import meeting
from tuneserve_engine.backend.hosts.link import Channel, Link
from tuneserve_engine.backend.hosts.meeting import (
    Hosts,
    NotMet,
    differing,
    find_leader,
    wait_for_followers,
)

WAIT_S = 20.0
KEY = b"sixteen characters"


@pytest.fixture
def hosts() -> Hosts:
    return Hosts(("127.0.0.1", "gpu-1", "gpu-2"), 0, free_ports(), KEY, meeting_s=WAIT_S)


def meet(hosts: Hosts) -> list[Link]:
    """Wait as the leader, with links that start at once."""

    def welcome(number: int, channel: Channel) -> Link:
        link = Link(channel, hosts.names[number], lambda _: False, lambda _: None)
        link.start()
        return link

    return wait_for_followers(hosts, welcome)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def follower(hosts: Hosts, number: int, **changed: Any) -> Channel:
    return find_leader(replace(hosts, number=number, **changed))


def met(leading: "Future[list[Link]]", following: Sequence[Channel]) -> None:
    """Every follower is connected as its number, and its link was alive all the time."""
    links = leading.result(WAIT_S)
    assert [link.name for link in links] == ["gpu-1", "gpu-2"]
    for link, channel in zip(links, following, strict=True):
        link.send(link.name)
        while isinstance(found := pickle.loads(channel.receive()), tuple):  # noqa: S301
            assert found == ()  # a sign of life
        assert found == link.name
    for link in links:
        link.drop()


@pytest.mark.parametrize("leader_is_first", [True, False])
def test_processes_meet_in_any_order(
    hosts: Hosts, pool: ThreadPoolExecutor, leader_is_first: bool
) -> None:
    leading = pool.submit(meet, hosts) if leader_is_first else None
    following = [pool.submit(follower, hosts, number) for number in (1, 2)]
    leading = leading or pool.submit(meet, hosts)
    met(leading, [each.result(WAIT_S) for each in following])


def test_a_process_without_the_key_is_told_so_and_the_meeting_goes_on(
    hosts: Hosts, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    leading = pool.submit(meet, hosts)
    with pytest.raises(ValueError, match="has another hosts_key; give all hosts of a worker the"):
        follower(hosts, 1, key=b"another sixteen chars")
    met(leading, [follower(hosts, 1), follower(hosts, 2)])
    assert "127.0.0.1 has another hosts_key; it is not let in" in caplog.messages


def test_a_process_of_another_worker_is_refused(hosts: Hosts, pool: ThreadPoolExecutor) -> None:
    leading = pool.submit(meet, hosts)
    with pytest.raises(ValueError, match="it is number 1 of 2 hosts, here are 3"):
        follower(hosts, 1, names=("127.0.0.1", "gpu-1"))
    met(leading, [follower(hosts, 1), follower(hosts, 2)])


def version_of_thread(_: str) -> str:
    """The follower runs in the main thread."""
    return "0.0.1" if threading.current_thread() is threading.main_thread() else "9.9.9"


def test_another_version_is_refused(
    hosts: Hosts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = pool.submit(meet, hosts)
    with monkeypatch.context() as patch:
        patch.setattr(meeting, "version", version_of_thread)
        with pytest.raises(ValueError, match=r"it has tuneserve 0\.0\.1, the leader has 9\.9\.9"):
            follower(hosts, 1)
    met(leading, [follower(hosts, 1), follower(hosts, 2)])


def test_a_process_that_comes_again_takes_the_place_of_its_first(
    hosts: Hosts, pool: ThreadPoolExecutor
) -> None:
    leading = pool.submit(meet, hosts)
    first = follower(hosts, 1)
    met(leading, [follower(hosts, 1), follower(hosts, 2)])
    with pytest.raises((EOFError, OSError)):
        while True:
            first.receive()


def test_an_early_follower_hears_of_the_leader_until_the_last_has_come(
    hosts: Hosts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_PING_S", 0.05)
    leading = pool.submit(meet, hosts)
    channel = follower(hosts, 1, silence_s=0.4)
    lost: list[str] = []
    early = Link(channel, "gpu-0", lambda _: False, lost.append)
    early.start()
    time.sleep(1.0)
    assert not lost
    follower(hosts, 2)
    leading.result(WAIT_S)
    assert not lost
    early.drop()


def test_a_follower_that_is_lost_meanwhile_may_come_again(
    hosts: Hosts, pool: ThreadPoolExecutor
) -> None:
    leading = pool.submit(meet, hosts)
    follower(hosts, 1).close()
    second = follower(hosts, 2)
    time.sleep(0.5)
    assert not leading.done()
    met(leading, [follower(hosts, 1), second])


def test_strangers_keep_nobody_out(hosts: Hosts, pool: ThreadPoolExecutor) -> None:
    """Many say nothing, one says nonsense, one is slow, and one is gone at once."""
    leading = pool.submit(meet, hosts)
    address, first = ("127.0.0.1", hosts.port), follower(hosts, 1)
    started_s = time.monotonic()
    with ExitStack() as strangers:
        silent = [socket.create_connection(address) for _ in range(10)]
        for each in silent:
            strangers.enter_context(each)
        silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        silent[1].sendall(b"x")
        socket.create_connection(address).close()
        met(leading, [first, follower(hosts, 2)])
        assert time.monotonic() - started_s < 4  # a stranger has 5 seconds


def test_a_stranger_that_drips_is_cut_off(
    hosts: Hosts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_S", 1.0)
    leading = pool.submit(meet, replace(hosts, meeting_s=4.0))
    time.sleep(0.3)
    with socket.create_connection(("127.0.0.1", hosts.port)) as slow, suppress(OSError):
        slow.settimeout(WAIT_S)
        for _ in range(20):  # a byte is never late, and the handshake is
            slow.sendall(b"x")
            time.sleep(0.2)
        assert len(slow.recv(1000)) <= 32, "it was let in"
    with pytest.raises(NotMet):
        leading.result(WAIT_S)


def test_a_worker_that_is_whole_keeps_its_port_and_turns_others_away(
    hosts: Hosts, pool: ThreadPoolExecutor
) -> None:
    leading = pool.submit(meet, hosts)
    following = [follower(hosts, 1), follower(hosts, 2)]
    leading.result(WAIT_S)
    with pytest.raises(NotMet, match="did not come in 1 s"):
        follower(hosts, 1, meeting_s=1)
    with pytest.raises(NotMet, match="cannot be used"):
        meet(hosts)
    for channel in following:
        channel.close()


def test_the_leader_says_who_did_not_come(
    hosts: Hosts,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(meeting, "_REMIND_S", 0.5)
    leading = pool.submit(meet, replace(hosts, meeting_s=1.5))
    follower(hosts, 1)
    with pytest.raises(NotMet, match=r"^gpu-2 did not come within 1\.5 s; start the worker there"):
        leading.result(WAIT_S)
    assert "gpu-1 is here" in caplog.text and "waiting for gpu-2" in caplog.text


def test_a_follower_says_that_there_is_no_leader(hosts: Hosts) -> None:
    with pytest.raises(NotMet, match=r"the leader at 127\.0\.0\.1:\d+ did not come in 0\.3 s"):
        follower(hosts, 1, meeting_s=0.3)


def test_a_port_that_is_taken_is_named(hosts: Hosts) -> None:
    with (
        socket.create_server(("", hosts.port)),
        pytest.raises(NotMet, match=rf"port {hosts.port} \(hosts_port, .*\) cannot be used: Addr"),
    ):
        meet(hosts)
    with (
        socket.create_server(("", hosts.port + 1)),
        pytest.raises(NotMet, match=rf"port {hosts.port + 1} \(hosts_port, .*\) cannot be used"),
    ):
        meet(hosts)


def test_jax_meets_on_the_next_port() -> None:
    assert Hosts(("gpu-0", "gpu-1"), 1, 8470, KEY).coordinator == "gpu-0:8471"
    assert Hosts(("::1", "gpu-1"), 1, 8470, KEY).coordinator == "[::1]:8471"


def test_hosts_that_would_compute_other_bits_are_named_with_the_difference() -> None:
    own = "jax=1 device=cpu(A; threads 2) base=x"
    assert differing({"gpu-1": own, "gpu-2": own}, own) is None
    reason = differing({"gpu-1": own, "gpu-2": own.replace("base=x", "base=y")}, own)
    assert reason is not None
    assert reason.startswith("gpu-2 would compute other bits than the leader; ")
    assert "differ: base=x base=y; give all hosts the same" in reason
