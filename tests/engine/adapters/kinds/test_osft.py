"""OSFT's mathematics: the strong directions never change, in all forms and shapes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.adapters.osft_case import (
    RANK,
    SQUARE,
    TALL,
    WIDE,
    Base,
    base_of,
    change,
    config_of,
    fit,
    leaks,
    task_of,
    train,
)
from tuneserve_engine.adapters.kinds.base import Parts, SvdFactors
from tuneserve_engine.adapters.kinds.osft import FORMS, Osft, left, right
from tuneserve_engine.adapters.svd import BaseWeightSvd

SHAPES = [WIDE, SQUARE, TALL]
forms = pytest.mark.parametrize("form", FORMS)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["wide", "square", "tall"])


def started(form: str, base: Base, frozen: SvdFactors, rank: int = RANK) -> dict[str, np.ndarray]:
    return dict(Osft(form).initial(config_of(rank), 0, base.shape, frozen))


@cache
def trained(form: str, shape: tuple[int, int]) -> Parts:
    """The arrays after fifty steps."""
    base = base_of(shape)
    frozen = base.frozen(RANK)
    return train(Osft(form), started(form, base, frozen), frozen, task_of(base), 50)[0]


@shapes
@pytest.mark.acceptance("O2")
def test_frozen_and_trained_triples_rebuild_the_weight_and_its_outputs(
    shape: tuple[int, int], tmp_path: Path
):
    base = base_of(shape)
    weights = base.w.astype(np.float32)
    kept = BaseWeightSvd(lambda: tmp_path, {"q_proj": base.shape}, lambda _: list(weights.mT))
    kept.prepare()
    frozen = kept.frozen(config_of(RANK), "q_proj")
    own = started("factors", base, frozen)
    u, s, v = frozen.u[:, RANK:].mT, frozen.s[:, RANK:], frozen.v[:, RANK:]

    rebuilt = (u * s[:, None]) @ v + (own["U"].mT * own["S"][:, None]) @ own["V"]
    assert np.linalg.norm(rebuilt - base.w) <= 1e-5 * np.linalg.norm(base.w)

    x = np.random.default_rng(1).standard_normal((2, 50, shape[1])).astype(np.float32)
    strong = ((x @ v.mT) * s[:, None]) @ u.mT
    low = ((x @ own["V"].mT) * own["S"][:, None]) @ own["U"]
    expected = x.astype(np.float64) @ base.w.mT
    assert np.linalg.norm(strong + low - expected) <= 1e-5 * np.linalg.norm(expected)


@forms
@shapes
@pytest.mark.parametrize("room", [RANK, 80], ids=["exact", "beyond all directions"])
def test_a_fresh_adapter_makes_no_change_at_all(form: str, shape: tuple[int, int], room: int):
    base, kind = base_of(shape), Osft(form)
    frozen = base.padded(RANK, room)
    parts = fit(started(form, base, base.frozen(RANK)), kind.parameter_shapes(base.shape, room))
    a, b = jax.jit(kind.lora_pair)(parts, frozen)
    long = b if shape[0] >= shape[1] else a
    assert a.shape == (2, shape[1], room) and b.shape == (2, room, shape[0])
    np.testing.assert_array_equal(long, np.zeros_like(long))


@pytest.mark.parametrize("form", ["factors", "short_fixed"])
@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_padding_changes_numbers_by_rounding_only_and_stays_zero(form: str, shape: tuple[int, int]):
    base, kind = base_of(shape), Osft(form)
    room = 80
    wide = kind.parameter_shapes(base.shape, room)
    fresh = fit(started(form, base, base.frozen(RANK)), wide)
    found, _ = train(kind, fresh, base.padded(RANK, room), task_of(base), 50)
    for name, part in fit(trained(form, shape), wide).items():
        assert np.linalg.norm(found[name] - part) <= 1.6e-6 * np.linalg.norm(part)
        np.testing.assert_array_equal(found[name][:, RANK:], 0)


@forms
@shapes
def test_the_gradient_equals_the_dense_one_without_strong_directions(
    form: str, shape: tuple[int, int]
):
    """G is the gradient of the loss by ΔW, and the pair's is G seen through A and B."""
    base, kind = base_of(shape), Osft(form)
    frozen, (strong_u, strong_v) = base.frozen(RANK, np.float64), base.strong(RANK)
    u0, _, v0 = frozen.lowest(RANK)
    by_u = np.eye(shape[0])[None] - strong_u @ strong_u.mT
    by_v = np.eye(shape[1])[None] - strong_v.mT @ strong_v
    random = np.random.default_rng(2)
    own = {
        name: random.standard_normal(part)
        for name, part in kind.parameter_shapes(base.shape, RANK).items()
    }
    g = random.standard_normal(base.w.shape)
    if form == "factors":
        own |= {"U": own["U"] @ by_u, "V": own["V"] @ by_v}
        expected = {
            "U": (by_u @ g @ own["V"].mT * own["S"][:, None]).mT,
            "S": np.einsum("lrn,lnm,lrm->lr", own["U"], g, own["V"]),
            "V": own["S"][..., None] * own["U"] @ g @ by_v,
        }
    elif form == "core":
        expected = {"C": u0 @ g @ v0.mT}
    elif shape[0] >= shape[1]:
        expected = {"X": (by_u @ g @ v0.mT).mT}
    else:
        expected = {"X": u0 @ g @ by_v}

    def projected(parts: Parts) -> Parts:
        (a, b), pull = jax.vjp(lambda parts: kind.lora_pair(parts, frozen), parts)
        (pulled,) = pull((g.mT @ b.mT, a.mT @ g.mT))
        return kind.project(pulled, frozen)

    with jax.enable_x64(True):
        found = jax.jit(projected)(own)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=1e-10)


@forms
@shapes
@pytest.mark.acceptance("O3")
def test_fifty_steps_of_adamw_leave_the_strong_directions_alone(form: str, shape: tuple[int, int]):
    base = base_of(shape)
    delta = change(trained(form, shape), base.frozen(RANK), RANK)
    assert np.linalg.norm(delta) > 1e-3 * np.linalg.norm(base.w)
    assert max(leaks(delta, base, RANK)) <= 1e-5


@forms
@shapes
def test_the_pair_equals_the_change_of_the_factors(form: str, shape: tuple[int, int]):
    frozen, parts = base_of(shape).frozen(RANK), trained(form, shape)
    a, b = jax.jit(Osft(form).lora_pair)(parts, frozen)
    delta = change(parts, frozen, RANK)
    found = (np.asarray(a, np.float64) @ np.asarray(b, np.float64)).mT
    assert np.linalg.norm(found - delta) <= 1e-5 * np.linalg.norm(delta)


@shapes
@pytest.mark.acceptance("O4")
def test_without_the_projection_of_the_parameters_adamw_leaks(shape: tuple[int, int]):
    base = base_of(shape)
    frozen = base.frozen(RANK)
    parts, _ = train(
        Osft("factors"),
        started("factors", base, frozen),
        frozen,
        task_of(base),
        50,
        projects_parts=False,
    )
    assert min(leaks(change(parts, frozen, RANK), base, RANK)) > 0.1


@pytest.mark.acceptance("O5")
@pytest.mark.parametrize("size", [64, 96])
def test_both_projection_formulas_agree_on_the_shorter_side(size: int):
    """Both formulas against the textbook's with a whole matrix, in float64. The longer side of the
    weight decides between the two.
    """
    base = base_of((size, size))
    strong_u, strong_v = base.strong(RANK)
    x = np.random.default_rng(3).standard_normal((2, RANK, size)).astype(np.float32)
    by_gram = x - x @ (strong_u @ strong_u.mT), x - x @ (strong_v.mT @ strong_v)
    u, s, v, kept = base.frozen(RANK)
    shorter = SvdFactors(u, s, v, kept)
    longer_u, longer_v = SvdFactors(u, s, v[..., :8], kept), SvdFactors(u[..., :8], s, v, kept)
    for project, expected, longer in ((left, by_gram[0], longer_u), (right, by_gram[1], longer_v)):
        complement, factored = (np.asarray(jax.jit(project)(x, f)) for f in (shorter, longer))
        np.testing.assert_allclose(complement, expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(factored, expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(factored, complement, rtol=0, atol=4e-6)


@pytest.mark.parametrize(("project", "shape"), [(left, TALL), (right, WIDE)])
def test_on_the_longer_side_more_than_the_weak_directions_remains(
    project: Callable[..., Any], shape: tuple[int, int]
):
    base = base_of(shape)
    strong = base.strong(RANK)[0].mT if project is left else base.strong(RANK)[1]
    x = np.random.default_rng(4).standard_normal((2, RANK, 96)).astype(np.float32)
    expected = x - (x @ strong.mT) @ strong
    for frozen in (base.frozen(RANK), base.padded(RANK, 24), base.padded(RANK, 80)):
        found = jax.jit(project)(x, frozen)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2.4e-6)


@shapes
@pytest.mark.acceptance("O13")
def test_training_the_longer_side_alone_reaches_the_loss_of_the_factors(shape: tuple[int, int]):
    base = base_of(shape)
    frozen, task = base.frozen(RANK), task_of(base)
    factors, short_fixed = (
        train(Osft(form), started(form, base, frozen), frozen, task, 800, rate=5e-3)[1]
        for form in ("factors", "short_fixed")
    )
    untrained = float((task.y**2).mean())
    assert short_fixed < 0.95 * untrained
    assert short_fixed == pytest.approx(factors, rel=0.01)
