"""A tenant's work with our client, from start to finish, against the real service."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import transformers
from safetensors.numpy import load_file
from tinker import types as official

from tests.client.conftest import DATA, KEY, LR, TOKENS, losses
from tests.sdk import service_client
from tuneserve_client import (
    Adapter,
    Client,
    Datum,
    Model,
    chat_datum,
    errors,
    gather,
    next_token_datum,
    sft_datum,
    torch_loss,
)
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.local_server import LocalServer

pytestmark = [
    # The official SDK leaves its sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def trained(client: Client) -> Model:
    model = client.create_model(rank=4, seed=7)
    losses(model, 3)
    return model


@pytest.fixture
def official_client(server: LocalServer) -> Iterator[tinker.ServiceClient]:
    with service_client(server.url, KEY) as made:
        yield made


def test_the_same_steps_through_the_official_sdk_give_the_same_bits(
    client: Client, official_client: tinker.ServiceClient, server: LocalServer
) -> None:
    ours = client.create_model(rank=4, seed=7)
    theirs = official_client.create_lora_training_client(server.base_model, rank=4, seed=7).result()
    policy = {"logprobs": [-3.0] * 19, "advantages": [0.5] * 19}
    cases: list[tuple[str, dict[str, Any], dict[str, float]]] = [
        ("cross_entropy", {"weights": [0.25, -1.0, *[1.0] * 17]}, {}),
        ("ppo", policy, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
        ("cross_entropy", {}, {}),
    ]
    for loss, inputs, config in cases:
        tokens = TOKENS[0]
        mine = ours.forward_backward([Datum(tokens[:-1], tokens[1:], **inputs)], loss, **config)
        step = ours.optim_step(LR, weight_decay=0.1, grad_clip_norm=1.0)
        same = official.Datum(
            model_input=official.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
        )
        params = official.AdamParams(learning_rate=LR, weight_decay=0.1, grad_clip_norm=1.0)
        other = theirs.forward_backward([same], loss, config)
        other_step = theirs.optim_step(params)
        assert mine.result().metrics == other.result().metrics
        expected = other.result().loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_array_equal(mine.result().logprobs[0], expected)
        assert step.result().metrics == other_step.result().metrics
    sampled = ours.save_sampler().sample(TOKENS[0], num_samples=2, max_tokens=8, seed=5)
    sampling = theirs.save_weights_and_get_sampling_client().result()
    prompt = official.ModelInput.from_ints(TOKENS[0])
    drawn = sampling.sample(prompt, 2, official.SamplingParams(max_tokens=8, seed=5)).result()
    for sample, sequence in zip(sampled.result().samples, drawn.sequences, strict=True):
        assert sample.tokens == sequence.tokens
        assert sample.logprobs.tolist() == sequence.logprobs
        assert sample.stop_reason == sequence.stop_reason


def test_a_custom_loss_has_the_gradient_of_the_official_sdk(
    client: Client, official_client: tinker.ServiceClient, server: LocalServer
) -> None:
    """The custom loss has its derivative written by hand, or computed by torch."""
    squares = [lambda data, lp: (lp[0] ** 2).sum()]
    by_hand = client.create_model(rank=4, seed=7)
    by_torch = client.create_model(rank=4, seed=7)
    theirs = official_client.create_lora_training_client(server.base_model, rank=4, seed=7).result()
    (loss,) = squares
    same = official.Datum(
        model_input=official.ModelInput.from_ints(TOKENS[0][:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[0][1:]},
    )
    for _ in range(2):
        found = [
            by_hand.forward_backward_custom(
                DATA[:1], lambda data, lp: (float((lp[0] ** 2).sum()), [2 * lp[0]])
            ),
            by_torch.forward_backward_custom(DATA[:1], torch_loss(loss)),
        ]
        expected = theirs.forward_backward_custom(
            [same], lambda data, lp: (loss(data, lp), {})
        ).result()
        for future in found:
            np.testing.assert_array_equal(
                future.result().logprobs[0], expected.loss_fn_outputs[0]["logprobs"].to_numpy()
            )
            assert future.result().loss == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
        norms = [model.optim_step(LR).result().metrics for model in (by_hand, by_torch)]
        norms.append(theirs.optim_step(official.AdamParams(learning_rate=LR)).result().metrics)
        assert norms[0] == norms[1] == norms[2]


def test_training_lowers_the_loss_and_continues_from_a_checkpoint(client: Client) -> None:
    model = client.create_model(rank=4, seed=7)
    curve = losses(model, 6)
    assert curve[-1] < curve[0] / 2
    path = model.save("here").result()
    onwards = losses(model, 2)
    resumed = client.load_model(path)
    assert (resumed.base_model, resumed.rank) == (model.base_model, 4)
    assert losses(resumed, 2) == onwards
    assert resumed.load(path).result() is None
    assert losses(resumed, 2) == onwards
    scored = model.forward(DATA).result()
    assert scored.metrics == model.forward_backward(DATA).result().metrics


RESUME = """
import json, sys
from tuneserve_client import Client
with Client() as client:
    print(json.dumps([client.future(*each).result().metrics for each in json.loads(sys.argv[1])]))
"""


def test_another_process_reads_results_after_the_client_has_closed(
    server: LocalServer,
) -> None:
    with Client(server.url, KEY) as client:
        model = client.create_model(rank=4, seed=7)
        expected = losses(model, 2)
        again = client.create_model(rank=4, seed=7)
        first = again.forward_backward(DATA)
        step = again.optim_step(LR)
        second = again.forward_backward(DATA)
        kept = [(first.request_id, "forward_backward"), (second.request_id, "forward_backward")]
        kept.append((step.request_id, "optim_step"))
    ran = subprocess.run(
        [sys.executable, "-c", RESUME, json.dumps(kept)],
        env={"TUNESERVE_URL": server.url, "TUNESERVE_API_KEY": KEY, "PYTHONPATH": _paths()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [each["loss:sum"] for each in found[:2]] == expected
    assert found[2]["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["forward_backward", "sample", "logprobs", "save"])
def test_reading_a_result_as_another_kind_is_a_value_error(client: Client, kind: Any) -> None:
    step = client.create_model(rank=4).optim_step(LR)
    step.result()
    with pytest.raises(ValueError, match=f"is not a request of kind '{kind}'"):
        client.future(step.request_id, kind).result()


def _paths() -> str:
    return ":".join(sys.path)


def test_another_tenants_request_is_not_found(server: LocalServer, trained: Model) -> None:
    request_id = trained.optim_step(LR).request_id
    with Client(server.url, "tml-stranger") as stranger:
        with pytest.raises(errors.NotFound) as caught:
            stranger.future(request_id, "optim_step").result()
        assert caught.value.code == "not_found"
        assert stranger.runs() == []
        with pytest.raises(ValueError, match=r"'step'.*optim_step"):
            stranger.future(request_id, "step")  # type: ignore[arg-type]


def test_a_missing_checkpoint_is_not_found_whichever_call_asks(
    client: Client, trained: Model, server: LocalServer
) -> None:
    """Each error names the server and the tenant that the key belongs to."""
    path = f"tinker://{trained.id}/weights/none"
    tenant = client.usage().tenant
    calls: list[Callable[[], object]] = [
        *(lambda: client.load_model(path), lambda: trained.load(path).result()),
        *(lambda: client.sampler(path), lambda: client.checkpoint_info(path)),
        *(lambda: client.delete_checkpoint(path), lambda: client.run("none:train:0")),
        *(lambda: client.sampler("s-x:sample:1"), lambda: client.request("req_none")),
        lambda: client.future("req_none", "sample").result(),
    ]
    for call in calls:
        with pytest.raises(errors.NotFound) as caught:
            call()
        assert server.url in str(caught.value) and tenant in str(caught.value)
    saved = trained.save("kept").result()
    wider = client.create_model(rank=8)
    with pytest.raises(errors.RequestFailed, match="rank"):  # found, and refused all the same
        wider.load(saved).result()


def test_a_failed_request_says_why_and_later_requests_run(
    trained: Model,
) -> None:
    bad = trained.forward_backward([Datum([5, 5000], [6, 7])])
    good = trained.forward_backward(DATA)
    with pytest.raises(errors.RequestFailed, match="5000") as caught:
        bad.result()
    assert caught.value.category == "user"
    assert caught.value.request_id == bad.request_id
    assert good.result().loss > 0


def test_a_text_prompt_returns_text_and_a_sample_can_be_cancelled(
    client: Client, trained: Model
) -> None:
    sampler = client.sampler()
    output = sampler.sample("The sky is", max_tokens=12, temperature=0).result()
    reference = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    by_tokens = sampler.sample(reference.encode("The sky is"), max_tokens=12, temperature=0)
    assert output.tokens == by_tokens.result().tokens
    assert output.text == reference.decode(output.tokens, skip_special_tokens=True)
    assert by_tokens.result().text is None
    with pytest.raises(errors.InvalidRequest, match="only samples"):
        trained.optim_step(LR).cancel()
    long = sampler.sample([5], max_tokens=2000, stop=[], num_samples=8)
    long.cancel()
    with pytest.raises(errors.RequestFailed):
        long.result(timeout=30)


def test_logprobs_of_prompts_and_samples_agree_with_training(
    client: Client, trained: Model
) -> None:
    tokens = TOKENS[0]
    sampler = trained.save_sampler("scores")
    scored = sampler.logprobs(tokens).result()
    trained_on = trained.forward([next_token_datum(tokens)]).result().logprobs[0]
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[1:], trained_on, atol=2e-5)
    output = sampler.sample(
        tokens,
        max_tokens=3,
        temperature=0,
        top_logprobs=2,
        top_prompt_logprobs=3,
        prompt_logprobs=True,
        target_logprobs=[[each, -1] for each in tokens[1:]],
        prompt_alternatives=2,
    ).result()
    assert output.prompt_logprobs is not None and output.target_logprobs is not None
    np.testing.assert_array_equal(output.prompt_logprobs[1:], scored[1:])
    np.testing.assert_allclose(output.target_logprobs[:, 0], scored[1:], atol=1e-6)
    (sample,) = output.samples
    assert sample.top_logprobs is not None and output.top_prompt_logprobs is not None
    assert sample.top_logprobs.tokens[:, 0].tolist() == sample.tokens  # greedy sampling
    np.testing.assert_allclose(sample.top_logprobs.logprobs[:, 0], sample.logprobs, atol=1e-6)
    assert output.top_prompt_logprobs.tokens.shape == (20, 3)
    assert output.prompt_alternatives is not None
    assert output.prompt_alternatives.tokens.shape == (19, 2)
    assert client.sampler(sampler.path).logprobs(tokens).result()[1:].tolist() == (
        scored[1:].tolist()
    )


def test_the_pieces_of_a_stream_join_to_the_whole_text(trained: Model) -> None:
    """The weights may be saved without a name, and the prompt may be a conversation."""
    live, kept = trained.save_sampler(), trained.save_sampler("kept")
    assert (live.path, kept.path) == (None, f"tinker://{trained.id}/sampler_weights/kept")
    for sampler in (live, kept):
        said = sampler.sample("The sky", max_tokens=60, temperature=0, seed=1).result().text
        pieces = list(sampler.stream("The sky", max_tokens=60, temperature=0, seed=1))
        assert "".join(pieces) == said
    messages = [{"role": "user", "content": "What colour is the sky?"}]
    options = {"max_tokens": 30, "temperature": 0}
    sampled = kept.sample(messages, max_tokens=30, temperature=0).result().text
    assert kept.chat(messages, **options) == sampled
    assert "".join(kept.stream(messages, **options)) == sampled
    with pytest.raises(errors.InvalidRequest, match="temperature"):
        list(kept.stream("a", temperature=-1))
    with pytest.raises(TypeError, match="no argument 'temprature'; did you mean 'temperature'"):
        list(kept.stream("a", temprature=1))


def test_a_model_its_checkpoint_and_a_loaded_model_have_the_requested_kind(
    client: Client,
) -> None:
    plain = client.create_model(rank=4)
    model = client.create_model(rank=4, adapter=Adapter(kind="rslora", rank=2))
    assert [(each.adapter, each.rank) for each in (plain, model)] == [("lora", 4), ("rslora", 2)]
    assert "adapter='rslora', rank=2" in repr(model)
    path = model.save("of-a-kind").result()
    again = client.load_model(path)
    assert (again.adapter, again.rank) == ("rslora", 2)
    assert (client.checkpoint_info(path).adapter, client.run(model.id).adapter) == (
        "rslora",
        "rslora",
    )
    with pytest.raises(errors.RequestFailed, match="leave one out"):
        client.create_model(adapter=Adapter(kind="osft", rank=2, unfreeze_ratio=0.25))


def test_an_unfreeze_ratio_becomes_a_rank(client: Client) -> None:
    # The smaller side has 128 directions in q, o and the MLP's weights, and 64 in k and v.
    model = client.create_model(adapter=Adapter(kind="osft", unfreeze_ratio=1 / 32))
    assert (model.adapter, model.rank) == ("osft", 4)


def test_checkpoints_are_listed_given_a_ttl_exported_and_deleted(
    client: Client, trained: Model, tmp_path: Path
) -> None:
    path = trained.save("list-me", ttl_s=3600, user_metadata={"why": "a test"}).result()
    exported = trained.export("for-peft").result()
    assert {each.tinker_path for each in client.checkpoints(trained.id)} == {path, exported}
    assert {path, exported} <= {each.tinker_path for each in client.checkpoints()}
    assert client.checkpoint_info(path).lora_rank == 4
    assert client.run(trained.id).training_run_id == trained.id
    assert trained.id in [run.training_run_id for run in client.runs()]

    (listed,) = [each for each in client.checkpoints(trained.id) if each.tinker_path == path]
    assert listed.user_metadata == {"why": "a test"} and listed.expires_at is not None
    client.set_ttl(path, None)
    client.publish(path)
    (listed,) = [each for each in client.checkpoints(trained.id) if each.tinker_path == path]
    assert listed.expires_at is None and listed.public

    whole, made = tmp_path / "whole", tmp_path / "made"
    client.download(exported, whole)
    assert json.loads((whole / "adapter_config.json").read_text())["r"] == 4
    weights = load_file(whole / "adapter_model.safetensors")
    assert all(np.isfinite(each).all() for each in weights.values())
    before = client.checkpoints(), [each.training_run_id for each in client.runs()]
    client.download(path, made)  # the path names the checkpoint itself: no export and no run
    assert (client.checkpoints(), [each.training_run_id for each in client.runs()]) == before
    again = load_file(made / "adapter_model.safetensors")
    assert weights.keys() == again.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(values, again[name])
    assert sorted(each.name for each in made.iterdir()) == sorted(
        each.name for each in whole.iterdir()
    )

    client.delete_checkpoint(path)
    with pytest.raises(errors.NotFound):
        client.checkpoint_info(path)
    with pytest.raises(ValueError, match="tinker://<model>"):
        client.delete_checkpoint("weights/a")


def test_the_servers_tokenizer_is_the_models_tokenizer(client: Client) -> None:
    ours = client.tokenizer()
    reference = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    for text in ("The sky is blue.", "naïve 🎉", "<|im_start|>user\nHi<|im_end|>\n", ""):
        assert ours.encode(text) == reference.encode(text)
        tokens = ours.encode(text)
        assert ours.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    for prompted in (True, False):
        assert ours.apply_chat_template(
            messages, add_generation_prompt=prompted
        ) == reference.apply_chat_template(
            messages, add_generation_prompt=prompted, tokenize=True, return_dict=False
        )
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.vocab_size == len(reference)


def test_sft_and_chat_datums_learn_the_answers_only(client: Client) -> None:
    tokenizer = client.tokenizer()
    datum = sft_datum(tokenizer, "Q: sky? A:", " blue")
    learnt = datum.targets[datum.inputs["weights"] == 1]
    assert tokenizer.decode(learnt.tolist(), skip_special=False) == " blue<|im_end|>"
    turns = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Second."},
    ]
    last = chat_datum(tokenizer, turns)
    learnt = last.targets[last.inputs["weights"] == 1]
    assert tokenizer.decode(learnt.tolist(), skip_special=False).endswith("Second.<|im_end|>")
    assert "First" not in tokenizer.decode(learnt.tolist())
    whole = tokenizer.decode([*last.tokens.tolist(), int(last.targets[-1])], skip_special=False)
    assert whole == tokenizer.render(turns, add_generation_prompt=False)
    with pytest.raises(ValueError, match="not the assistant's"):
        chat_datum(tokenizer, turns[:3])


def test_gather_returns_many_samples_in_their_order(client: Client) -> None:
    sampler = client.sampler(client.base_models()[0].model_name)
    futures = [sampler.sample([seed], max_tokens=4, seed=seed) for seed in range(5, 25)]
    alone = [sampler.sample([seed], max_tokens=4, seed=seed).result() for seed in (5, 24)]
    found = gather(futures, "sampling", shown=False)
    assert [found[0].tokens, found[-1].tokens] == [each.tokens for each in alone]
