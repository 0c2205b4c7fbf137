"""A closed set of programs: pure functions of arrays, compiled ahead of their first call."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.stages import Compiled

from tuneserve_engine.backend.jax.mesh import DeviceMesh, Parts
from tuneserve_engine.backend.jax.programs.cache import ProgramCache
from tuneserve_engine.backend.jax.programs.compilations import compilations
from tuneserve_engine.backend.jax.programs.live_calls import LiveCalls
from tuneserve_engine.backend.jax.programs.model_arguments import parts_of_model, with_leaves
from tuneserve_engine.backend.jax.target import target_platform
from tuneserve_engine.core.errors import ServerError

logger = logging.getLogger(__name__)

_EVERYWHERE: dict[str, bool | int] = {"xla_allow_excess_precision": False}
"""Otherwise XLA would leave out some roundings to bfloat16, different ones in each program, and a
policy's logprobs would depend on the program that computed them."""
_ON_A_GPU = {
    # Otherwise XLA would choose each product's kernel by timing, anew in every process and for
    # every program, and the kernels of one product add in different orders. cuBLAS chooses by
    # shape.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    # Otherwise XLA would concatenate the weights of products with the same factor in every call.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
_REASON_CHARS = 300
"""The length of the compiler's message that an error repeats; the log has all of it."""


def compiler_options() -> dict[str, bool | int]:
    """Return the options of programs on JAX's default device, whatever XLA_FLAGS says."""
    return _EVERYWHERE | (_ON_A_GPU if target_platform() == "gpu" else {})


class Program:
    """A pure function, compiled once per key.

    A call names a key, and all calls with one key have arguments of the same shapes. Deriving the
    key from some hundred arrays would cost more than most calls.
    """

    def __init__(
        self,
        name: str,
        use: str,
        jitted: jax.stages.Wrapped,
        bound: tuple[Any, ...],
        registry: "ProgramRegistry",
    ) -> None:
        self.name = name
        self.use = use
        self._jitted = jitted
        self._bound = bound
        self._kept = registry.kept
        self._live_calls = registry.live_calls
        self._shapes: dict[Hashable, Specialization] = {}

    def declare(self, key: Hashable, *specs: Any, order: int = 0) -> None:
        """Make ``compile_ahead`` compile for arguments like ``specs``, lowest ``order`` first.

        ``specs`` are arrays, or only their ``jax.ShapeDtypeStruct``. A key that is declared already
        stays as it is.
        """
        self.declare_later(key, lambda: specs, order=order)

    def declare_later(
        self, key: Hashable, specs: Callable[[], tuple[Any, ...]], *, order: int = 0
    ) -> None:
        """Declare as ``declare`` does. The thread that compiles the program calls ``specs``."""
        self._shapes.setdefault(key, Specialization(self, key, specs, order))

    def __call__(self, key: Hashable, *args: Any) -> Any:
        """Return the result of the function.

        If the program for the key is not compiled yet, compiles it or waits for that. The first
        call with an undeclared key declares it. Raises ``ServerError`` if it cannot be compiled.
        """
        self._live_calls.note()
        shape = self._shapes.get(key)
        if shape is None:
            self.declare(key, *_specs(args))
            shape = self._shapes[key]
        run = shape.executable or shape.compiled()
        return run(*self._bound, *args)

    def shape(self, key: Hashable) -> "Specialization":
        """Return what is declared for the key."""
        return self._shapes[key]

    def shapes(self) -> list["Specialization"]:
        """Return everything declared."""
        return list(self._shapes.values())

    def lower(
        self, specs: tuple[Any, ...], place: Callable[[Any], Any] | None = None
    ) -> jax.stages.Lowered:
        """Trace the function; ``place`` maps each argument to its spec on another device."""
        arguments = (*self._bound, *specs)
        return self._jitted.lower(*(jax.tree.map(place, arguments) if place else arguments))

    def compiled(self, key: Hashable, specs: tuple[Any, ...]) -> Compiled:
        """Return the executable from the cache, or compile it and keep it there."""
        if self._kept is None:
            return self.lower(specs).compile()
        identity = self._identity(key, specs)
        found = self._kept.load(identity)
        if found is None:
            found = self.lower(specs).compile()
            self._kept.store_program(identity, found)
        return found

    def keep(
        self, key: Hashable, specs: tuple[Any, ...], place: Callable[[Any], Any] | None
    ) -> bool:
        """Compile into the cache unless it has the program, and return whether it did not.

        Raises ``OSError`` or another error if the program cannot be compiled or kept.
        """
        assert self._kept is not None, "there is no cache to compile into"
        identity = self._identity(key, specs)
        if self._kept.has(identity):
            return False
        self._kept.write(identity, self.lower(specs, place).compile())
        return True

    def _identity(self, key: Hashable, specs: tuple[Any, ...]) -> str:
        """Return the name of the program in the cache: what its key and its arguments are."""
        leaves = jax.tree_util.tree_leaves_with_path((self._bound, specs))
        if not leaves:  # only its result tells the program from others of its name
            leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(self._jitted))
        taken = " ".join(
            f"{jax.tree_util.keystr(path)} {leaf.dtype}{np.shape(leaf)}" for path, leaf in leaves
        )
        return f"{self.name} {key} of {taken}"


class Specialization:
    """A program for the arguments of one key: waiting, compiled, or refused by the compiler."""

    def __init__(
        self, program: Program, key: Hashable, specs: Callable[[], tuple[Any, ...]], order: int
    ) -> None:
        self.order = order
        self._key = key
        self.name = f"{program.name} {key}"
        self._program = program
        self._specs = specs
        self.executable: Compiled | None = None
        self._refusal: str | None = None  # not the exception: its frames would keep arrays alive
        self._lock = threading.Lock()

    @property
    def is_compiled(self) -> bool:
        return self.executable is not None

    @property
    def is_refused(self) -> bool:
        """Whether it cannot be compiled. Compiling is tried once."""
        return self._refusal is not None

    def lowered(self, place: Callable[[Any], Any]) -> jax.stages.Lowered:
        """Return the program before compiling, for the device on which ``place`` puts arguments."""
        return self._program.lower(self._specs(), place)

    def keep(self, place: Callable[[Any], Any] | None = None) -> bool:
        """Compile the program into the cache only. See ``Program.keep``."""
        return self._program.keep(self._key, self._specs(), place)

    def compiled(self) -> Compiled:
        """Return the executable. The first caller compiles it; concurrent callers wait.

        Raises ``ServerError`` if it cannot be compiled; the device and other programs still work.
        """
        if self.executable is None:
            with self._lock:
                if self.executable is None and self._refusal is None:
                    self._compile()
        if self.executable is None:
            raise self._error()
        return self.executable

    def _compile(self) -> None:
        started_s = time.monotonic()
        try:
            self.executable = self._program.compiled(self._key, self._specs())
        except Exception as error:
            logger.exception("%s cannot be compiled", self.name)
            reason = (str(error).splitlines() or [""])[0][:_REASON_CHARS]
            self._refusal = reason or type(error).__name__
        else:
            logger.debug("%s: %.2f s", self.name, time.monotonic() - started_s)

    def _error(self) -> ServerError:
        error = ServerError(
            f"this server cannot run {self.name}, its program for {self._program.use}; the "
            f"compiler said: {self._refusal}; other requests are served; ask the operator, whose "
            "log says more"
        )
        error.no_room = True
        return error


class ProgramRegistry:
    """All programs of a process, for the devices of ``mesh``: one by default.

    ``ready`` is set when everything declared has been compiled ahead or been refused. Programs in
    the cache ``kept`` are not compiled again.
    """

    def __init__(self, kept: ProgramCache | None = None, mesh: DeviceMesh | None = None) -> None:
        self.kept = kept
        self.mesh = mesh or DeviceMesh()
        self.live_calls = LiveCalls()
        self.ready = threading.Event()
        self._programs: list[Program] = []
        self._is_ahead = False
        self._compilations = compilations()
        self._at_ready = 0

    def add_program(  # noqa: PLR0913
        self,
        name: str,
        function: Callable[..., Any],
        *,
        use: str,
        model: nnx.Module | None = None,
        donate: Sequence[int] = (),
        parts: Parts | None = None,
    ) -> Program:
        """Add ``function`` as a program.

        With several devices, it runs on each with the device's ``parts`` of the arguments that a
        call gives; without ``parts``, all arguments and results are whole on each.

        ``donate`` are positions among the arguments of a call. ``use`` tells clients which requests
        need the program and what its keys are.

        With a model, the function is ``function(model, *args)``, and calls leave the model out. The
        model's weights are arguments of the program: XLA would spend seconds on computations with
        arrays that a program has closed over.
        """
        bound: tuple[Any, ...] = ()
        own: tuple[Any, ...] = ()
        if model is not None:
            own = (parts_of_model(model, self.mesh),)
            function, leaves = with_leaves(model, function)
            bound = (leaves,)
        if parts is not None:
            parts = parts._replace(arguments=(*own, *parts.arguments))
        function, placed = self.mesh.placed(function, parts)
        jitted = jax.jit(
            function,
            **placed,
            donate_argnums=[len(bound) + place for place in donate],
            # Otherwise the memory of arguments that are only overwritten would not be reused.
            keep_unused=bool(donate),
            compiler_options=compiler_options(),
        )
        program = Program(name, use, jitted, bound, self)
        self._programs.append(program)
        return program

    def shapes(self) -> list[Specialization]:
        """Return everything declared so far."""
        return [shape for program in self._programs for shape in program.shapes()]

    def compile_ahead(self, threads: int) -> None:
        """Compile everything declared so far in the background, and then set ``ready``.

        A call does not wait for that: it waits for its own program at most. While programs are
        called, this compiles a quarter of the time at most.
        """
        self._is_ahead = True
        declared = self.shapes()
        waiting: SimpleQueue[Specialization] = SimpleQueue()
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

    def compile_on_demand(self, shapes: Iterable[Specialization]) -> None:
        """Compile these now, if the rest is compiled ahead.

        The caller waits; other callers do not. If a program cannot be compiled, requests that need
        it fail.
        """
        if not self._is_ahead:
            return
        for shape in shapes:
            if (
                not threading.main_thread().is_alive()
            ):  # the process is ending and waits for its threads
                return
            before = self._made_here()
            with suppress(ServerError):
                shape.compiled()
            if self.ready.is_set():  # expected: not counted in ``compilations_after_ready``
                self._at_ready += self._made_here() - before

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is ready, and return whether it is."""
        return self.ready.wait(timeout_s)

    @property
    def metrics(self) -> dict[str, float]:
        """Gauges of compiling ahead, and a counter of what was compiled after it.

        ``ready`` is missing if nothing is compiled ahead: such a process never becomes ready, but
        is not cold either.
        """
        declared = self.shapes()
        ready = {"ready": float(self.ready.is_set())} if self._is_ahead else {}
        return {
            **ready,
            "programs": len(declared),
            "programs_compiled": sum(shape.is_compiled for shape in declared),
            "programs_failed": sum(shape.is_refused for shape in declared),
            "compilations_after_ready_total": self.compilations_after_ready,
        }

    @property
    def compilations_after_ready(self) -> int:
        """Compilations after ``ready`` in the whole process, eager operations included.

        None is expected. Programs that an earlier process compiled that late, and this one only
        loads, count too.
        """
        return self._made() - self._at_ready if self.ready.is_set() else 0

    def _made(self) -> int:
        return self._compilations.count + (self.kept.loaded if self.kept else 0)

    def _made_here(self) -> int:
        """Return the compilations by this thread plus the programs loaded by all threads."""
        kept = self.kept.loaded if self.kept else 0
        return self._compilations.by_thread[threading.get_ident()] + kept

    def _compile(self, waiting: "SimpleQueue[Specialization]") -> None:
        # A process that ends waits for its threads: each finishes its current program, not more.
        while threading.main_thread().is_alive():
            try:
                shape = waiting.get_nowait()
            except Empty:
                return
            started_s = time.monotonic()
            with suppress(ServerError):  # requests that need it get the error; the log has it
                shape.compiled()
            if not waiting.empty():
                self.live_calls.rest(time.monotonic() - started_s)

    def _finish(
        self, workers: list[threading.Thread], declared: list[Specialization], started_s: float
    ) -> None:
        for worker in workers:
            worker.join()
        refused = sum(shape.is_refused for shape in declared)
        if sum(shape.is_compiled for shape in declared) + refused < len(declared):
            return  # the process is ending
        self._at_ready = self._made()
        self.ready.set()
        loaded, seconds = self.kept.loaded if self.kept else 0, time.monotonic() - started_s
        logger.info("%d programs in %.1f s, %d of them loaded", len(declared), seconds, loaded)
        if refused:
            logger.error("%d of them cannot be compiled: requests that need them fail", refused)


def _specs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    specs: tuple[Any, ...] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype),  # type: ignore[no-untyped-call]
        args,
    )
    return specs
