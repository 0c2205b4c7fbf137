"""The window of positions that a model may take."""

from tuneserve_engine.core.policies import StorePolicy


def test_a_models_window_is_four_times_its_jobs() -> None:
    assert StorePolicy(model_jobs=10).model_window == 40
