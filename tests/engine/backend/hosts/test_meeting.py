"""Processes of a worker find each other on real sockets, and let no other in."""

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tuneserve_engine.backend.hosts import meeting
from tuneserve_engine.backend.hosts.link import Channel
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Hosts(("127.0.0.1", "gpu-1", "gpu-2"), 0, port, KEY, meeting_s=WAIT_S)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def follower(hosts: Hosts, number: int, **changed: Any) -> Channel:
    return find_leader(replace(hosts, number=number, **changed))


def met(leading: "Future[dict[int, Channel]]", following: Sequence[Channel]) -> None:
    """Every follower is connected as its number."""
    channels = leading.result(WAIT_S)
    assert sorted(channels) == list(range(1, len(following) + 1))
    for number, channel in channels.items():
        channel.send(number)
    assert [each.receive() for each in following] == sorted(channels)


@pytest.mark.parametrize("leader_is_first", [True, False])
def test_processes_meet_in_any_order(
    hosts: Hosts, pool: ThreadPoolExecutor, leader_is_first: bool
) -> None:
    leading = pool.submit(wait_for_followers, hosts) if leader_is_first else None
    following = [pool.submit(follower, hosts, number) for number in (1, 2)]
    leading = leading or pool.submit(wait_for_followers, hosts)
    met(leading, [each.result(WAIT_S) for each in following])


def test_a_process_without_the_key_is_told_so_and_the_meeting_goes_on(
    hosts: Hosts, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    leading = pool.submit(wait_for_followers, hosts)
    with pytest.raises(ValueError, match="has another hosts_key; give all hosts of a worker the"):
        follower(hosts, 1, key=b"another sixteen chars")
    met(leading, [follower(hosts, 1), follower(hosts, 2)])
    assert "127.0.0.1 has another hosts_key; it is not let in" in caplog.messages


def test_a_process_of_another_worker_is_refused(hosts: Hosts, pool: ThreadPoolExecutor) -> None:
    leading = pool.submit(wait_for_followers, hosts)
    with pytest.raises(ValueError, match="it is number 1 of 2 hosts, here are 3"):
        follower(hosts, 1, names=("127.0.0.1", "gpu-1"))
    met(leading, [follower(hosts, 1), follower(hosts, 2)])


def test_another_version_is_refused(
    hosts: Hosts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = pool.submit(wait_for_followers, hosts)
    versions = iter(["0.0.1"])
    monkeypatch.setattr(meeting, "version", lambda _: next(versions, "9.9.9"))
    with pytest.raises(ValueError, match=r"it has tuneserve 0\.0\.1, the leader has 9\.9\.9"):
        follower(hosts, 1)
    met(leading, [follower(hosts, 1), follower(hosts, 2)])


def test_a_process_that_comes_again_takes_the_place_of_its_first(
    hosts: Hosts, pool: ThreadPoolExecutor
) -> None:
    leading = pool.submit(wait_for_followers, hosts)
    first = follower(hosts, 1)
    met(leading, [follower(hosts, 1), follower(hosts, 2)])
    with pytest.raises((EOFError, OSError)):
        first.receive()


def test_strangers_keep_nobody_out(
    hosts: Hosts, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says nothing, one says nonsense, and one is gone at once."""
    monkeypatch.setattr(meeting, "_HANDSHAKE_S", 0.5)
    leading = pool.submit(wait_for_followers, hosts)
    met_first = follower(hosts, 1)
    address = "127.0.0.1", hosts.port
    with socket.create_connection(address), socket.create_connection(address) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        socket.create_connection(address).close()
        monkeypatch.setattr(meeting, "_HANDSHAKE_S", 5.0)
        met(leading, [met_first, follower(hosts, 2)])


def test_the_leader_says_who_did_not_come(
    hosts: Hosts, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leading = pool.submit(wait_for_followers, replace(hosts, meeting_s=1.5))
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
        pytest.raises(NotMet, match=rf"port {hosts.port} \(hosts_port\) cannot be used: Address"),
    ):
        wait_for_followers(hosts)


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
