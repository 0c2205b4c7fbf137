"""The official SDK against the real API process, with a worker that needs no model.

The fake backend determines the numbers: the logprob of token y after token x is ``-(1 + (x + y) %
8) / 8``, and a sample under seed 7 counts upwards from 7.
"""

import json
import os
import pickle  # noqa: S403 - the SDK's own way to copy a client
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib import queue_state_logger

from tests.faults.processes import SEES_TESTS, WORKER
from tests.sdk import close_clients, service_client

pytestmark = [
    # The SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # The SDK warns its users of calls that older cookbooks still make.
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
]

BASE = "tuneserve/fake"
ADAM = types.AdamParams(learning_rate=1e-2)


@dataclass
class Server:
    url: str
    data_dir: Path
    key: str = "tml-sdk"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def worker_state(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5) as answer:
            state: str = json.load(answer)["worker"]
    except OSError:
        state = "unreachable"
    return state


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The API and the worker as separate processes, with telemetry on as by default."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TINKER_TELEMETRY", raising=False)
        environment.setenv("NO_PROXY", "127.0.0.1")
        environment.setenv("no_proxy", "127.0.0.1")
        yield from running_server(tmp_path_factory.mktemp("data"))


def running_server(data_dir: Path) -> Iterator[Server]:
    port = free_port()
    api = [sys.executable, "-m", "tuneserve_server", "api", "--port", str(port)]
    worker = [sys.executable, str(WORKER), str(data_dir)]
    with (data_dir / "log").open("wb") as log:
        processes = [
            subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **SEES_TESTS})
            for command in ([*api, "--data-dir", str(data_dir)], worker)
        ]
    server = Server(f"http://127.0.0.1:{port}", data_dir)
    try:
        deadline_s = time.monotonic() + 30
        while worker_state(server.url) != "ready":
            assert time.monotonic() < deadline_s, (data_dir / "log").read_text()
            time.sleep(0.05)
        yield server
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
    log_text = (data_dir / "log").read_text()
    assert "Traceback" not in log_text, log_text


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with service_client(server.url, server.key) as client:
        yield client
    close_clients()  # while the server runs, because they send their telemetry


@pytest.fixture
def rest(server: Server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.key)


def trainer_of(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=4, seed=7, **options).result()


def datum(*tokens: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )


def logprob(x: int, y: int) -> float:
    return -(1 + (x + y) % 8) / 8


def test_a_step_gives_the_logprobs_and_their_sum(service: tinker.ServiceClient) -> None:
    trainer = trainer_of(service)
    gradient = trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
    step = trainer.optim_step(ADAM)
    output = gradient.result()
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == [logprob(1, 2), logprob(2, 3)]
    assert output.metrics == {"loss:sum": pytest.approx(-logprob(1, 2) - logprob(2, 3))}
    step.result()
    # With B at zero the first step moves B only. From then on the adapter has an effect.
    after = trainer.forward([datum(1, 2, 3)], "cross_entropy").result()
    assert after.metrics["loss:sum"] != output.metrics["loss:sum"]


def test_a_model_beyond_the_limit_waits_and_the_client_learns_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"MAX_TENANT_MODELS": "1", "POLL_S": "0.3", "SWEEP_S": "0.3"}.items():
        monkeypatch.setenv(f"TUNESERVE_{name}", value)
    # the SDK's default is 15 minutes
    monkeypatch.setattr(queue_state_logger, "PAUSE_GRACE_PERIOD", 0)
    for server in running_server(tmp_path):
        with service_client(server.url, server.key) as service:
            first = trainer_of(service)
            (tmp_path / "begun").touch()  # from here on a gradient takes a second
            gradients = [first.forward_backward([datum(1, 2)], "cross_entropy") for _ in range(3)]
            while not (tmp_path / "begun").read_text():
                time.sleep(0.01)
            second = service.create_lora_training_client(BASE, rank=4, seed=7).result(timeout=60)
            assert all(each.result().metrics for each in gradients)
            (tmp_path / "begun").unlink()
            for trainer in (second, first):  # the first model is restored from parking
                assert trainer.forward_backward([datum(1, 2)], "cross_entropy").result().metrics
    said = [each.getMessage() for each in caplog.records if "is paused" in each.getMessage()]
    assert said and "1 models are in use, which is the limit of your key" in said[0]
    assert "waits for room" in (tmp_path / "log").read_text()


def test_a_call_split_into_chunks_keeps_its_order_although_the_first_is_sent_last(
    service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = service.holder
    config = holder.get_client_config().model_copy(update={"fwdbwd_max_chunk_len": 1})
    monkeypatch.setattr(holder, "_client_config", config)
    trainer = trainer_of(service)
    gradient = trainer.forward_backward([datum(n, n + 1) for n in range(6)], "cross_entropy")
    step = trainer.optim_step(ADAM)
    output = gradient.result()
    found = [each["logprobs"].tolist() for each in output.loss_fn_outputs]
    assert found == [[logprob(n, n + 1)] for n in range(6)]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(map(sum, found)))
    step.result()


def test_compressed_bodies_are_accepted(
    service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = service.holder
    config = holder.get_client_config().model_copy(update={"proto_compress_fwdbwd": True})
    monkeypatch.setattr(holder, "_client_config", config)
    output = trainer_of(service).forward_backward([datum(1, 2)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-logprob(1, 2))


def test_a_custom_loss_of_the_client_is_trained(service: tinker.ServiceClient) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        total = sum((each**2).sum() for each in logprobs)
        return total, {"mine": total.item()}

    trainer = trainer_of(service)
    output = trainer.forward_backward_custom([datum(1, 2, 3)], loss).result()
    assert output.metrics["mine"] == pytest.approx(logprob(1, 2) ** 2 + logprob(2, 3) ** 2)
    trainer.optim_step(ADAM).result()


def test_a_failed_request_is_a_typed_error_and_the_next_one_runs(
    service: tinker.ServiceClient,
) -> None:
    trainer = trainer_of(service)
    bad = trainer.forward_backward([datum(1, 64)], "cross_entropy")
    unknown = trainer.forward_backward([datum(1, 2)], "no_such_loss")
    good = trainer.forward_backward([datum(1, 2)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="64") as failure:
        bad.result()
    assert failure.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no_such_loss"):
        unknown.result()
    assert good.result().metrics["loss:sum"] == pytest.approx(-logprob(1, 2))
    with pytest.raises(tinker.RequestFailedError, match="learning_rate is -1"):
        trainer.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    trainer.optim_step(ADAM).result()


def test_an_impossible_creation_says_why(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="tuneserve/fake"):
        service.create_lora_training_client("other/model").result()
    with pytest.raises(tinker.RequestFailedError, match=r"lora_config\.rank is 1000"):
        service.create_lora_training_client(BASE, rank=1000).result()
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        path = "tinker://no:train:0/sampler_weights/x"
        service.create_sampling_client(model_path=path).result()


def test_training_continues_from_a_checkpoint_in_each_way(service: tinker.ServiceClient) -> None:
    trainer = trainer_of(service)
    trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
    trainer.optim_step(ADAM)
    path = trainer.save_state("resume", ttl_seconds=3600).result().path
    assert path == f"tinker://{trainer.model_id}/weights/resume"
    with pytest.raises(tinker.RequestFailedError, match="overwrite"):
        trainer.save_state("resume").result()
    trainer.save_state("resume", overwrite=True).result()
    data = [datum(1, 2, 3)]
    expected = trainer.forward(data, "cross_entropy").result().metrics
    fresh = service.create_training_client_from_state(path).result()
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    assert fresh.get_info().lora_rank == 4
    assert fresh.model_id.endswith(":train:" + fresh.model_id.rsplit(":", 1)[1])
    other = trainer_of(service)
    other.load_state(path).result()
    another = trainer_of(service)
    another.load_state_with_optimizer(path).result()
    for client in (fresh, whole, other, another):
        assert client.forward(data, "cross_entropy").result().metrics == expected
    steps = {}
    for name, client in (("original", trainer), ("fresh", fresh), ("whole", whole)):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM).result()
        steps[name] = client.forward(data, "cross_entropy").result().metrics
    assert steps["whole"] == steps["original"] != steps["fresh"]


def test_training_goes_on_from_sampler_weights(service: tinker.ServiceClient) -> None:
    trainer = trainer_of(service)
    trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
    trainer.optim_step(ADAM)
    path = trainer.save_weights_for_sampler("weights-alone").result().path
    assert "/sampler_weights/" in path
    resumed = service.create_training_client_from_state(path).result()
    data = [datum(1, 2, 3)]
    found = [each.forward(data, "cross_entropy").result().metrics for each in (trainer, resumed)]
    assert found[0] == found[1]
    with pytest.raises(tinker.RequestFailedError, match="has no optimizer state"):
        service.create_training_client_from_state_with_optimizer(path).result()


def test_inflight_clients_follow_the_newest_save(service: tinker.ServiceClient) -> None:
    trainer, prompt = trainer_of(service), types.ModelInput.from_ints([5, 6])
    older = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    before = older.compute_logprobs(prompt).result()
    for _ in range(2):
        trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
        trainer.optim_step(ADAM)
    newer = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    after = newer.compute_logprobs(prompt).result()
    assert before[1] == pytest.approx(logprob(5, 6)) != after[1]
    assert older.compute_logprobs(prompt).result() == after


def test_a_published_checkpoint_is_copied_and_loaded_by_another_account(
    server: Server, service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    path = trainer_of(service).save_state("shared").result().path
    assert rest.copy_weights(path, "archive").result().startswith("tinker://copy-")
    with service_client(server.url, "tml-guest") as guest:
        guests = tinker.RestClient(base_url=server.url, api_key="tml-guest")
        with pytest.raises(tinker.NotFoundError, match="this server issues no such tokens"):
            guests.copy_weights(path, "mine", weights_access_token="tok").result()
        rest.publish_checkpoint_from_tinker_path(path).result()
        copied = guests.copy_weights(path, "mine", ttl_seconds=3600).result()
        listed = guests.list_user_checkpoints().result().checkpoints
        assert [each.tinker_path for each in listed] == [copied]
        for each in (path, copied):
            client = guest.create_training_client_from_state(each).result()
            assert client.forward([datum(1, 2)], "cross_entropy").result().metrics
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            guests.get_weights_info_by_tinker_path(path).result()


def test_metadata_can_ask_for_an_adapter_kind_and_a_checkpoint_keeps_it(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    # The fake base model's weights have four singular directions, and half of them are two.
    asked = {"adapter": "osft", "unfreeze_ratio": "0.5", "form": "core"}
    trainer = trainer_of(service, user_metadata=asked)
    assert (trainer.get_info().lora_rank, trainer.get_info().is_lora) == (2, True)
    assert rest.get_training_run(trainer.model_id).result().user_metadata == asked
    path = trainer.save_state("careful").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_unembed, info.train_mlp) == (2, False, True)
    again = service.create_training_client_from_state(path, user_metadata=asked).result()
    assert again.get_info().lora_rank == 2
    with pytest.raises(tinker.RequestFailedError, match=r"adapter 'lora'; .* has 'osft'"):
        service.create_training_client_from_state(path, user_metadata={"adapter": "lora"}).result()
    with pytest.raises(tinker.RequestFailedError, match=r"has lora, rslora, osft"):
        trainer_of(service, user_metadata={"adapter": "dora"})


PROMPT = types.ModelInput.from_ints([5, 6])


def tokens_of(client: tinker.SamplingClient, **options: Any) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=3, seed=7, **options)
    answer = client.sample(PROMPT, num_samples=2, sampling_params=params).result()
    assert all(len(s.logprobs) == len(s.tokens) for s in answer.sequences)
    return [list(s.tokens) for s in answer.sequences]


def test_samples_are_drawn_from_base_checkpoint_and_live_weights(
    service: tinker.ServiceClient,
) -> None:
    trainer = trainer_of(service)
    expected = [[9, 10, 11], [10, 11, 12]]
    assert tokens_of(service.create_sampling_client(base_model=BASE).result()) == expected
    path = trainer.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/s"
    from_path = service.create_sampling_client(model_path=path).result()
    assert tokens_of(from_path) == expected
    assert from_path.get_base_model() == BASE
    live = trainer.save_weights_and_get_sampling_client().result()
    assert tokens_of(live) == expected
    assert tokens_of(live, stop=[10]) == [[9, 10], [10]]


def test_logprobs_of_a_prompt_are_computed(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model=BASE).result()
    assert client.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result() == [
        None,
        logprob(1, 2),
        logprob(2, 3),
    ]
    params = types.SamplingParams(max_tokens=1, seed=1)
    answer = client.sample(
        PROMPT,
        num_samples=1,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    assert answer.topk_prompt_logprobs[0] is None
    assert len(answer.topk_prompt_logprobs[1]) == 2


def test_an_unpickled_sampling_client_still_samples(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model=BASE).result()
    copy = pickle.loads(pickle.dumps(client))  # noqa: S301
    assert tokens_of(copy) == tokens_of(client)


def test_a_bad_sampling_request_is_a_typed_error(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=1, temperature=-1.0)
    with pytest.raises(tinker.RequestFailedError, match="temperature is -1"):
        client.sample(PROMPT, num_samples=3, sampling_params=params).result()


def test_many_concurrent_samples_all_return(service: tinker.ServiceClient) -> None:
    client = service.create_sampling_client(base_model=BASE).result()
    params = types.SamplingParams(max_tokens=2, seed=7)
    futures = [client.sample(PROMPT, num_samples=1, sampling_params=params) for _ in range(150)]
    assert {tuple(f.result().sequences[0].tokens) for f in futures} == {(9, 10)}


def test_three_tenants_train_at_once_and_see_only_their_own(server: Server) -> None:
    def tenant(key: str) -> tuple[int, float]:
        with service_client(server.url, key) as client:
            trainer = trainer_of(client)
            loss = 0.0
            for _ in range(3):
                gradient = trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
                trainer.optim_step(ADAM).result()
                loss = gradient.result().metrics["loss:sum"]
            runs = client.create_rest_client().list_training_runs().result()
            return len(runs.training_runs), loss

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(tenant, ["tml-1", "tml-2", "tml-3"]))
    assert found == [found[0]] * 3
    assert found[0][0] == 1


def test_listings_and_housekeeping(
    service: tinker.ServiceClient, rest: tinker.RestClient, server: Server
) -> None:
    trainer = trainer_of(service, user_metadata={"renderer_name": "qwen3"})
    path = trainer.save_state("kept", user_metadata={"step": "1"}).result().path
    assert rest.get_server_capabilities().result().supported_models[0].model_name == BASE
    run = rest.get_training_run(trainer.model_id).result()
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == path
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == trainer.model_id
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs[0].training_run_id == trainer.model_id
    assert page.cursor.total_count >= 1
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    checkpoint = rest.list_checkpoints(trainer.model_id).result().checkpoints[0]
    assert (checkpoint.checkpoint_id, checkpoint.user_metadata) == ("weights/kept", {"step": "1"})
    assert any(c.tinker_path == path for c in rest.list_user_checkpoints().result().checkpoints)
    session_id = trainer.model_id.partition(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    assert trainer.model_id in rest.get_session(session_id).result().training_run_ids

    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds is 60"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_an_export_is_downloaded(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    path = trainer_of(service).save_weights_external("out", ttl_seconds=3600).result().path
    links = rest.get_external_weights_urls(path).result()
    assert set(links.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    with urllib.request.urlopen(links.urls["adapter_config.json"]) as answer:
        assert json.load(answer)["r"] == 4


def test_a_finished_session_refuses_more(server: Server) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    trainer = trainer_of(client)
    finish = urllib.request.Request(
        f"{server.url}/api/v1/sessions/{trainer.model_id.partition(':')[0]}/finish",
        data=b'{"reason": {"type": "interrupted"}, "detail": null}',
        headers={"X-API-Key": server.key, "Content-Type": "application/json"},
    )
    urllib.request.urlopen(finish).close()
    with pytest.raises(tinker.RequestFailedError, match="ended"):
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result()
    client.close("success").result()


def printed(*arguments: str) -> str:
    """The output of ``tinker``, run in this process, because its imports take seconds."""
    result = CliRunner().invoke(main_cli, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    text: str = result.stdout
    return text


def command_line(*arguments: str) -> Any:
    """The object that ``tinker --format json`` prints, if any."""
    text = printed("--format", "json", *arguments)
    return json.loads(text) if text.strip() else None


def test_the_command_line_of_the_sdk_works(
    server: Server,
    service: tinker.ServiceClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    trainer = trainer_of(service)
    path = trainer.save_state("cli").result().path
    assert "Tinker accessible: yes" in printed("auth", "status")
    assert BASE in json.dumps(command_line("model", "list"))
    runs = command_line("run", "list")
    assert any(run["training_run_id"] == trainer.model_id for run in runs["runs"])
    assert command_line("run", "info", trainer.model_id)["training_run_id"] == trainer.model_id
    of_run = command_line("checkpoint", "list", "--run-id", trainer.model_id)
    assert [c["tinker_path"] for c in of_run["checkpoints"]] == [path]
    listed = command_line("checkpoint", "list")
    assert any(c["tinker_path"] == path for c in listed["checkpoints"])
    info = command_line("checkpoint", "info", path)
    assert info["tinker_path"] == path
    command_line("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert command_line("checkpoint", "info", path)["expires_at"]
    command_line("checkpoint", "set-ttl", path, "--remove")
    assert not command_line("checkpoint", "info", path).get("expires_at")
    for command, public in (("publish", True), ("unpublish", False)):
        command_line("checkpoint", command, path)
        assert command_line("checkpoint", "info", path)["public"] is public
    command_line("checkpoint", "download", path, "--output", str(tmp_path))
    assert len(list(tmp_path.rglob("adapter_model.safetensors"))) == 1
    command_line("checkpoint", "delete", path, "--yes")
    listed = command_line("checkpoint", "list")
    assert all(c["tinker_path"] != path for c in listed["checkpoints"])
