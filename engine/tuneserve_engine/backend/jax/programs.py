"""A closed set of programs: pure functions of arrays, compiled ahead of their first call."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.stages import Compiled

from tuneserve_engine.backend.jax.models.decoder import Decoder

logger = logging.getLogger(__name__)

_COMPILATION = "/jax/core/compile/backend_compile_duration"
"""What JAX reports for every program, a single eager operation included, compiled or read from the
persistent cache."""


class Program:
    """A pure function. A call names a key, and all calls with one key have arguments of the same
    shapes: looking at some hundred arrays to find out would cost more than most calls."""

    def __init__(
        self, name: str, function: Callable[..., Any], bound: tuple[Any, ...], donate: Sequence[int]
    ) -> None:
        self.name = name
        self._bound = bound
        self._jitted = jax.jit(function, donate_argnums=[len(bound) + place for place in donate])
        self._shapes: dict[Hashable, Shape] = {}

    def declare(self, key: Hashable, *specs: Any, order: int = 0) -> None:
        """Makes ``compile_ahead`` compile for arguments like ``specs``: arrays, or only their
        ``jax.ShapeDtypeStruct``. The lowest ``order`` comes first."""
        self._shapes[key] = Shape(self, key, specs, order)

    def __call__(self, key: Hashable, *args: Any) -> Any:
        """What the function returns. Compiles first, or waits for it, where that is not done; an
        undeclared key is declared by its first call."""
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes.setdefault(key, Shape(self, key, _specs(args), 0))
        return shape.compiled()(*self._bound, *args)

    def shapes(self) -> list["Shape"]:
        """Everything declared."""
        return list(self._shapes.values())

    def lower(self, specs: tuple[Any, ...]) -> jax.stages.Lowered:
        return self._jitted.lower(*self._bound, *specs)


class Shape:
    """A program for the arguments of one key."""

    def __init__(self, program: Program, key: Hashable, specs: tuple[Any, ...], order: int) -> None:
        self.order = order
        self.name = f"{program.name} {key}"
        self._program = program
        self._specs = specs
        self._compiled: Compiled | None = None
        self._lock = threading.Lock()

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def compiled(self) -> Compiled:
        """The executable. Whoever comes first compiles it, the others wait; what cannot be compiled
        raises for each of them."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    started_s = time.monotonic()
                    self._compiled = self._program.lower(self._specs).compile()
                    logger.debug("%s: %.2f s", self.name, time.monotonic() - started_s)
        return self._compiled


class ProgramSet:
    """All programs of a process. ``ready`` is set when everything declared is compiled."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self._programs: list[Program] = []
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._compilations = _compilations()
        self._at_ready = 0

    def add(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        model: Decoder | None = None,
        donate: Sequence[int] = (),
    ) -> Program:
        """``function`` as a program; ``donate`` are places among the arguments of its calls.

        With a model it is ``function(model, *args)``, and calls leave the model out. Its weights
        are arguments: XLA would compute for seconds with what a program has closed over.
        """
        bound: tuple[Any, ...] = ()
        if model is not None:
            function, leaves = _with_leaves(model, function)
            bound = (leaves,)
        program = Program(name, function, bound, donate)
        self._programs.append(program)
        return program

    def compile_ahead(self, threads: int) -> None:
        """Compiles everything declared so far in the background, and then sets ``ready``.

        Calls need not wait for that: each waits for its own program at most.
        """
        declared = [shape for program in self._programs for shape in program.shapes()]
        waiting: SimpleQueue[Shape] = SimpleQueue()
        for shape in sorted(declared, key=lambda shape: shape.order):
            waiting.put(shape)
        workers = [
            threading.Thread(target=self._compile, args=(waiting,), name=f"compile-{number}")
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        threading.Thread(
            target=self._finish, args=(workers, declared, time.monotonic()), name="compiled"
        ).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether everything is compiled, after waiting for it; raises if a program cannot be."""
        self._ended.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return self.ready.is_set()

    @property
    def figures(self) -> dict[str, float]:
        """How far compiling ahead is, and what was compiled after it."""
        declared = [shape for program in self._programs for shape in program.shapes()]
        return {
            "ready": float(self.ready.is_set()),
            "programs": len(declared),
            "programs_compiled": sum(shape.is_compiled for shape in declared),
            "compilations_after_ready_total": self.compilations_after_ready,
        }

    @property
    def compilations_after_ready(self) -> int:
        """Of the whole process, eager operations included; none is expected."""
        return self._compilations.count - self._at_ready if self.ready.is_set() else 0

    def _compile(self, waiting: "SimpleQueue[Shape]") -> None:
        # A process that ends waits for its threads: they finish what they are at, no more.
        while threading.main_thread().is_alive():
            try:
                shape = waiting.get_nowait()
            except Empty:
                return
            try:
                shape.compiled()
            except Exception as error:
                logger.exception("%s cannot be compiled", shape.name)
                self._failure = self._failure or error

    def _finish(
        self, workers: list[threading.Thread], declared: list[Shape], started_s: float
    ) -> None:
        for worker in workers:
            worker.join()
        if all(shape.is_compiled for shape in declared):
            self._at_ready = self._compilations.count
            self.ready.set()
            logger.info("%d programs in %.1f s", len(declared), time.monotonic() - started_s)
        self._ended.set()


class Compilations:
    """Counts them, in the whole process."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILATION:
            with self._lock:
                self.count += 1


@cache
def _compilations() -> Compilations:
    return Compilations()


def _specs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    specs: tuple[Any, ...] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype),  # type: ignore[no-untyped-call]
        args,
    )
    return specs


def _with_leaves(
    model: Decoder, function: Callable[..., Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function of the model's arrays instead of the model, and these arrays.

    Taken apart once, merged while tracing: a call pays for neither.
    """
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def run(leaves: list[Any], *args: Any) -> Any:
        return function(nnx.merge(graph, jax.tree.unflatten(structure, leaves)), *args)

    return run, leaves
