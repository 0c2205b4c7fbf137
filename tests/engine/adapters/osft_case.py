"""OSFT without a model: base weights with their singular triples in float64, the change that an
adapter's arrays make, and training steps of a linear task.

Weights are W [N, M] with y = x Wᵀ. There are L layers of them, K = min(N, M), and r is the number
of trained directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tuneserve_engine.adapters.kinds.base import AdapterKind, Parts, SvdFactors
from tuneserve_engine.core.adapter import AdapterConfig

WIDE, SQUARE, TALL = (64, 96), (64, 64), (96, 64)
"""[N, M]: fewer outputs than inputs, equally many, more."""
RANK = 16


@dataclass(frozen=True)
class Base:
    """Singular triples of random weights from LAPACK in float64, weakest first."""

    w: np.ndarray  # [L, N, M]
    u: np.ndarray  # [L, N, K]
    s: np.ndarray  # [L, K]
    v: np.ndarray  # [L, K, M]

    @property
    def shape(self) -> tuple[int, int, int]:
        """[L, D, F], the layout of targets."""
        layers, outputs, inputs = self.w.shape
        return layers, inputs, outputs

    def frozen(self, rank: int, dtype: Any = np.float32) -> SvdFactors:
        """The factors as they are stored in files."""
        kept = (np.arange(self.s.shape[-1]) < rank).astype(dtype)
        u = np.ascontiguousarray(self.u.mT)
        return SvdFactors(u.astype(dtype), self.s.astype(dtype), self.v.astype(dtype), kept)

    def padded(self, rank: int, room: int) -> SvdFactors:
        """The factors as they are on a device with room for adapters of rank ``room``.

        The shorter side has only the weakest ``room`` directions, followed by zeros if there are
        fewer.
        """
        u, s, v, kept = self.frozen(rank)
        _, inputs, outputs = self.shape
        whole = max(s.shape[-1], room)
        return SvdFactors(
            resized(u, -2, whole if outputs > inputs else room),
            resized(s, -1, room),
            resized(v, -2, whole if inputs > outputs else room),
            resized(kept, -1, whole),
        )

    def strong(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """U_h [L, N, K - r] and V_h [L, K - r, M]."""
        return self.u[..., rank:], self.v[..., rank:, :]


def base_of(shape: tuple[int, int], layers: int = 2, seed: int = 0) -> Base:
    random = np.random.default_rng(seed)
    w = random.standard_normal((layers, *shape)) / np.sqrt(shape[1])
    u, s, v = np.linalg.svd(w, full_matrices=False)
    return Base(w, u[..., ::-1], s[..., ::-1], v[..., ::-1, :])


def config_of(rank: int, **options: str) -> AdapterConfig:
    return AdapterConfig(rank, 1.0, 0, kind="osft", options=options, train_unembed=False)


def resized(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The array, cut or padded with zeros to ``size``."""
    axis %= array.ndim
    array = np.take(array, range(min(size, array.shape[axis])), axis)
    widths = [(0, size - n if each == axis else 0) for each, n in enumerate(array.shape)]
    return np.pad(array, widths)


def fit(parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays padded with zeros to these shapes."""
    return {
        name: np.pad(part, [(0, n - m) for n, m in zip(shapes[name], part.shape, strict=True)])
        for name, part in parts.items()
    }


def change(parts: Parts, frozen: SvdFactors, rank: int) -> np.ndarray:
    """ΔW [L, N, M] in float64, from the factors.

    The difference of two float32 matrices would lose small changes.
    """
    own = {name: np.asarray(part, np.float64) for name, part in parts.items()}
    u0, s0, v0 = (
        np.asarray(x, np.float64)
        for x in (frozen.u[:, :rank].mT, frozen.s[:, :rank], frozen.v[:, :rank])
    )
    if "C" in own:
        return u0 @ own["C"] @ v0
    if "X" in own:
        is_tall = u0.shape[-2] >= v0.shape[-1]
        return own["X"].mT @ v0 if is_tall else u0 @ own["X"]
    return (own["U"].mT * own["S"][:, None]) @ own["V"] - (u0 * s0[:, None]) @ v0


def leaks(delta: np.ndarray, base: Base, rank: int) -> tuple[float, float]:
    """The share of ΔW in the strong left directions, and in the strong right ones."""
    u, v = base.strong(rank)
    whole = np.linalg.norm(delta)
    return np.linalg.norm(u.mT @ delta) / whole, np.linalg.norm(delta @ v.mT) / whole


@dataclass(frozen=True)
class Task:
    """Find the change of weights that made the targets. Much of it is out of reach."""

    x: np.ndarray  # [L, T, M]
    y: np.ndarray  # [L, T, N]

    def loss(self, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        a, b = pair
        return ((self.x @ a @ b - self.y) ** 2).mean()


def task_of(base: Base, tokens: int = 128, seed: int = 1) -> Task:
    random = np.random.default_rng(seed)
    layers, inputs, _ = base.shape
    x = random.standard_normal((layers, tokens, inputs))
    change = random.standard_normal(base.w.shape) / np.sqrt(inputs)
    return Task(x.astype(np.float32), (x @ change.mT).astype(np.float32))


def train(
    kind: AdapterKind,
    parts: Parts,
    frozen: SvdFactors,
    task: Task,
    steps: int,
    *,
    rate: float = 1e-3,
    projects_parts: bool = True,
) -> tuple[Parts, float]:
    """Run AdamW, clipped to norm 1, on the pair's gradients. Returns the arrays and last loss."""
    frozen = jax.tree.map(jnp.asarray, frozen)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    )

    def step(_: jax.Array, carry: tuple[Parts, Any]) -> tuple[Parts, Any]:
        parts, state = carry
        pair, pull = jax.vjp(lambda parts: kind.lora_pair(parts, frozen), parts)
        (gradient,) = pull(jax.grad(task.loss)(pair))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(kind.project(gradient, frozen), state, parts)
        parts = jax.tree.map(jnp.add, parts, updates)
        return (kind.project(parts, frozen) if projects_parts else parts), state

    @jax.jit
    def run(parts: Parts) -> tuple[Parts, jax.Array]:
        parts, _ = jax.lax.fori_loop(0, steps, step, (parts, optimizer.init(parts)))
        return parts, task.loss(kind.lora_pair(parts, frozen))

    parts, loss = run(jax.tree.map(jnp.asarray, dict(parts)))
    return jax.tree.map(np.asarray, parts), float(loss)
