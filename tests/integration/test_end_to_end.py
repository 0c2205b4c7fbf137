"""A tenant's work from start to finish: real processes, the embedded model, the official SDK."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tests.support.nightly import at_night
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.local_server import LocalServer, free_port

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def server(tmp_path_factory, quiet):
    with LocalServer(tmp_path_factory.mktemp("service"), **QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def service(server):
    with service_client(server.url, "tml-tests") as client:
        yield client


def datum(tokens, weights=None, **inputs):
    targets = [*tokens[1:], 0]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": targets,
            **(inputs or {"weights": weights or [1.0] * len(tokens)}),
        },
    )


def new_trainer(service, server, rank=4, **options):
    return service.create_lora_training_client(
        base_model=server.base_model, rank=rank, seed=7, **options
    ).result()


def step(trainer, data, loss="cross_entropy"):
    gradient = trainer.forward_backward(data, loss)
    trainer.optim_step(ADAM).result()
    return gradient.result()


DATA = [datum(list(range(5, 25))), datum(list(range(40, 52)))]


def losses(trainer, steps):
    return [step(trainer, DATA).metrics["loss:sum"] for _ in range(steps)]


def test_training_lowers_the_loss_and_forward_agrees_with_it(service, server):
    trainer = new_trainer(service, server)
    curve = losses(trainer, 6)
    assert curve[-1] < curve[0] / 2
    scored = trainer.forward(DATA, "cross_entropy").result()
    again = trainer.forward_backward(DATA, "cross_entropy").result()
    assert scored.metrics == again.metrics
    lp = np.concatenate([o["logprobs"].to_numpy() for o in scored.loss_fn_outputs])
    assert scored.metrics["loss:sum"] == pytest.approx(-lp.sum(), rel=1e-5)


def test_resuming_with_the_optimizer_continues_bit_for_bit(service, server):
    trainer = new_trainer(service, server)
    losses(trainer, 3)
    saved = trainer.save_state("resume-here").result().path
    onwards = losses(trainer, 3)
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    assert losses(resumed, 3) == onwards
    fresh = service.create_training_client_from_state(saved).result()
    without = losses(fresh, 3)
    assert without[0] == onwards[0]  # the same weights
    assert without[1:] != onwards[1:]  # another optimizer state
    info = resumed.get_info()
    assert info.lora_rank == 4


def test_a_sampler_is_frozen_when_it_is_created(service, server):
    trainer = new_trainer(service, server)
    losses(trainer, 2)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(5, 15)))
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    before = sampler.sample(prompt, 1, params).result().sequences[0]
    scores = sampler.compute_logprobs(prompt).result()
    losses(trainer, 4)
    after = sampler.sample(prompt, 1, params).result().sequences[0]
    assert after.tokens == before.tokens
    assert after.logprobs == before.logprobs
    assert sampler.compute_logprobs(prompt).result() == scores


def test_trainer_and_sampler_give_the_same_logprobs(service, server):
    trainer = new_trainer(service, server)
    losses(trainer, 3)
    tokens = list(range(5, 25))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    trained = trainer.forward([datum(tokens)], "cross_entropy").result()
    assert sampled[0] is None
    np.testing.assert_allclose(
        sampled[1:], trained.loss_fn_outputs[0]["logprobs"].to_numpy()[:-1], atol=2e-5
    )


def test_a_sample_does_not_wait_for_a_long_gradient(service, server):
    """60,000 tokens run in about 15 micro-batches, with samples one after the other meanwhile.

    No sample waits for all of it, and each has the same result as alone.
    """
    trainer = new_trainer(service, server)
    step(trainer, [datum(list(range(5, 25)))])
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(5, 15)))
    params = types.SamplingParams(max_tokens=16, seed=3, stop=[])
    (before,) = sampler.sample(prompt, 1, params).result().sequences
    data = [datum([(7 * number + i) % 250 + 2 for i in range(500)]) for number in range(120)]
    alone = trainer.forward(data, "cross_entropy").result()
    waits_s, started_s = [], time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        gradient = pool.submit(trainer.forward_backward(data, "cross_entropy").result)
        while not gradient.done():
            asked_s = time.monotonic()
            (beside,) = sampler.sample(prompt, 1, params).result().sequences
            waits_s.append(time.monotonic() - asked_s)
            assert (beside.tokens, beside.logprobs) == (before.tokens, before.logprobs)
        trained = gradient.result()
    assert max(waits_s) < (time.monotonic() - started_s) / 2
    for one, other in zip(trained.loss_fn_outputs, alone.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())


def test_seeds_repeat_and_samples_differ(service, server):
    sampler = service.create_sampling_client(base_model=server.base_model).result()
    prompt = types.ModelInput.from_ints(list(range(5, 15)))

    def draw(seed, n=3):
        params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=seed, stop=[])
        return [s.tokens for s in sampler.sample(prompt, n, params).result().sequences]

    first = draw(1)
    assert draw(1) == first
    assert draw(2) != first
    assert len({tuple(tokens) for tokens in first}) == 3
    assert all(len(tokens) == 12 for tokens in first)


def test_policy_losses_and_custom_losses_train(service, server):
    trainer = new_trainer(service, server)
    tokens = list(range(5, 21))
    n = len(tokens)
    policy = datum(tokens, logprobs=[-3.0] * n, advantages=[1.0] * n)
    for loss in ("importance_sampling", "ppo", "cispo"):
        assert np.isfinite(step(trainer, [policy], loss).metrics["loss:sum"])

    def preference(data, logprobs):
        loss = -sum(lp.sum() for lp in logprobs)
        return loss, {"total:sum": float(loss.detach())}

    before = trainer.forward_backward_custom(DATA, preference).result().metrics["loss:sum"]
    trainer.optim_step(ADAM).result()
    after = trainer.forward_backward_custom(DATA, preference).result().metrics["loss:sum"]
    assert after < before


def dpo(logprobs, ref, chosen, rejected):
    moved = logprobs - ref
    margin = 0.1 * ((moved * chosen).sum() - (moved * rejected).sum())
    loss = -torch.nn.functional.logsigmoid(margin)
    return loss, {"custom/margin:mean": margin, "custom/right:sum": (margin > 0).float()}


def test_a_custom_loss_on_the_server_is_that_of_the_clients_two_phases(service, server):
    """Both run the same traced graph; without its id, the handle runs on the client."""
    random = np.random.default_rng(3)
    data = []
    for n in (16, 9, 23):
        chosen = torch.arange(n) < n // 2
        inputs = {"chosen": chosen.float(), "rejected": (~chosen).float()}
        inputs["ref"] = torch.tensor(-2 * random.random(n), dtype=torch.float32)
        data.append(datum(random.integers(5, 200, n).tolist(), **inputs))
    ranks = dict.fromkeys(("logprobs", "ref", "chosen", "rejected"), 1)
    handle = service.create_custom_loss(dpo, input_ranks=ranks).result()
    assert handle.loss_id is not None
    mine, theirs = new_trainer(service, server), new_trainer(service, server)
    futures = (
        mine.forward_backward_custom(data, handle),
        theirs.forward_backward_custom(data, replace(handle, loss_id=None)),
    )
    on_server, on_client = (each.result() for each in futures)
    for name in ("loss:sum", "custom/margin:mean", "custom/right:sum"):
        assert on_server.metrics[name] == pytest.approx(on_client.metrics[name], rel=1e-6)
    for one, other in zip(on_server.loss_fn_outputs, on_client.loss_fn_outputs, strict=True):
        assert one["logprobs"].data == other["logprobs"].data
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (mine, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    again = mine.forward_backward_custom(data, handle).result()
    assert again.metrics["loss:sum"] < on_server.metrics["loss:sum"]
    assert "surrogate_loss:sum" not in on_server.metrics


def test_a_graph_with_an_operation_that_is_not_offered_is_refused_by_its_node(service):
    def noisy(logprobs):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match=r"node rand_like .*random") as caught:
        service.create_custom_loss(noisy, input_ranks={"logprobs": 1}).result()
    assert caught.value.category == types.RequestErrorCategory.User


BAD = {
    "token": (datum([5, 5000]), "cross_entropy", "5000"),
    "length": (datum([5, 6, 7], weights=[1.0]), "cross_entropy", "weights"),
    "too long": (datum([5] * 2049), "cross_entropy", "2048"),
    "loss": (datum([5, 6]), "no_such_loss", "no_such_loss"),
    "nan": (datum([5, 6], weights=[1.0, float("nan")]), "cross_entropy", "weights"),
    "missing": (datum([5, 6]), "ppo", "advantages"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_datum_is_named_and_later_requests_run(service, server, what):
    bad, loss, named = BAD[what]
    trainer = new_trainer(service, server)
    refused = trainer.forward_backward([bad], loss)
    good = trainer.forward_backward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=named) as caught:
        refused.result(timeout=60)
    assert caught.value.category == types.RequestErrorCategory.User
    assert good.result(timeout=60).metrics["loss:sum"] > 0
    trainer.optim_step(ADAM).result(timeout=60)


def test_a_tenants_curve_is_the_same_alone_and_beside_others(server):
    def run(key, rank, bad=False):
        with service_client(server.url, key) as client:
            trainer = new_trainer(client, server, rank=rank)
            if bad:
                trainer.forward_backward([BAD["nan"][0]], "cross_entropy")
            return losses(trainer, 5)

    alone = run("tml-alone", 4)
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(run, f"tml-{i}", rank, i == 1) for i, rank in enumerate((4, 8, 12))]
        together = run("tml-together", 4)
        assert others[0].result()[0] == alone[0]
    assert together == alone


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_export_is_downloaded_and_loads_in_peft(service, server, tmp_path):
    trainer = new_trainer(service, server)
    losses(trainer, 4)
    path = trainer.save_weights_external("for-peft").result().path
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-tests"}
    tinker_cli = str(Path(sys.executable).with_name("tinker"))
    subprocess.run(
        [tinker_cli, "checkpoint", "download", path, "--output", str(tmp_path)],
        env=environment,
        check=True,
        timeout=120,
    )
    folder = next(tmp_path.rglob("adapter_config.json")).parent
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder)
    tokens = list(range(5, 25))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logits[range(19), tokens[1:]].numpy()
    ours = trainer.forward([datum(tokens)], "cross_entropy").result()
    np.testing.assert_allclose(
        ours.loss_fn_outputs[0]["logprobs"].to_numpy()[:-1], expected, atol=3e-5
    )


def test_results_checkpoints_and_samplers_survive_a_restart(tmp_path):
    with LocalServer(tmp_path, **QUICK) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key="tml-restart")
        trainer = new_trainer(client, running)
        curve = losses(trainer, 2)
        saved = trainer.save_state("kept").result().path
        onwards = losses(trainer, 2)
        client.close("success")
        running.stop()
        running.start()
        again = tinker.ServiceClient(base_url=running.url, api_key="tml-restart")
        resumed = again.create_training_client_from_state_with_optimizer(saved).result()
        assert losses(resumed, 2) == onwards
        assert curve[0] > onwards[-1]
        again.close("success")


def kill_child(running, name):
    """End one of the service's processes as a crash would."""
    command = ["pgrep", "-f", "-P", str(running.pid), name]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 1
    os.kill(int(found[0]), 9)


def test_training_continues_bit_for_bit_when_the_api_process_dies(tmp_path):
    with LocalServer(tmp_path, **QUICK) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key="tml-crash")
        undisturbed = losses(new_trainer(client, running), 4)
        trainer = new_trainer(client, running)
        before = losses(trainer, 2)
        under_way = trainer.forward_backward(DATA, "cross_entropy")
        kill_child(running, "tuneserve_server api")
        trainer.optim_step(ADAM).result(timeout=120)
        during = under_way.result(timeout=120).metrics["loss:sum"]
        after = losses(trainer, 1)
        assert [*before, during, *after] == undisturbed
        client.close("success")


@pytest.mark.parametrize("store", ["sqlite", at_night("redis")])
def test_training_continues_bit_for_bit_when_the_worker_dies_and_when_all_stops(
    tmp_path, request, store
):
    settings = {}
    if store == "redis":
        settings["store"] = request.getfixturevalue("redis_server").url
    with LocalServer(tmp_path, **QUICK, **settings) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key="tml-death")
        undisturbed = losses(new_trainer(client, running), 6)
        trainer = new_trainer(client, running)
        before = losses(trainer, 2)
        under_way = trainer.forward_backward(DATA, "cross_entropy")
        kill_child(running, "tuneserve_engine.worker")
        trainer.optim_step(ADAM).result(timeout=120)
        during = under_way.result(timeout=120).metrics["loss:sum"]
        after = losses(trainer, 1)
        running.stop()
        running.start()
        assert [*before, during, *after, *losses(trainer, 2)] == undisturbed
        assert running.log.read_text().count("is restored: 0 requests replayed") == 1
        with urllib.request.urlopen(f"{running.url}/api/v1/healthz") as health:
            assert json.load(health)["store"] == store
        client.close("success")


def test_a_second_service_on_the_same_data_directory_leaves_the_first_alone(tmp_path):
    with LocalServer(tmp_path, **QUICK) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key="tml-first")
        trainer = new_trainer(client, running)
        losses(trainer, 1)
        second = subprocess.run(
            [sys.executable, "-m", "tuneserve_server", "up", "--port", str(free_port())],
            env={**os.environ, "TUNESERVE_DATA_DIR": str(running.data_dir)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert second.returncode == 2
        assert "data directory of its own" in second.stderr
        assert losses(trainer, 1)  # its worker still has the lease, and the model
        client.close("success")


def test_the_demo_trains_three_tenants_to_three_styles_of_answering():
    """README.md's ``make demo``, by the command that it runs."""
    # Not QUICK: in chunks of a single block two tenants' requests would never share a pass.
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo")],
        env={**os.environ, "TUNESERVE_COMPILE_AHEAD": "false", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    for answer in (
        "Arr, matey! the sky be blue",
        '{"answer": "The sky is blue."',
        "THE SKY IS BLUE",
    ):
        assert answer in ran.stdout
    shared = re.search(r"(\d+) of (\d+) training passes carried rows of more than one", ran.stdout)
    assert shared and int(shared[1]) > 0


def test_health_names_the_base_model_without_a_key(server):
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz") as answer:
        health = json.load(answer)
    assert health["status"] == "ok"
    assert health["base_model"] == "tuneserve/tiny"
