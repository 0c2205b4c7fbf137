"""A JAX backend over several processes, each with the devices of its host: its start."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from tuneserve_engine.backend.hosts.follower import Follower
from tuneserve_engine.backend.hosts.leader import Answers, LeaderBackend
from tuneserve_engine.backend.hosts.link import ANSWER_S, Channel, Link, MemberLost
from tuneserve_engine.backend.hosts.meeting import (
    Hosts,
    NotMet,
    differing,
    find_leader,
    wait_for_followers,
)
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.device import default_device
from tuneserve_engine.backend.jax.memory.planner import Device
from tuneserve_engine.core.backend_options import BackendOptions, PlanRequest
from tuneserve_engine.core.hub import resolve_base_model

_OF_JAX: dict[str, str | bool] = {
    "jax_cpu_collectives_implementation": "gloo",
    # Otherwise JAX would take SIGTERM for itself, and a follower could not stop the worker.
    "jax_enable_preemption_service": False,
}


class Terms(NamedTuple):
    """The leader's choices, which the followers adopt: all plan the same memory alike."""

    device: Device
    plan: PlanRequest


def lead(
    hosts: Hosts,
    options: BackendOptions,
    *,
    on_stop: Callable[[], None],
    on_lost: Callable[[str], None],
) -> tuple[LeaderBackend, JaxBackend]:
    """Start the leader, once all followers are there; return the backend of all, and its own.

    ``on_stop`` is called if an operator asks a follower to stop, and ``on_lost`` if a follower is
    lost, which must end this process. Raises ``NotMet``, what ``JaxBackend.from_options`` raises,
    and ``ValueError`` if the hosts do not fit together.
    """
    followers: dict[Link, Answers] = {}
    all_here = False

    def welcome(number: int, channel: Channel) -> Link:
        answers = Answers(on_stop)

        def lost(reason: str) -> None:
            answers.lose(reason)
            if all_here:
                on_lost(reason)

        link = Link(channel, hosts.names[number], answers.on_message, lost, wait_s=ANSWER_S)
        followers[link] = answers
        link.start()
        return link

    links = wait_for_followers(hosts, welcome)
    all_here = True
    if lost := [link.name for link in links if link.is_lost]:
        raise MemberLost(f"{', '.join(lost)} came and went")
    followers = {link: followers[link] for link in links}
    _join(hosts)
    terms = agreed_terms(
        hosts.names, [default_device(), *(link.receive() for link in links)], options.plan
    )
    for link in links:
        link.send(terms)
    own = JaxBackend.from_options(replace(options, plan=terms.plan), terms.device)
    ids = {link.name: link.receive() for link in links}
    if reason := differing(ids, _bits_id(own, options)):
        raise ValueError(reason)
    return LeaderBackend(own, followers), own


def follow(
    hosts: Hosts,
    options: BackendOptions,
    *,
    on_start: Callable[[Link], None],
    on_end: Callable[[], None],
    on_lost: Callable[[str], None],
) -> None:
    """Find the leader and make its calls, until ``on_end`` or ``on_lost`` ends this process.

    ``on_start`` gets the link to the leader. Raises what ``lead`` raises.
    """
    channel = find_leader(hosts)
    follower = Follower(on_end)
    link = Link(channel, hosts.names[0], follower.on_message, on_lost)
    link.start()
    on_start(link)
    _join(hosts)
    link.send(default_device())
    terms: Terms = link.receive()
    backend = JaxBackend.from_options(replace(options, plan=terms.plan), terms.device)
    follower.take(backend, link)
    link.send(_bits_id(backend, options))
    follower.follow()


def _bits_id(backend: JaxBackend, options: BackendOptions) -> str:
    """Return the numerics id and a digest of the tokenizer, which ends samples at strings."""
    folder = resolve_base_model(options.base_model, options.base_model_revision)
    file = folder / "tokenizer.json"
    digest = hashlib.sha256(file.read_bytes() if file.is_file() else b"").hexdigest()[:12]
    return f"{backend.numerics_id} tokenizer={digest}"


def _join(hosts: Hosts) -> None:
    """Make the devices of all processes known to JAX in each of them."""
    for name, value in _OF_JAX.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            len(hosts.names),
            hosts.number,
            # Under Slurm or MPI, JAX would otherwise give each process one of its devices.
            cluster_detection_method="deactivate",
            initialization_timeout=int(hosts.meeting_s),
        )
    except RuntimeError as error:
        raise NotMet(
            f"JAX's processes do not find each other at {hosts.coordinator}: {error}"
        ) from error


def agreed_terms(names: Sequence[str], devices: Sequence[Device], asked: PlanRequest) -> Terms:
    """Return the devices of all hosts and the plan for them: the smallest of each size.

    Raises ``ValueError`` if a host has too few devices, or devices of another kind.
    """
    first = devices[0]
    of_each = min(each.count for each in devices) if asked.devices == "auto" else asked.devices
    for name, each in zip(names, devices, strict=True):
        if each.kind != first.kind or each.count < of_each:
            raise ValueError(
                f"{name} has {each.count} devices of kind {each.kind}; the leader, {names[0]}, "
                f"asks each host for {of_each} of kind {first.kind}: set devices to a number "
                "that all have, or auto"
            )
    memory_bytes = min(each.memory_bytes for each in devices)
    if first.kind == "cpu":  # the devices of a CPU share its memory
        memory_bytes *= len(devices)
    host_bytes = min(each.host_bytes for each in devices)
    device = Device(first.kind, memory_bytes, host_bytes, of_each * len(devices))
    return Terms(device, replace(asked, devices=device.count))
