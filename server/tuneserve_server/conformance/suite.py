"""All checks of the suite, in the order of a report."""

from collections.abc import Iterator, Sequence

from tuneserve_server.conformance import futures, sampling, service, training
from tuneserve_server.conformance.checks import Check, CheckResult, result_of
from tuneserve_server.conformance.target import ServerUnderTest

CHECKS: list[Check] = [
    check
    for part in (service.CHECKS, futures.CHECKS, training.CHECKS, sampling.CHECKS)
    for check in part.all
]


def results(checks: Sequence[Check], target: ServerUnderTest) -> Iterator[CheckResult]:
    """Yield the outcome of each check as soon as it is known."""
    for check in checks:
        yield result_of(check, target)
