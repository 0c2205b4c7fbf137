"""Singular triples from a process of its own: their order, and the ends of the process."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tuneserve_engine.adapters.svd_process import SvdProcess
from tuneserve_engine.core.errors import ServerError


def numbers(content: bytes, *shape: int) -> np.ndarray:
    return np.frombuffer(content, np.float32).reshape(shape)


def test_the_weakest_direction_comes_first():
    weight = np.array([[3, 0, 0, 0], [0, 0, 1, 0], [0, 2, 0, 0]], np.float32)  # [D, F]
    with SvdProcess() as triples:
        u, s, v = triples.decompose(weight)
    np.testing.assert_allclose(numbers(s, 3), [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(np.abs(numbers(u, 3, 4)), np.eye(4)[[2, 1, 0]], atol=1e-6)
    np.testing.assert_allclose(np.abs(numbers(v, 3, 3)), np.eye(3)[[1, 2, 0]], atol=1e-6)


def test_a_weight_that_is_not_finite_is_refused_and_the_next_one_is_decomposed():
    with SvdProcess() as triples:
        with pytest.raises(np.linalg.LinAlgError, match="not finite"):
            triples.decompose(np.array([[1.0, np.inf]]))
        _, s, _ = triples.decompose(np.array([[3.0, 4.0]]))
    np.testing.assert_allclose(numbers(s, 1), [5], rtol=1e-6)


def test_the_kernel_would_kill_the_decomposing_process_and_not_the_worker():
    with SvdProcess() as triples:
        triples.decompose(np.eye(3))
        assert triples._process is not None
        pid = triples._process.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    assert not Path(f"/proc/{pid}").exists()


def test_another_end_of_the_process_is_reported_with_its_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        SvdProcess() as triples,
        pytest.raises(ServerError, match="ended with status 1; ask again"),
    ):
        triples.decompose(np.eye(3))
