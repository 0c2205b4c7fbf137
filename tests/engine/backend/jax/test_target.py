"""Programs are made for the device that is there, unless for one that is absent."""

import jax

from tuneserve_engine.backend.jax.programs.registry import compiler_options
from tuneserve_engine.backend.jax.target import compiling_for, target_platform


def test_the_platform_is_jax_s_unless_another_one_is_compiled_for() -> None:
    assert target_platform() == jax.default_backend() == "cpu"
    with compiling_for("gpu"):
        assert target_platform() == "gpu"
        assert "xla_gpu_autotune_level" in compiler_options()
        with compiling_for("cpu"):
            assert target_platform() == "cpu"
        assert target_platform() == "gpu"
    assert target_platform() == "cpu"
