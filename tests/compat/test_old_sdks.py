"""SDKs since 0.25, each in a separate environment, against the real service."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneserve_client import Client as OurClient

from .client import API_KEY, Client
from .environments import OLD_SDKS, environment
from .workdir import MODEL_NAME

SCRIPT = Path(__file__).parent / "scripts" / "old_sdk.py"

pytestmark = pytest.mark.timeout(2400)  # the first run makes the environments


@pytest.fixture(scope="module", params=OLD_SDKS)
def facts(request: pytest.FixtureRequest, client: Client) -> dict[str, Any]:
    """The script's results with one version of the SDK."""
    printed = client.run(environment(f"tinker-{request.param}"), str(SCRIPT), MODEL_NAME)
    seen: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert seen["version"] == request.param
    assert seen["models"] == [MODEL_NAME]
    return seen


def test_training_lowers_the_loss(facts: dict[str, Any]) -> None:
    losses = facts["losses"]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_resumed_with_its_optimizer_repeats_the_losses_to_the_bit(
    facts: dict[str, Any],
) -> None:
    assert facts["resumed"] == facts["went_on"]
    assert facts["loaded"] == facts["went_on"]


def test_a_run_resumed_without_its_optimizer_has_the_weights_only(facts: dict[str, Any]) -> None:
    assert facts["weights_only"][0] == facts["went_on"][0]
    assert facts["weights_only"][1:] != facts["went_on"][1:]
    assert facts["after_load"] == facts["at_save"]


def test_an_unknown_loss_is_refused_by_name_and_the_run_continues(facts: dict[str, Any]) -> None:
    assert "no_such_loss" in facts["refused"]
    assert facts["after_refusal"] == facts["at_save"]


def test_a_sampler_scores_like_the_trainer_at_the_time_of_its_creation(
    facts: dict[str, Any],
) -> None:
    assert facts["live_logprobs"][0] is None
    np.testing.assert_allclose(facts["live_logprobs"][1:], facts["trained_logprobs"], atol=2e-6)
    assert facts["named_logprobs"] == facts["live_logprobs"]
    assert sum(facts["base_logprobs"][1:]) < sum(facts["live_logprobs"][1:])


def test_samples_carry_logprobs_and_greedy_sampling_repeats_the_taught_text(
    facts: dict[str, Any],
) -> None:
    assert len(facts["samples"]) == 2
    for sample in facts["samples"]:
        assert 1 <= len(sample["tokens"]) == len(sample["logprobs"]) <= 12
        assert all(logprob <= 0 for logprob in sample["logprobs"])
        assert sample["stop_reason"] in {"stop", "length"}
    assert facts["greedy"] == facts["prompt"][3:]


def test_prompts_are_returned_with_scores_and_top_tokens(facts: dict[str, Any]) -> None:
    assert facts["short_logprobs"] == pytest.approx(facts["live_logprobs"][:3], abs=1e-5)
    assert facts["topk"][0] is None
    for row, logprob in zip(facts["topk"][1:], facts["short_logprobs"][1:], strict=True):
        assert len(row) == 2
        assert row[0][1] >= row[1][1]
        assert row[0][1] >= logprob - 1e-6


def test_run_and_checkpoints_are_listed(facts: dict[str, Any]) -> None:
    run_id = facts["run"][0]
    assert facts["run"] == [run_id, MODEL_NAME, 8]
    assert facts["state_path"] == f"tinker://{run_id}/weights/middle"
    assert facts["sampler_path"] == f"tinker://{run_id}/sampler_weights/frozen"
    assert {"weights/middle", "sampler_weights/frozen"} <= set(facts["checkpoints"])


def test_checkpoints_are_downloaded_as_archives(
    facts: dict[str, Any], client: Client, tmp_path: Path
) -> None:
    """SDKs up to 0.33 ask for an archive. Later ones lack such a call and export first."""
    if facts["version"] == "0.36.0":
        assert facts["archives"] is None
        return
    files = ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
    paths = [facts["state_path"], facts["sampler_path"]]
    assert facts["archives"] == {path: files for path in paths}
    with OurClient(client.server.url, API_KEY) as ours:
        runs = ours.runs()
        folder = ours.download(paths[0], tmp_path / "ours")
        assert ours.runs() == runs
    digests = {e.name: hashlib.sha256(e.read_bytes()).hexdigest() for e in folder.iterdir()}
    nothing = hashlib.sha256(b"").hexdigest()
    assert facts["downloaded"] == {**digests, "checkpoint_complete": nothing}
