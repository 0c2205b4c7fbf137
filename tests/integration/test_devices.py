"""A worker on two devices serves the SDK as a worker on one does, with the same bits."""

import numpy as np
import pytest
from tinker import types

from tests.integration.test_end_to_end import ADAM, datum, kill_child, new_trainer
from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DATA = [datum(list(range(number, 60 + 2 * number))) for number in range(1, 13)]
"""Some 800 tokens: more bins than devices."""
PROMPT = types.ModelInput.from_ints(list(range(5, 25)))


def losses(trainer, steps, data=DATA):
    found = []
    for _ in range(steps):
        gradient = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(ADAM).result(timeout=120)
        found.append(gradient.result(timeout=120).metrics["loss:sum"])
    return found


def sampled(trainer):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    result = sampler.sample(prompt=PROMPT, num_samples=1, sampling_params=params).result()
    return result.sequences[0]


@pytest.mark.nightly  # tests/faults/test_kills_hosts.py and test_mesh.py show the parts
def test_training_on_two_devices_goes_on_after_a_kill_and_on_one_device(tmp_path, monkeypatch):
    """Two equal models: one undisturbed, the other over a killed worker and another service."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with (
        LocalServer(tmp_path, **QUICK, devices="2") as running,
        service_client(running.url, "tml-two") as client,
    ):
        undisturbed = losses(new_trainer(client, running), 6)
        trainer = new_trainer(client, running)
        found = losses(trainer, 2)
        kill_child(running, "tuneserve_engine.worker")
        found += losses(trainer, 2)
        wanted = sampled(trainer)
        path = trainer.save_state("four").result(timeout=120).path
        assert "devices=2" in running.log.read_text()
    with (
        LocalServer(tmp_path, **QUICK) as running,
        service_client(running.url, "tml-two") as client,
    ):
        trainer = client.create_training_client_from_state_with_optimizer(path).result()
        got = sampled(trainer)
        found += losses(trainer, 2)
    assert found == undisturbed
    assert got.tokens == wanted.tokens
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly  # tests/engine/backend/jax/attention/test_divided.py shows the parts
def test_a_sequence_that_devices_divide_trains_with_the_same_bits_after_a_kill(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    memory = {"device_memory_bytes": "70000000", "max_rank": "8"}
    data = [datum([number % 300 for number in range(2000)]), *DATA[:2]]
    with (
        LocalServer(tmp_path, compile_ahead="false", devices="2", **memory) as running,
        service_client(running.url, "tml-two") as client,
    ):
        undisturbed = losses(new_trainer(client, running), 5, data)
        trainer = new_trainer(client, running)
        found = losses(trainer, 3, data)
        kill_child(running, "tuneserve_engine.worker")
        found += losses(trainer, 2, data)
        assert "1024/2" in running.log.read_text()  # of the fingerprint: the parts
    assert found == undisturbed
    assert found[-1] < found[0]
