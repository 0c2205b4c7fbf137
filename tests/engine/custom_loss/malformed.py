"""Malformed and hostile graphs, from a seed: valid ones with parts replaced, and bombs."""

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.engine.custom_loss import losses
from tests.engine.custom_loss.traced import text_of

_VALID = [
    json.loads(text_of(losses.dpo, dict.fromkeys(["logprobs", "ref", "chosen", "rejected"], 1))),
    json.loads(text_of(losses.numbers, {"logprobs": 1})),
    json.loads(text_of(losses.joined, {"logprobs": 1, "ref": 1})),
    json.loads(text_of(losses.indexed, dict.fromkeys(["logprobs", "labels", "mask"], 1))),
]
_VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 2**62, 2**63, 10**40, 1e308, "", "x" * 100, [], {}, [[[]]] * 3),
    *({"ref": "logprobs"}, {"ref": "nothing"}, {"ref": 3}, {"tuple": 3}, {"dict": []}),
    *({"slice": [1]}, {"slice": [None, {"ref": "logprobs"}, -1]}, {"float": "inf"}, {"float": "1"}),
    *({"dtype": "float16"}, {"dtype": "int64"}, {"ellipsis": True}, {"a": 1, "b": 2}),
    *(10**9, {"tuple": [2**30, 2**30]}, {"tuple": [-1, 0]}, {"device": "cuda:0"}),
]
_TARGETS = [
    *("torch.zeros", "torch.cat", "torch.outer", "torch.exp", "torch.where", "torch.arange"),
    *("operator.pow", "operator.mul", "operator.getitem", "operator.matmul", "operator.iadd"),
    *("getattr", "math.exp", "os.system", "torch.load", "expand", "repeat", "item", "reshape"),
    *("gather", "sum", "topk", "__class__", "sort", "one_hot", "torch.nn.functional.one_hot"),
]
_OPS = ["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


def bomb(*nodes: tuple[str, str, list[Any]]) -> Any:
    """A graph of one input that runs these calls: call i is ``n<i>``, and the last is the loss."""
    found = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for i, (op, target, args) in enumerate(nodes):
        found.append({"op": op, "name": f"n{i}", "target": target, "args": args})  # type: ignore[dict-item]
    last = {"ref": f"n{len(nodes) - 1}"}
    output = {"op": "output", "name": "output", "target": "output"}
    found.append({**output, "args": [{"tuple": [last, {"dict": {}}]}]})  # type: ignore[dict-item]
    return {"name": "bomb", "inputs": [{"name": "logprobs", "rank": 1}], "nodes": found}


LP = {"ref": "logprobs"}


def ref(i: int) -> dict[str, str]:
    return {"ref": f"n{i}"}


def _doubled(op: str, target: str, rounds: int, pair: bool = False) -> Any:
    """A graph that applies an operation to its own result, again and again."""
    nodes = []
    for i in range(rounds):
        last = LP if i == 0 else ref(i - 1)
        nodes.append((op, target, [[last, last]] if pair else [last, last]))
    return bomb(*nodes, ("call_method", "sum", [ref(rounds - 1)]))


BOMBS: dict[str, Any] = {
    "a huge tensor": bomb(("call_function", "torch.zeros", [10**9])),
    "a huge shape": bomb(("call_method", "new_zeros", [LP, {"tuple": [2**31, 2**31]}])),
    "a huge range": bomb(("call_function", "torch.arange", [10**12])),
    "an endless range": bomb(("call_function", "torch.arange", [0, 10, 1e-12])),
    "an expanded tensor": bomb(("call_method", "expand", [LP, 2**40, -1])),
    "a repeated tensor": bomb(("call_method", "repeat", [LP, 2**40])),
    "repeated cat": _doubled("call_function", "torch.cat", 60, pair=True),
    "repeated stack": _doubled("call_function", "torch.stack", 60, pair=True),
    "repeated outer": bomb(
        ("call_method", "repeat", [LP, 10_000]), ("call_function", "torch.outer", [ref(0), ref(0)])
    ),
    "a huge matmul": bomb(
        ("call_method", "new_zeros", [LP, 2000, 2000]),
        *(("call_function", "torch.matmul", [ref(0), ref(0)]) for _ in range(3)),
    ),
    "an index of indices": bomb(
        ("call_method", "new_zeros", [LP, 2000, 2000]),
        ("call_method", "long", [ref(0)]),
        ("call_function", "operator.getitem", [ref(0), ref(1)]),
    ),
    "a power of integers": bomb(
        ("call_method", "size", [LP, 0]), ("call_function", "operator.pow", [ref(0), 10**10])
    ),
    "powers of powers": _doubled("call_function", "operator.pow", 40),
    "many one-hot classes": bomb(
        ("call_method", "long", [LP]),
        ("call_function", "torch.nn.functional.one_hot", [ref(0), 2**40]),
    ),
    "doubled shapes": bomb(
        ("call_method", "size", [LP]),
        *(("call_function", "operator.add", [ref(i), ref(i)]) for i in range(60)),
    ),
    "a multiplied list": bomb(
        ("call_method", "size", [LP]), ("call_function", "operator.mul", [ref(0), 10**9])
    ),
    "many parts": bomb(
        ("call_method", "repeat", [LP, 10**5]), ("call_method", "split", [ref(0), 1])
    ),
    "much kept memory": bomb(
        ("call_method", "repeat", [LP, 10**5]),
        *(("call_function", "torch.exp", [ref(i)]) for i in range(120)),
        ("call_method", "sum", [ref(120)]),
    ),
}


def mutated(rng: random.Random) -> Any:
    """A valid graph with up to three parts replaced, left out, or put elsewhere."""
    graph = json.loads(json.dumps(rng.choice(_VALID)))
    for _ in range(rng.randint(1, 3)):
        if not graph["nodes"]:
            break
        node = rng.choice(graph["nodes"])
        kind = rng.randrange(9)
        if kind == 0:
            node["target"] = rng.choice(_TARGETS)
        elif kind == 1:
            node["op"] = rng.choice(_OPS)
        elif kind == 2:
            node["name"] = rng.choice([each["name"] for each in graph["nodes"]] + ["", "a b"])
        elif kind == 3:
            node["args"] = [rng.choice(_VALUES) for _ in range(rng.randrange(4))]
        elif kind == 4 and node["args"]:
            node["args"][rng.randrange(len(node["args"]))] = rng.choice(_VALUES)
        elif kind == 5:
            node["kwargs"] = {rng.choice(["dim", "dtype", "x"]): rng.choice(_VALUES)}
        elif kind == 6:
            graph["nodes"].remove(node)
        elif kind == 7:
            graph["nodes"].insert(rng.randrange(len(graph["nodes"])), node)
        else:
            graph["inputs"] = [{"name": rng.choice(["logprobs", "ref", "A"]), "rank": 1}]
    return graph


def graphs(seed: int, count: int) -> Iterator[Any]:
    """Yield the bombs, and then as many mutated graphs as are missing from ``count``."""
    yield from BOMBS.values()
    rng = random.Random(seed)
    for _ in range(count - len(BOMBS)):
        yield mutated(rng)
