"""With ``rescore_samples``, the ratio of training's and sampling's probabilities is exactly 1.

In bfloat16, where it is not otherwise, through the real service and the official SDK.
"""

import os

import numpy as np
import pytest
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OSFT = {"adapter": "osft", "unfreeze_ratio": "0.25"}
KINDS = {"lora": {}, "core": {**OSFT, "form": "core"}, "factors": {**OSFT, "form": "factors"}}
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    os.environ["TINKER_TELEMETRY"] = "0"
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


def ratios(trainer, sampler):
    """Of every drawn token, from a ``forward`` of all samples as one request."""
    params = types.SamplingParams(max_tokens=30, seed=3, temperature=1.0, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints(PROMPT), 8, params).result().sequences
    data = [datum_of(PROMPT + list(each.tokens)) for each in drawn]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    return np.concatenate(
        [
            np.exp(x["logprobs"].to_numpy()[-len(each.tokens) :] - np.float32(each.logprobs))
            for x, each in zip(outputs, drawn, strict=True)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
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
        found = ratios(trainer, sampler)
        assert len(found) == 8 * 30
        np.testing.assert_array_equal(found, 1.0)
