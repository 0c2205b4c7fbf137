"""A JAX backend over several processes, each with the devices of its host: its start."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from tuneserve_engine.backend.hosts.follower import Follower
from tuneserve_engine.backend.hosts.leader import Answers, LeaderBackend
from tuneserve_engine.backend.hosts.link import ANSWER_S, Link
from tuneserve_engine.backend.hosts.meeting import (
    Hosts,
    NotMet,
    Terms,
    differing,
    find_leader,
    wait_for_followers,
)
from tuneserve_engine.backend.jax.backend import JaxBackend
from tuneserve_engine.backend.jax.memory.device import default_device
from tuneserve_engine.backend.jax.memory.planner import Device
from tuneserve_engine.core.backend_options import BackendOptions, PlanRequest

_OF_JAX: dict[str, str | bool] = {
    "jax_cpu_collectives_implementation": "gloo",
    # Otherwise JAX would take SIGTERM for itself, and a follower could not stop the worker.
    "jax_enable_preemption_service": False,
}


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
    for number, channel in sorted(wait_for_followers(hosts).items()):
        answers = Answers(on_stop)

        def lost(reason: str, answers: Answers = answers) -> None:
            answers.lose(reason)
            on_lost(reason)

        link = Link(channel, hosts.names[number], answers.on_message, lost, wait_s=ANSWER_S)
        followers[link] = answers
        link.start()
    _join(hosts)
    devices = [default_device(), *(link.receive() for link in followers)]
    terms = agreed_terms(hosts.names, devices, options.plan)
    for link in followers:
        link.send(terms)
    own = JaxBackend.from_options(replace(options, plan=terms.plan), terms.device)
    reason = differing({link.name: link.receive() for link in followers}, own.numerics_id)
    if reason:
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
    link.send(backend.numerics_id)
    follower.follow(backend, link)


def _join(hosts: Hosts) -> None:
    """Make the devices of all processes known to JAX in each of them."""
    for name, value in _OF_JAX.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            len(hosts.names),
            hosts.number,
            initialization_timeout=int(hosts.meeting_s),
        )
    except RuntimeError as error:
        raise NotMet(
            f"JAX's processes do not find each other at {hosts.coordinator}: {error}"
        ) from error


def agreed_terms(names: Sequence[str], devices: Sequence[Device], asked: PlanRequest) -> Terms:
    """Return the devices of all hosts and the plan for them: the smallest of each size."""
    first = devices[0]
    of_each = min(each.count for each in devices) if asked.devices == "auto" else asked.devices
    for name, each in zip(names, devices, strict=True):
        if each.kind != first.kind or each.count < of_each:
            raise ValueError(
                f"{name} has {each.count} devices of kind {each.kind}; the leader, {names[0]}, "
                f"asks each host for {of_each} of kind {first.kind}: set devices to a number "
                "that all have, or auto"
            )
    device = Device(
        first.kind,
        min(each.memory_bytes for each in devices),
        min(each.host_bytes for each in devices),
        of_each * len(devices),
    )
    return Terms(device, replace(asked, devices=device.count))
