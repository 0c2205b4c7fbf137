"""The charges of two tenants of the real processes add up to the device's busy time."""

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tinker import types

from tests.quick_service import QUICK
from tests.sdk import service_client
from tuneserve_server.access.auth import open_tenant
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEYS = ("tml-one", "tml-two")
STEPS, DATUMS, TOKENS, SAMPLES = 3, 4, 48, 4


def work(url: str, base_model: str, key: str) -> str:
    """Train and sample at the same time. Returns the model's id."""
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([number] * TOKENS),
            loss_fn_inputs={"target_tokens": [number] * TOKENS, "weights": [1.0] * TOKENS},
        )
        for number in range(DATUMS)
    ]
    with service_client(url, key) as client:
        trainer = client.create_lora_training_client(base_model=base_model, rank=4).result()
        sampler = client.create_sampling_client(base_model=base_model).result()
        params = types.SamplingParams(max_tokens=8, seed=1)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        waiting = [
            sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(SAMPLES)
        ]
        for _ in range(STEPS):
            waiting.append(trainer.forward_backward(data, "cross_entropy"))
            waiting.append(trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
        for each in waiting:
            each.result()
        model_id: str = trainer.model_id
        return model_id


def metrics(url: str) -> dict[str, float]:
    """The metrics of the only worker, and of the tenants."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        f"{each.name} {each.labels.get('tenant', '')}".strip(): each.value
        for family in families
        for each in family.samples
    }


def test_the_tenants_charges_are_the_devices_busy_time(tmp_path):
    settings = {
        **QUICK,
        "tenant_metrics": "true",
        "lease_ttl_s": "1",  # metrics are reported every third of it
    }
    with LocalServer(tmp_path, **settings) as server:
        with ThreadPoolExecutor() as pool:
            models = list(pool.map(lambda key: work(server.url, server.base_model, key), KEYS))
        time.sleep(1)
        told = metrics(server.url)
        used = {}
        for key, model in zip(KEYS, models, strict=True):
            with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key}) as http:
                used[key] = http.get("/usage").raise_for_status().json()
                curve = http.get(f"/training_runs/{model}/curve").raise_for_status().json()
            losses = [each["loss_sum"] for each in curve["points"] if "loss_sum" in each]
            assert len(losses) == STEPS and len(curve["points"]) == 2 * STEPS
            assert losses[-1] < losses[0]
    busy_s = told["tuneserve_device_seconds_total"]
    overhead_s = told["tuneserve_device_seconds_overhead_total"]
    charged_s = sum(each["total"]["device_ms"] for each in used.values()) / 1000
    assert charged_s + overhead_s == pytest.approx(busy_s, rel=0.02)
    assert overhead_s < 0.02 * busy_s
    for key in KEYS:
        total = used[key]["total"]
        assert total["trained_tokens"] == STEPS * DATUMS * TOKENS
        assert total["prompt_tokens"] == SAMPLES * 3
        assert 0 < total["sampled_tokens"] <= SAMPLES * 8
        assert total["flops"] > 0
        shown_s = told[f"tuneserve_tenant_device_seconds_total {open_tenant(key)}"]
        assert shown_s == pytest.approx(total["device_ms"] / 1000, rel=0.02)
    assert told["tuneserve_model_flops_total"] == sum(u["total"]["flops"] for u in used.values())
