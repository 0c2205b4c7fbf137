"""What the nightly tests need of the code, asked in the quick ones: they would hear of it late."""

import pytest

from tests.nightly.test_planted_bugs import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_can_be_planted(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.was) == 1, f"plant {bug.name!r} anew"
