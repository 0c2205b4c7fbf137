"""Specs of arrays stand for their shape and type."""

import jax
import jax.numpy as jnp

from tuneserve_engine.backend.jax.specs import spec


def test_a_spec_can_be_traced_in_place_of_an_array() -> None:
    doubled = jax.eval_shape(lambda x: 2 * x, spec((2, 3), jnp.bfloat16))
    assert (doubled.shape, doubled.dtype) == ((2, 3), jnp.bfloat16)
