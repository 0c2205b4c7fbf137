"""The graph of a custom loss: read from the client's JSON, and checked before it is accepted.

A graph is a list of nodes, as torch.fx records them: the inputs, the calls, and the output. A node
refers to earlier nodes by their names; here, by their positions.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from tuneserve_engine.core.errors import UserError, shown
from tuneserve_engine.custom_loss import operations, scalars
from tuneserve_engine.custom_loss.tape import DTYPES

MAX_NODES = 4096
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_TEXT_BYTES = 256 * 1024
"""The most bytes of a graph as it is stored; every request of the loss carries it."""

_MAX_DEPTH = 8
_MAX_ITEMS = 1024  # of one list of arguments
_MAX_LITERAL = 64  # characters of a text
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_OUTPUT = "the output has to be (loss, metrics): a tensor, and a dict of tensors"


@dataclass(frozen=True)
class Ref:
    """The value of the node at this position."""

    position: int


@dataclass(frozen=True)
class Node:
    """One call. ``args`` and ``kwargs`` hold literals, and ``Ref`` for values of earlier nodes."""

    position: int
    name: str
    target: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class LossInput:
    """An input of a loss: ``logprobs``, or one of the datum's inputs, with its rank."""

    name: str
    rank: int


@dataclass(frozen=True)
class CustomLoss:
    """A checked graph. The first input is ``logprobs``; input i is the value at ``places[i]``.

    ``calls`` are in the order of execution. ``loss`` and ``metrics`` are what the graph returns.
    """

    name: str
    inputs: tuple[LossInput, ...]
    places: tuple[int, ...]
    calls: tuple[Node, ...]
    loss: Ref
    metrics: dict[str, Any]
    size: int  # the number of nodes


class _Input(msgspec.Struct):
    name: str
    rank: int


class _Node(msgspec.Struct):
    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class _Graph(msgspec.Struct):
    name: str
    inputs: list[_Input]
    nodes: list[_Node]


def to_text(name: str, inputs: Sequence[dict[str, Any]], nodes: Sequence[dict[str, Any]]) -> str:
    """Return the text in which a graph is stored. Raises ``UserError`` for one that is too long."""
    try:
        text = msgspec.json.encode({"name": name, "inputs": inputs, "nodes": nodes})
    except (RecursionError, OverflowError, TypeError, ValueError):
        raise UserError("the graph has arguments nested too deeply, or no JSON") from None
    if len(text) > MAX_TEXT_BYTES:
        raise UserError(
            f"the graph has {len(text)} bytes; the limit is {MAX_TEXT_BYTES}; make the loss "
            "smaller, or run it on the client: pass the function to forward_backward_custom"
        )
    return text.decode()


@lru_cache(maxsize=16)  # of a quarter of a megabyte at most
def parse(text: str) -> CustomLoss:
    """Return the graph in a stored text. Raises ``UserError`` for one that cannot be run."""
    try:
        graph = msgspec.json.decode(text, type=_Graph)
    except (msgspec.DecodeError, RecursionError):
        raise UserError("the graph of the custom loss is not in the form of format 1") from None
    if not 1 <= len(graph.nodes) <= MAX_NODES:
        raise UserError(
            f"the graph has {len(graph.nodes)} nodes; it may have 1 to {MAX_NODES}; make the loss "
            "smaller, or run it on the client: pass the function to forward_backward_custom"
        )
    return _GraphReader(graph).read()


class _GraphReader:
    """The reading of one graph, node by node."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._inputs = _checked_inputs(graph.inputs)
        self._positions: dict[str, int] = {}
        self._places: list[int] = []
        self._calls: list[Node] = []

    def read(self) -> CustomLoss:
        *nodes, last = self._graph.nodes
        for position, node in enumerate(nodes):
            self._read_node(position, node)
        if len(self._places) != len(self._inputs):
            raise UserError(
                f"the graph has {len(self._places)} placeholder nodes for {len(self._inputs)} "
                "inputs; it needs one for each, in their order"
            )
        if last.op != "output" or len(last.args) != 1 or last.kwargs:
            raise UserError(f"the last node is no output; {_OUTPUT}")
        output = self._decoded(last.args[0], 0, "the output")
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise UserError(_OUTPUT)
        loss, metrics = output
        if not isinstance(loss, Ref) or not isinstance(metrics, dict):
            raise UserError(_OUTPUT)
        self._check_metrics(metrics)
        return CustomLoss(
            self._graph.name[:_MAX_LITERAL],
            self._inputs,
            tuple(self._places),
            tuple(self._calls),
            loss,
            metrics,
            len(nodes),
        )

    def _read_node(self, position: int, node: _Node) -> None:
        if not _NAME.fullmatch(node.name) or node.name in self._positions:
            raise UserError(
                f"node {position} has no name of its own of up to 128 letters, digits and _"
            )
        where = f"node {node.name} ({shown(node.target)})"
        if node.op == "placeholder":
            at = len(self._places)
            if at >= len(self._inputs) or node.target != self._inputs[at].name:
                raise UserError(f"{where}: placeholders are the inputs, in their order")
            self._places.append(position)
        elif node.op in ("call_function", "call_method"):
            self._calls.append(self._call(position, node, where))
        else:
            raise UserError(f"{where}: {_UNCALLED.get(node.op, 'it is no kind of node')}")
        self._positions[node.name] = position

    def _call(self, position: int, node: _Node, where: str) -> Node:
        args = tuple(self._decoded(each, 0, where) for each in node.args)
        kwargs = {key: self._decoded(each, 0, where) for key, each in node.kwargs.items()}
        try:
            function = operations.find(node.op, node.target)
            if node.target == "getattr":
                _check_attribute(args)
            args, kwargs = operations.arguments(function, args, kwargs)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return Node(position, node.name, node.target, function, args, kwargs)

    def _decoded(self, value: Any, depth: int, where: str) -> Any:
        """Return an argument as it is used, from its form in the message."""
        if depth > _MAX_DEPTH:
            raise UserError(f"{where}: arguments nested more than {_MAX_DEPTH} deep")
        if isinstance(value, str) and len(value) > _MAX_LITERAL:
            raise UserError(f"{where}: a text of more than {_MAX_LITERAL} characters")
        if isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{where}: an integer beyond 64 bits")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return self._items(value, depth, where)
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            decode = _KINDS.get(kind)
            if decode is not None:
                return decode(self, content, depth, where)
        raise UserError(f"{where}: an argument in no form of format 1")

    def _items(self, items: Any, depth: int, where: str) -> list[Any]:
        if not isinstance(items, list) or len(items) > _MAX_ITEMS:
            raise UserError(f"{where}: no list of up to {_MAX_ITEMS} elements")
        return [self._decoded(each, depth + 1, where) for each in items]

    def _ref(self, name: Any, depth: int, where: str) -> Ref:
        if not isinstance(name, str) or name not in self._positions:
            raise UserError(f"{where}: it refers to a node that does not come before it")
        return Ref(self._positions[name])

    def _tuple(self, items: Any, depth: int, where: str) -> tuple[Any, ...]:
        return tuple(self._items(items, depth, where))

    def _dict(self, entries: Any, depth: int, where: str) -> dict[str, Any]:
        if not isinstance(entries, dict) or len(entries) > _MAX_ITEMS:
            raise UserError(f"{where}: no dict of up to {_MAX_ITEMS} entries")
        for key in entries:
            if not isinstance(key, str) or len(key) > 128:
                raise UserError(f"{where}: a key of more than 128 characters")
        return {key: self._decoded(each, depth + 1, where) for key, each in entries.items()}

    def _slice(self, ends: Any, depth: int, where: str) -> slice:
        found = self._items(ends, depth, where)
        if len(found) != 3:
            raise UserError(f"{where}: a slice has a start, a stop and a step")
        return slice(*found)

    def _ellipsis(self, _: Any, depth: int, where: str) -> Any:
        return ...

    def _float(self, text: Any, depth: int, where: str) -> float:
        if text not in ("inf", "-inf", "nan"):
            raise UserError(f"{where}: a float that is not inf, -inf or nan")
        return float(text)

    def _dtype(self, name: Any, depth: int, where: str) -> Any:
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise UserError(f"{where}: a dtype that is not offered; use {', '.join(_SHOWN)}")
        return dtype

    def _ignored(self, name: Any, depth: int, where: str) -> str:
        return "cpu"  # devices and layouts have no effect here

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        if len(metrics) > MAX_METRICS:
            raise UserError(f"the loss has {len(metrics)} metrics; the limit is {MAX_METRICS}")
        for key, value in metrics.items():
            if not _METRIC.fullmatch(key) or not isinstance(value, Ref):
                raise UserError(
                    f"metric {shown(key)} has to be named custom/<name>:sum or custom/<name>:mean, "
                    "in lowercase, and to be a tensor of one element"
                )


def _check_attribute(args: tuple[Any, ...]) -> None:
    name = args[1] if len(args) == 2 else None
    if not isinstance(name, str) or name not in scalars.ATTRIBUTES:
        raise UserError(
            f"an attribute that is not offered; use {', '.join(sorted(scalars.ATTRIBUTES))}"
        )


def _checked_inputs(inputs: Sequence[_Input]) -> tuple[LossInput, ...]:
    names = [each.name for each in inputs]
    if not 1 <= len(inputs) <= MAX_INPUTS or len({*names}) < len(names):
        raise UserError(f"a custom loss has 1 to {MAX_INPUTS} inputs of different names")
    if names[0] != "logprobs" or inputs[0].rank not in (1, 2):
        raise UserError("the first input of a custom loss is logprobs, of rank 1 or 2")
    for i, each in enumerate(inputs):
        if not _INPUT_NAME.fullmatch(each.name) or each.rank not in (0, 1, 2):
            raise UserError(
                f"inputs[{i}] needs a name of up to 64 lowercase letters, digits and _, and a "
                "rank of 0, 1 or 2"
            )
    return tuple(LossInput(each.name, each.rank) for each in inputs)


_SHOWN = ("float32", "float64", "int64", "int32", "bool")
_UNCALLED = {
    "get_attr": "it captures a tensor; pass it to the loss as one of the datum's inputs",
    "call_module": "it calls a module; use functions such as torch.nn.functional",
    "output": "the output has to be the last node",
}
_KINDS: dict[str, Callable[[_GraphReader, Any, int, str], Any]] = {
    "ref": _GraphReader._ref,
    "tuple": _GraphReader._tuple,
    "dict": _GraphReader._dict,
    "slice": _GraphReader._slice,
    "ellipsis": _GraphReader._ellipsis,
    "float": _GraphReader._float,
    "dtype": _GraphReader._dtype,
    "device": _GraphReader._ignored,
    "layout": _GraphReader._ignored,
    "memory_format": _GraphReader._ignored,
}
