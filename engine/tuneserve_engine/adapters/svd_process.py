"""Singular triples, computed in a process of their own.

A large weight may take more memory than the host has: the kernel then kills that process, and not
the worker with all tenants' requests.

    python -m tuneserve_engine.adapters.svd_process

reads weights from its standard input and writes their triples, in the format of ``SvdProcess``.
"""

import os
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from tuneserve_engine.core.errors import ServerError

Weight = np.ndarray[Any, np.dtype[Any]]

_ASKED = struct.Struct("<QQ?")
"""The header of a weight: inputs, outputs, and whether the numbers that follow are float64 (else
float32)."""
_ANSWERED = struct.Struct("<QB")
"""The header of an answer: the number of bytes that follow, and their meaning (one of the numbers
below)."""
_TRIPLES, _NO_MEMORY, _FAILED = range(3)


class SvdProcess:
    """The process: it starts with the first weight, and ends with the context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            _closed(self._process)

    def decompose(self, weight: Weight) -> tuple[bytes, bytes, bytes]:
        """Return ``u`` [K, F], ``s`` [K] and ``v`` [K, D] of Wᵀ [D, F], float32, the weakest first.

        Computed in float64: in float32 the directions of small singular values are orthogonal to
        1e-6 only, and every tenant's projections would inherit that. Raises ``LinAlgError`` for a
        weight without a decomposition, ``MemoryError`` if there is too little memory, or
        ``ServerError`` if the process ends for another reason.
        """
        inputs, outputs = weight.shape
        is_wide = weight.dtype == np.float64
        sent = np.ascontiguousarray(weight, np.float64 if is_wide else np.float32)
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(_ASKED.pack(inputs, outputs, is_wide))
            process.stdin.write(sent.data)
            process.stdin.flush()
            size, what = _ANSWERED.unpack(_read(process.stdout, _ANSWERED.size))
            answer = _read(process.stdout, size)
        except (BrokenPipeError, EOFError):
            self._process = None
            raise _why(_closed(process)) from None
        if what == _NO_MEMORY:
            raise MemoryError
        if what == _FAILED:
            raise np.linalg.LinAlgError(answer.decode())
        count = 4 * min(inputs, outputs)
        ends = count * outputs, count * (outputs + 1)
        return answer[: ends[0]], answer[ends[0] : ends[1]], answer[ends[1] :]

    def _started(self) -> subprocess.Popen[bytes]:
        # In a session of its own: an interrupt from the terminal is for the worker only.
        return subprocess.Popen(
            [sys.executable, "-m", "tuneserve_engine.adapters.svd_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )


def _closed(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended and its pipes are closed; return its status."""
    process.communicate()
    return process.returncode


def _why(status: int) -> Exception:
    if status == -signal.SIGKILL:  # only the kernel, without memory, does that
        return MemoryError()
    return ServerError(
        f"the process that decomposes the base model ended with status {status}; ask again, or "
        "use lora; the worker's log may say why"
    )


def main() -> int:
    """Answer until the standard input ends."""
    with suppress(OSError):  # a system without this file has no OOM killer to instruct
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library may print
    questions = sys.stdin.buffer
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            inputs, outputs, is_wide = _ASKED.unpack(_read(questions, _ASKED.size))
            dtype = np.dtype(np.float64 if is_wide else np.float32)
            content = _read(questions, inputs * outputs * dtype.itemsize)
            what, answer = _answered(np.frombuffer(content, dtype).reshape(inputs, outputs))
            answers.write(_ANSWERED.pack(sum(map(len, answer)), what))
            for part in answer:
                answers.write(part)
            answers.flush()
    return 0


def _answered(weight: Weight) -> tuple[int, list[bytes]]:
    try:
        exact = weight.astype(np.float64)
        if not np.isfinite(exact).all():  # LAPACK gives directions for infinities
            return _FAILED, [b"it has numbers that are not finite"]
        u, s, v = np.linalg.svd(exact.T, full_matrices=False)
    except np.linalg.LinAlgError as error:
        return _FAILED, [str(error).encode()]
    except MemoryError:
        return _NO_MEMORY, []
    return _TRIPLES, [x.astype(np.float32).tobytes() for x in (u.T[::-1], s[::-1], v[::-1])]


def _read(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


if __name__ == "__main__":
    sys.exit(main())
