"""Quick checks of the code that the nightly tests depend on, so that a break shows before the
night.
"""

import pytest

from tests.nightly.planted_bugs import BUGS, Bug
from tests.nightly.test_planted_bugs import ROOT


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_can_be_planted(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.was) == 1, f"plant {bug.name!r} again"
