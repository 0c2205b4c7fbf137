"""``stable_reinforce`` from sample to step, through the real service and the official SDK.

Its loss and gradient equal torch's, and killed processes lose no recording.
"""

import os
import subprocess

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STAND_IN = "tuneserve_truncated_reinforce"
CAP, KL = 1.5, 0.25
CONFIG = {"clip_high_threshold": CAP, "kl_coeff": KL}
# This large eps makes the step linear in the gradient, so the change shows the gradient's size.
LINEAR = types.AdamParams(learning_rate=10.0, beta1=0.0, beta2=0.0, eps=1e3)
MOVE = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **QUICK) as running:
        yield running


@pytest.fixture
def service(server):
    with service_client(server.url, "tml-tests") as client:
        yield client


def new_trainer(service, server):
    return service.create_lora_training_client(
        base_model=server.base_model, rank=4, seed=7
    ).result()


def moved(trainer):
    """The trainer, one step away from the sampling weights."""
    tokens = list(range(40, 60))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 19}
    trainer.forward_backward(
        [types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy"
    ).result()
    trainer.optim_step(MOVE).result()
    return trainer


def two_turns(sampler, seed):
    """A conversation: a sample, the environment's text, and a second sample.

    Returned as one datum, with the sampled logprob and the advantage of each position.
    """
    params = types.SamplingParams(max_tokens=6 + seed, seed=seed, temperature=1.0, stop=[])
    said = [5 + seed, 6, 7]
    text, lp, advantages, spans = [], [], [], []
    for said_before, advantage in ((said, 1.0 + seed), ([9, 8], -0.5)):
        text += said_before
        drawn = sampler.sample(types.ModelInput.from_ints(text), 1, params).result().sequences[0]
        size = len(said_before)
        spans += [
            types.PromptProvenanceSpan(
                sequence_id=drawn.sequence_id, offset=len(text) - size, length=size
            ),
            types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=len(drawn.tokens)),
        ]
        text += drawn.tokens
        lp += [0.0] * size + drawn.logprobs
        advantages += [0.0] * size + [advantage] * len(drawn.tokens)
    first, last = spans[0], spans[-1]
    inputs = {
        "target_tokens": text[1:],
        "logprobs": [0.0] * (len(text) - 1),  # the client's claim does not count
        "advantages": advantages[1:],
    }
    datum = types.Datum(types.ModelInput.from_ints(text[:-1]), inputs).with_provenance(
        [
            *spans[:-1],
            types.SampledProvenanceSpan(sequence_id=last.sequence_id, length=last.length - 1),
        ],
        [
            types.PromptProvenanceSpan(
                sequence_id=first.sequence_id, offset=1, length=first.length - 1
            ),
            *spans[1:],
        ],
    )
    return datum, torch.tensor(lp[1:]), torch.tensor(advantages[1:])


def rollouts(trainer, count=3):
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
    return [two_turns(sampler, seed) for seed in range(count)]


def by_torch(lp, q, advantages):
    """Loss and gradient by ``lp``, written from the formula, and the number of truncated tokens."""
    lp = lp.clone().double().requires_grad_()
    sampled = (q != 0).double()
    weight = torch.exp(lp - q).detach()
    loss = -(sampled * weight.clamp(max=CAP) * (lp * advantages - KL / 2 * (lp - q) ** 2)).sum()
    loss.backward()
    return loss.item(), lp.grad, int((sampled * (weight > CAP)).sum())


def logprobs(output):
    return [each["logprobs"].to_torch() for each in output.loss_fn_outputs]


def test_loss_and_gradient_equal_torchs(service, server):
    trainer = new_trainer(service, server)
    data, recorded, advantages = zip(*rollouts(trainer), strict=True)
    moved(trainer)
    output = trainer.forward_backward(list(data), "stable_reinforce", CONFIG).result()

    loss, cut, weights = 0.0, 0, []
    for lp, q, a in zip(logprobs(output), recorded, advantages, strict=True):
        value, gradient, over = by_torch(lp, q, a)
        loss, cut = loss + value, cut + over
        weights.append((-gradient).float())
    tokens = sum(int((q != 0).sum()) for q in recorded)
    assert 0 < cut < tokens
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert output.metrics[f"{STAND_IN}/truncated_tokens:sum"] == cut
    assert output.metrics[f"{STAND_IN}/sampled_tokens:sum"] == tokens
    gap = sum(
        float((lp - q)[q != 0].sum()) for lp, q in zip(logprobs(output), recorded, strict=True)
    )
    assert output.metrics[f"{STAND_IN}/log_ratio:sum"] == pytest.approx(gap, rel=1e-4)

    # The same gradient, passed on as torch computes it.
    other = moved(new_trainer(service, server))
    surrogate = [
        types.Datum(
            each.model_input, {"target_tokens": each.loss_fn_inputs["target_tokens"], "weights": w}
        )
        for each, w in zip(data, weights, strict=True)
    ]
    before = logprobs(other.forward(surrogate, "cross_entropy").result())
    other.forward_backward(surrogate, "cross_entropy").result()
    norms = [each.optim_step(LINEAR).result().metrics["grad_norm"] for each in (trainer, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after, wanted = (
        np.concatenate(logprobs(each.forward(surrogate, "cross_entropy").result()))
        for each in (trainer, other)
    )
    change = np.abs(wanted - np.concatenate(before)).max()
    assert change > 1e-2
    np.testing.assert_allclose(after, wanted, atol=1e-4 * change, rtol=0)


def test_recordings_and_training_on_them_survive_killed_processes(service, server):
    """The API process is killed between sample and training, the worker between gradient and step.

    Its successor replays the gradient.
    """
    trainer, undisturbed = (new_trainer(service, server) for _ in range(2))
    data = [each[0] for each in rollouts(trainer, count=2)]
    wanted = undisturbed.forward_backward(data, "stable_reinforce").result()
    undisturbed.optim_step(MOVE).result()

    kill_child(server, "tuneserve_server api")
    found = trainer.forward_backward(data, "stable_reinforce").result(timeout=120)
    assert found.metrics == wanted.metrics
    kill_child(server, "tuneserve_engine.worker")
    trainer.optim_step(MOVE).result(timeout=120)

    one, other = (
        np.concatenate(logprobs(each.forward(data, "stable_reinforce").result(timeout=120)))
        for each in (trainer, undisturbed)
    )
    np.testing.assert_array_equal(one, other)
    # The replay's answer was compared with the first one, byte for byte.
    rest = tinker.RestClient(base_url=server.url, api_key="tml-tests")
    assert not rest.get_training_run(trainer.model_id).result().corrupted


def kill_child(running, name):
    """End one of the service's processes as a crash would."""
    command = ["pgrep", "-f", "-P", str(running.pid), name]
    (found,) = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(found), 9)
