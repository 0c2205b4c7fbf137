"""The list of checks, and the outcome of one."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tuneserve_server.conformance.target import NotConforming, ServerUnderTest

_PAGES = "https://tinker-docs.thinkingmachines.ai/tinker"
SDK = "tinker 0.38.0 on PyPI"
"""Rules that no page states: the official SDK fails without them."""
LOSSES, SAMPLING = f"{_PAGES}/losses/", f"{_PAGES}/api-reference/samplingclient/"
TRAINING, REST = f"{_PAGES}/api-reference/trainingclient/", f"{_PAGES}/api-reference/restclient/"
OPTIMIZERS = f"{_PAGES}/optimizers/"

_Body = Callable[[ServerUnderTest], None]


@dataclass(frozen=True)
class Check:
    """A rule of the protocol: its name, the rule, the place that states it, and its test."""

    name: str
    rule: str
    source: str
    body: _Body


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check, with the reason of a failure."""

    name: str
    outcome: Literal["passed", "failed"]
    rule: str
    source: str
    reason: str = ""


class Checks:
    """The checks of one part of the protocol, in the order of their definitions."""

    def __init__(self) -> None:
        self.all: list[Check] = []

    def rule(self, source: str) -> Callable[[_Body], _Body]:
        """Have the decorated function check the rule in the first line of its docstring."""

        def register(body: _Body) -> _Body:
            rule = (body.__doc__ or "").strip().splitlines()[0]
            self.all.append(Check(body.__name__.replace("_", "-"), rule, source, body))
            return body

        return register


def result_of(check: Check, target: ServerUnderTest) -> CheckResult:
    """Carry out a check. Any error of the server's answer is a failure of the check."""
    try:
        check.body(target)
    except NotConforming as error:
        return CheckResult(check.name, "failed", check.rule, check.source, str(error))
    except (struct.error, LookupError, TypeError, ValueError) as error:
        reason = f"an answer cannot be read: {type(error).__name__}: {error}"
        return CheckResult(check.name, "failed", check.rule, check.source, reason)
    return CheckResult(check.name, "passed", check.rule, check.source)


def chosen(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """Return the checks with these names, or all if there are none. Raises ``ValueError``."""
    known = {each.name for each in checks}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no check {name!r}; see the list with --list")
    return [each for each in checks if not names or each.name in names]
