"""The names of the worker's metrics."""

import re

from tuneserve_engine.telemetry.metric_names import WORKER_METRICS


def test_every_name_is_a_valid_metric_name() -> None:
    assert all(re.fullmatch(r"[a-z][a-z_]*[a-z]", name) for name in WORKER_METRICS)
