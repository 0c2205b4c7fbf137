"""With ``rescore_samples``, samples have the logprobs of training, bit for bit, in bfloat16 too.

Checked through the real service and the official SDK: every ratio of a policy loss starts at 1.
"""

import os

import numpy as np
import pytest
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tests.support.nightly import at_night
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    pytest.mark.bits,
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OSFT = {"adapter": "osft", "unfreeze_ratio": "0.25"}
KINDS = {"lora": {}, "core": {**OSFT, "form": "core"}, "factors": {**OSFT, "form": "factors"}}
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.mktemp("service")
    with (
        LocalServer(folder, **{**QUICK, "dtype": "bfloat16", "rescore_samples": "true"}) as server,
        service_client(server.url, "tml-tests") as client,
    ):
        client.base_model = server.base_model
        yield client


def datum_of(tokens):
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def logprobs(trainer, sampler):
    """Return the logprobs of every drawn token: the sample's, and those of one ``forward``."""
    params = types.SamplingParams(max_tokens=30, seed=3, temperature=1.0, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints(PROMPT), 8, params).result().sequences
    data = [datum_of(PROMPT + list(each.tokens)) for each in drawn]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    scored = [
        x["logprobs"].to_numpy()[-len(each.tokens) :]
        for x, each in zip(outputs, drawn, strict=True)
    ]
    return np.concatenate([np.float32(each.logprobs) for each in drawn]), np.concatenate(scored)


@pytest.mark.parametrize("kind", ["lora", at_night("core"), at_night("factors")])
def test_every_ratio_is_exactly_one(service, kind):
    trainer = service.create_lora_training_client(
        base_model=service.base_model, rank=8, seed=7, user_metadata=KINDS[kind]
    ).result()
    trainer.forward_backward([datum_of(list(range(40, 60)))], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    saved = trainer.save_state("to-sample-from").result().path
    for sampler in (
        trainer.save_weights_and_get_sampling_client().result(),
        service.create_sampling_client(model_path=saved).result(),
    ):
        drawn, scored = logprobs(trainer, sampler)
        assert len(drawn) == 8 * 30
        np.testing.assert_array_equal(drawn, scored)
