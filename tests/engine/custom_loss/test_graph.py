"""Graphs: what is refused before any datum is seen, by its node's name and with a way out."""

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch.fx

from tests.engine.custom_loss import losses
from tests.engine.custom_loss.traced import ours, text_of, theirs, traced
from tuneserve_engine.core.errors import UserError
from tuneserve_engine.custom_loss import graph
from tuneserve_engine.custom_loss.evaluate import LossDatum

NEG_LL = json.loads(text_of(losses.neg_ll, {"logprobs": 1, "mask": 1}))
"""The nodes: logprobs, mask, mul, sum_1, neg, output."""


def refusal(change: Any) -> str:
    changed = copy.deepcopy(NEG_LL)
    change(changed)
    with pytest.raises(UserError) as failure:
        graph.parse(json.dumps(changed))
    return str(failure.value)


def node(position: int, **fields: Any) -> Any:
    return lambda loss: loss["nodes"][position].update(fields)


def nested(depth: int) -> Any:
    return [] if depth == 0 else [nested(depth - 1)]


def test_a_checked_graph_has_its_inputs_calls_and_metrics() -> None:
    loss = graph.parse(json.dumps(NEG_LL))
    assert [(each.name, each.rank) for each in loss.inputs] == [("logprobs", 1), ("mask", 1)]
    assert [each.target for each in loss.calls] == ["operator.mul", "sum", "operator.neg"]
    assert loss.metrics == {"custom/neg_ll:sum": loss.loss}


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "captured tensor": (node(2, op="get_attr"), ["node mul", "datum's inputs"]),
    "module": (node(2, op="call_module"), ["node mul", "torch.nn.functional"]),
    "function": (node(2, target="torch.svd"), ["node mul ('torch.svd')", "not offered"]),
    "method": (node(3, target="item"), ["node sum_1 ('item')", "as a tensor"]),
    "in place": (node(3, target="relu_"), ["without the underscore"]),
    "keyword": (node(3, kwargs={"where": 1}), ["node sum_1", "it takes input, dim"]),
    "arguments": (node(3, args=[]), ["node sum_1", "missing"]),
    "attribute": (
        node(2, target="getattr", args=[{"ref": "logprobs"}, "grad_fn"]),
        ["node mul", "attribute", "shape"],
    ),
    "double underscore": (
        node(2, target="getattr", args=[{"ref": "logprobs"}, "__class__"]),
        ["node mul", "attribute"],
    ),
    "attribute that is no text": (
        node(2, target="getattr", args=[{"ref": "logprobs"}, {"slice": [None, None, None]}]),
        ["node mul", "attribute"],
    ),
    "later node": (node(2, args=[{"ref": "neg"}, 1]), ["node mul", "come before"]),
    "itself": (node(2, args=[{"ref": "mul"}, 1]), ["node mul", "come before"]),
    "name twice": (node(3, name="mul"), ["node 3", "name of its own"]),
    "odd name": (node(3, name="a b"), ["node 3", "letters, digits"]),
    "long name": (node(3, name="a" * 129), ["node 3", "128"]),
    "other input": (node(1, target="weights"), ["node mask", "inputs, in their order"]),
    "large integer": (node(2, args=[{"ref": "mask"}, 2**63]), ["node mul", "64 bits"]),
    "deep argument": (node(2, args=[nested(40)]), ["node mul", "8 deep"]),
    "long list": (node(2, args=[[0] * 1025]), ["node mul", "1024"]),
    "long text": (node(2, args=["x" * 65]), ["node mul", "64 characters"]),
    "odd argument": (node(2, args=[{"code": "1"}]), ["node mul", "format 1"]),
    "dtype": (node(2, args=[{"dtype": "bfloat16"}]), ["node mul", "use float32"]),
    "slice": (node(2, args=[{"slice": [1]}]), ["node mul", "start, a stop and a step"]),
    "float": (node(2, args=[{"float": "1e5"}]), ["node mul", "inf"]),
    "no output": (lambda loss: loss["nodes"].pop(), ["last node is no output"]),
    "output early": (node(2, op="output"), ["node mul", "has to be the last"]),
    "no node": (lambda loss: loss["nodes"].clear(), ["0 nodes", "4096"]),
    "nodes": (lambda loss: loss["nodes"].extend(loss["nodes"] * 700), ["4206 nodes", "4096"]),
    "missing placeholder": (lambda loss: loss["nodes"].pop(1), ["node mul", "come before"]),
    "more inputs": (
        lambda loss: loss["inputs"].append({"name": "ref", "rank": 1}),
        ["2 placeholder nodes for 3 inputs"],
    ),
    "many inputs": (
        lambda loss: loss["inputs"].extend({"name": f"a{i}", "rank": 1} for i in range(15)),
        ["1 to 16 inputs"],
    ),
    "input name": (lambda loss: loss["inputs"][1].update(name="A"), ["inputs[1]", "lowercase"]),
    "input rank": (lambda loss: loss["inputs"][1].update(rank=3), ["inputs[1]", "0, 1 or 2"]),
    "first input": (lambda loss: loss["inputs"].reverse(), ["first input", "logprobs"]),
    "logprobs of rank 0": (lambda loss: loss["inputs"][0].update(rank=0), ["rank 1 or 2"]),
    "loss alone": (node(5, args=[{"ref": "neg"}]), ["(loss, metrics)"]),
    "loss that is a number": (
        node(5, args=[{"tuple": [3.0, {"dict": {}}]}]),
        ["(loss, metrics)"],
    ),
    "metric name": (
        node(5, args=[{"tuple": [{"ref": "neg"}, {"dict": {"loss:sum": {"ref": "neg"}}}]}]),
        ["metric 'loss:sum'", "custom/<name>:sum"],
    ),
    "many metrics": (
        node(
            5,
            args=[
                {
                    "tuple": [
                        {"ref": "neg"},
                        {"dict": {f"custom/{i}:sum": {"ref": "neg"} for i in range(65)}},
                    ]
                }
            ],
        ),
        ["65 metrics", "64"],
    ),
    "form": (lambda loss: loss.update(nodes=3), ["format 1"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_graph_that_cannot_be_run_is_refused_with_its_node_and_a_way_out(case: str) -> None:
    change, fragments = REFUSED[case]
    message = refusal(change)
    for fragment in fragments:
        assert fragment in message


def test_a_graph_of_many_bytes_is_refused() -> None:
    long = [{"op": "call_method", "name": "a", "target": "x" * 300_000}]
    with pytest.raises(UserError, match=r"3001\d\d bytes; the limit is 262144"):
        graph.to_text("a", [{"name": "logprobs", "rank": 1}], long)


def test_an_augmented_assignment_makes_a_new_value() -> None:
    def loss(logprobs: Any) -> Any:
        total = logprobs[:2]
        total += 1
        return (logprobs.exp().sum() * total).sum(), {}

    logprobs = np.array([-1.0, -2.0, -3.0], "f4")
    found = ours(traced(loss, {"logprobs": 1}), LossDatum(logprobs, {}))
    graph_module = torch.fx.symbolic_trace(loss)
    value, gradient, _ = theirs(graph_module, logprobs, {})
    assert found.loss == pytest.approx(value)
    np.testing.assert_allclose(found.gradients[0], gradient, rtol=1e-6)
