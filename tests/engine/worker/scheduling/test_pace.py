"""The pace of training: the tokens of a time slice, learned from past passes."""

from tuneserve_engine.worker.scheduling.pace import Pace


def test_the_pace_is_learned_and_forgets_slices_that_had_to_compile() -> None:
    pace = Pace(0.1)
    assert pace.tokens.get(False) is None
    pace.learn(False, 1000, 60.0)
    for _ in range(2):
        pace.learn(False, 1000, 0.2)
    assert pace.tokens.get(False) == 500
    assert pace.tokens.get(True) is None


def test_a_slice_has_a_token_at_least_and_a_pass_without_tokens_teaches_nothing() -> None:
    pace = Pace(0.1)
    pace.learn(True, 0, 1.0)
    pace.learn(True, 10, 0.0)
    assert pace.tokens.get(True) is None
    pace.learn(True, 1, 60.0)
    assert pace.tokens.get(True) == 1
