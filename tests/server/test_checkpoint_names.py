import pytest

from tuneserve_engine.core.errors import UserError
from tuneserve_server.checkpoint_names import check_name


@pytest.mark.parametrize("name", ["a", "9", "step-10_v1.2", "x" * 128])
def test_a_name_may_have_letters_digits_and_three_marks(name: str) -> None:
    check_name("path", name)


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a..b", "a b", "é", "a\n", "x" * 129])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="path is not a checkpoint name"):
        check_name("path", name)
