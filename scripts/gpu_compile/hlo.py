"""Read an optimised XLA module from its text: computations, instructions and their types."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (\(.*?\)|[\w\[\],{}:#()*]+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|f8\w*|[fsu]\d+)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.-]+)")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class ArrayType:
    """One array: its element type in XLA's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes, with those of elements below a byte rounded up to one."""
        if self.dtype == "pred":
            return self.size
        found = _BITS.search(self.dtype.removeprefix("b"))
        return self.size * max(int(found[0]) // 8, 1) if found else self.size


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``rest`` is its line after the opening bracket of its operands."""

    name: str
    type: str
    opcode: str
    rest: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of the result, more than one if it is a tuple."""
        return tuple(
            ArrayType(dtype, tuple(int(size) for size in shape.split(",") if size))
            for dtype, shape in _ARRAY.findall(self.type)
        )

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.arrays)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        depth, end = 0, len(self.rest)
        for at, char in enumerate(self.rest):
            depth += (char == "(") - (char == ")")
            if depth < 0:
                end = at
                break
        return tuple(_NAME.findall(_COMMENT.sub("", self.rest[:end])))

    @cached_property
    def source(self) -> str:
        """The operation of the traced program, as a path of scopes; empty if XLA has made it."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of the pattern in the attributes, or None."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None

    def called(self, attribute: str) -> tuple[str, ...]:
        """Return the computations in an attribute such as ``calls`` or ``body``."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.-]+)", self.rest)
        return tuple(_NAME.findall(found[1])) if found else ()


Computation = Mapping[str, Instruction]
"""The instructions of a computation by name, in the order in which they are scheduled."""


@dataclass(frozen=True)
class Module:
    """The computations of a module by name, and the name of the one to begin with."""

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Read a module's text. Raises ``ValueError`` for other text."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and line.strip():
                found = _INSTRUCTION.match(line)
                if not found:
                    raise ValueError(f"no instruction of XLA: {line[:200]!r}")
                root, name, *rest = found.groups()
                current[name] = Instruction(name, *rest, is_root=root is not None)
        if not entry:
            raise ValueError("the text has no entry computation; it is not a module of XLA")
        return cls(computations, entry)

    def root(self, computation: str) -> Instruction:
        return next(each for each in self.computations[computation].values() if each.is_root)
