"""Programs are compiled ahead, in order and once. Unexpected compilations are counted."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.decoders import random_decoder
from tuneserve_engine.backend.jax.device_errors import translate_device_errors
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.backend.jax.programs.live_calls import LiveCalls
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry, compiler_options
from tuneserve_engine.core.errors import ServerError

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
ONES = np.ones(3, np.float32)


def double(x: Any) -> Any:
    return x + x


def triple(x: Any) -> Any:
    return x * 3


def traced(seen: list[str], name: str) -> Callable[[Any], Any]:
    """A function that records each of its compilations."""

    def run(x: Any) -> Any:
        seen.append(name)
        return x + 1

    return run


def refused(seen: list[str], said: str) -> Callable[[Any], Any]:
    """A function that the compiler refuses with these words. It records each attempt."""

    def run(x: Any) -> Any:
        seen.append(said)
        raise jax.errors.JaxRuntimeError(said)

    return run


def test_a_program_computes_its_function() -> None:
    programs = ProgramRegistry()
    program = programs.add_program("double", double, use="tests")
    program.declare("short", VECTOR)
    np.testing.assert_array_equal(program("short", ONES), [2, 2, 2])


def test_on_a_gpu_no_kernel_is_chosen_by_timing_and_no_weights_are_concatenated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everywhere = {"xla_allow_excess_precision": False}
    assert compiler_options() == everywhere
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler_options() == everywhere | {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
    }


def test_a_key_is_compiled_once_and_an_undeclared_one_by_its_first_call() -> None:
    seen: list[str] = []
    program = ProgramRegistry().add_program("noted", traced(seen, "run"), use="tests")
    program.declare(3, VECTOR)
    for _ in range(3):
        program(3, ONES)
        program(5, np.ones(5, np.float32))
    assert seen == ["run", "run"]


def test_specs_that_take_time_are_asked_for_when_the_program_is_compiled() -> None:
    asked: list[str] = []

    def specs() -> tuple[Any, ...]:
        asked.append("asked")
        return (VECTOR,)

    program = ProgramRegistry().add_program("double", double, use="tests")
    program.declare_later("short", specs)
    assert not asked
    for _ in range(2):
        np.testing.assert_array_equal(program("short", ONES), [2, 2, 2])
    assert asked == ["asked"]


def test_specs_that_fail_refuse_the_program() -> None:
    def specs() -> tuple[Any, ...]:
        raise ValueError("no such shape")

    program = ProgramRegistry().add_program("double", double, use="tests")
    program.declare_later("short", specs)
    with pytest.raises(ServerError, match="no such shape"):
        program("short", ONES)


def test_arguments_that_do_not_match_the_shape_of_their_key_are_refused() -> None:
    program = ProgramRegistry().add_program("double", double, use="tests")
    program.declare("short", VECTOR)
    with pytest.raises(TypeError):
        program("short", np.ones(4, np.float32))


def test_donated_arguments_are_deleted_and_others_are_not() -> None:
    program = ProgramRegistry().add_program("sum", lambda x, y: x + y, use="tests", donate=(1,))
    kept, given = jnp.ones(3), jnp.ones(3)
    program("short", kept, given)
    assert given.is_deleted() and not kept.is_deleted()


def test_a_model_is_bound_to_a_program_and_does_not_shift_donated_arguments() -> None:
    config = ModelConfig("qwen3", 11, 8, 1, 2, 1, 4, 8, 16)
    model = random_decoder(config)
    program = ProgramRegistry().add_program(
        "row",
        lambda model, x: x + model.unembedding()[0],
        use="tests",
        model=model,
        donate=(0,),
    )
    want = np.asarray(model.unembedding()[0]) + 1
    given = jnp.ones(8)
    np.testing.assert_array_equal(program((), given), want)
    assert given.is_deleted() and not model.unembedding().is_deleted()


def test_all_declared_programs_are_compiled_ahead_in_order() -> None:
    seen: list[str] = []
    programs = ProgramRegistry()
    for name, order in (("rare", 2), ("first", 0), ("second", 1), ("first too", 0)):
        programs.add_program(name, traced(seen, name), use="tests").declare((), VECTOR, order=order)
    assert not programs.ready.is_set()
    programs.compile_ahead(threads=1)
    assert programs.wait(60)
    assert programs.ready.is_set()
    assert seen == ["first", "first too", "second", "rare"]


def test_a_call_is_noted_and_there_is_a_rest_between_programs_that_are_compiled_ahead() -> None:
    registry = ProgramRegistry()
    registry.live_calls = mock.Mock(spec=LiveCalls)
    program = registry.add_program("double", double, use="tests")
    for key in (1, 2, 3):
        program.declare(key, VECTOR)
    program(1, ONES)
    registry.live_calls.note.assert_called_once_with()
    registry.live_calls.rest.assert_not_called()
    registry.compile_ahead(threads=1)
    assert registry.wait(60)
    nothing, something = (call.args[0] for call in registry.live_calls.rest.call_args_list)
    assert 0 <= nothing < something


def test_a_call_does_not_wait_for_earlier_programs() -> None:
    """The only thread is stuck in the first program, so the call compiles the last one itself."""
    stuck, free = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        stuck.set()
        assert free.wait(60)
        return x

    programs = ProgramRegistry()
    programs.add_program("slow", slow, use="tests").declare((), VECTOR)
    program = programs.add_program("double", double, use="tests")
    program.declare((), VECTOR, order=9)
    programs.compile_ahead(threads=1)
    assert stuck.wait(60)
    np.testing.assert_array_equal(program((), ONES), [2, 2, 2])
    assert not programs.wait(0.01)
    free.set()
    assert programs.wait(60)


def test_a_call_waits_for_the_thread_that_compiles_its_program() -> None:
    began, free = threading.Event(), threading.Event()
    seen: list[str] = []

    def slow(x: Any) -> Any:
        seen.append("traced")
        began.set()
        assert free.wait(60)
        return x

    programs = ProgramRegistry()
    program = programs.add_program("slow", slow, use="tests")
    program.declare((), VECTOR)
    programs.compile_ahead(threads=1)
    assert began.wait(60)
    threading.Timer(0.05, free.set).start()
    np.testing.assert_array_equal(program((), ONES), ONES)
    assert seen == ["traced"]


@pytest.mark.parametrize(
    "said", ["INTERNAL: ptxas exited with 1", "RESOURCE_EXHAUSTED: out of memory in autotuning"]
)
def test_a_program_that_cannot_be_compiled_is_tried_once_and_fails_its_calls_only(
    said: str,
) -> None:
    """Neither did the device fail, nor was a request too large for it."""
    seen: list[str] = []
    programs = ProgramRegistry()
    broken = programs.add_program("broken", refused(seen, said), use="sums, by length")
    sound = programs.add_program("double", double, use="tests")
    broken.declare(3, VECTOR)
    sound.declare(3, VECTOR)
    programs.compile_ahead(threads=1)
    assert programs.wait(60)
    for _ in range(2):
        with pytest.raises(ServerError) as failed:
            translate_device_errors(broken, 3, ONES)
        assert str(failed.value) == (
            f"this server cannot run broken 3, its program for sums, by length; the compiler said: "
            f"{said}; other requests are served; ask the operator, whose log says more"
        )
        assert failed.value.no_room  # a model that needs it is not lost: another worker may run it
    np.testing.assert_array_equal(sound(3, ONES), [2, 2, 2])
    assert seen == [said]
    assert programs.metrics == {
        "ready": 1.0,
        "programs": 2,
        "programs_compiled": 1,
        "programs_failed": 1,
        "compilations_after_ready_total": 0,
    }


def test_a_program_that_fails_to_compile_on_demand_is_tried_once_too() -> None:
    seen: list[str] = []
    programs = ProgramRegistry()
    broken = programs.add_program(
        "broken", refused(seen, "a long story\nwith a second line"), use="sums"
    )
    for _ in range(2):
        with pytest.raises(ServerError, match=r"said: a long story; other"):
            broken("undeclared", ONES)
    assert len(seen) == 1
    assert programs.metrics["programs_failed"] == 1


def test_without_compiling_ahead_the_registry_is_neither_ready_nor_cold() -> None:
    programs = ProgramRegistry()
    program = programs.add_program("double", double, use="tests")
    program.declare("short", VECTOR)
    program("short", ONES)
    assert programs.metrics == {
        "programs": 1,
        "programs_compiled": 1,
        "programs_failed": 0,
        "compilations_after_ready_total": 0,
    }


def test_every_compilation_of_the_process_after_ready_is_counted() -> None:
    programs = ProgramRegistry()
    program = programs.add_program("double", double, use="tests")
    program.declare((), VECTOR)
    jnp.zeros(1234)  # does not count: it precedes ready
    assert programs.compilations_after_ready == 0
    programs.compile_ahead(threads=2)
    assert programs.wait(60)
    program((), ONES)
    program((), jax.device_put(ONES))
    assert programs.compilations_after_ready == 0
    jnp.zeros(1235)  # a single eager operation
    assert programs.compilations_after_ready == 1
    program("longer", np.ones(7, np.float32))
    assert programs.compilations_after_ready == 2


def test_late_programs_that_were_announced_do_not_count_as_unexpected() -> None:
    programs = ProgramRegistry()
    programs.add_program("first", double, use="all").declare(1, np.zeros(3, np.float32))
    late = programs.add_program("late", triple, use="some")
    programs.compile_ahead(1)
    assert programs.wait(60)
    for size in (4, 5):
        late.declare(size, np.zeros(size, np.float32))
    programs.compile_on_demand(late.shapes())
    assert programs.compilations_after_ready == 0
    assert all(shape.is_compiled for shape in late.shapes())
    late(6, np.zeros(6, np.float32))
    assert programs.compilations_after_ready == 1


def test_programs_announced_before_ready_are_counted_once() -> None:
    programs = ProgramRegistry()
    gate = threading.Event()

    def waits(x: Any) -> Any:
        assert gate.wait(60)
        return x + 1

    programs.add_program("waits", waits, use="all").declare(1, np.zeros(7, np.float32))
    late = programs.add_program("late", triple, use="some")
    late.declare(1, np.zeros(8, np.float32))
    programs.compile_ahead(1)
    programs.compile_on_demand(late.shapes())
    gate.set()
    assert programs.wait(60)
    assert programs.compilations_after_ready == 0
    late(9, np.zeros(9, np.float32))
    assert programs.compilations_after_ready == 1


def test_a_process_that_ends_finishes_only_one_program() -> None:
    """It skips the other 9,999 and prints no trace on stderr."""
    script = """
import jax, jax.numpy as jnp
from tuneserve_engine.backend.jax.programs.registry import ProgramRegistry
programs = ProgramRegistry()
program = programs.add_program("double", lambda x: x + x, use="tests")
for size in range(10_000):
    program.declare(size, jax.ShapeDtypeStruct((size,), jnp.float32))
programs.compile_ahead(threads=1)
print("ends")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
