"""Saving and loading, and the contents of a checkpoint."""

import json
import re
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


async def save(service: Any, model: str, seq_id: int, name: str = "a", **fields: Any) -> Any:
    request = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
    return await service.post("/save_weights", request)


async def saved(service: Any, model: str, seq_id: int, name: str = "a", **fields: Any) -> str:
    result = await service.result(await save(service, model, seq_id, name, **fields))
    path: str = result["path"]
    return path


async def test_a_saved_state_is_loaded_into_a_new_model_of_its_shape(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    path = await saved(service, model, 1)
    assert path == f"tinker://{model}/weights/a"
    request = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    answer = await service.post("/load_weights", request)
    assert "error" not in await service.result(answer)
    info = await service.post("/get_info", {"model_id": f"{session}:train:1"})
    assert info["lora_rank"] == 4
    await service.output(await service.forward_backward(f"{session}:train:1", 1))


async def test_a_saved_state_is_loaded_into_an_existing_model(service: Any) -> None:
    model = await service.model(await service.session())
    path = await saved(service, model, 1)
    request = {"model_id": model, "seq_id": 2, "path": path, "optimizer": False}
    assert "error" not in await service.result(await service.post("/load_weights", request))
    await service.output(await service.forward_backward(model, 3))


@pytest.mark.parametrize("form", ["new", "into"])
async def test_loading_a_missing_or_another_tenants_checkpoint_fails_alike(
    service: Any, form: str
) -> None:
    theirs = await saved(service, await service.model(await service.session()), 1)
    session = await service.session(key="tml-b")
    model = await service.model(session, key="tml-b")
    errors = []
    for number, path in enumerate((theirs, theirs), start=1):
        keys = (
            {"session_id": session, "model_seq_id": number}
            if form == "new"
            else {"model_id": model, "seq_id": number}
        )
        if number == 2:
            await service.ok(
                "DELETE", f"/training_runs/{theirs[9:].replace('/', '/checkpoints/', 1)}"
            )
        request = {**keys, "path": path, "optimizer": False}
        answer = await service.post("/load_weights", request, key="tml-b")
        errors.append(await service.error(answer, key="tml-b"))
    assert errors[0] == errors[1]
    assert "does not exist" in errors[0]


async def two_saves(service: Any) -> tuple[str, str, str]:
    """A session, and a training and a sampler checkpoint of the same trained weights in it."""
    session = await service.session()
    model = await service.model(session)
    await service.output(await service.forward_backward(model, 1))
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    await service.result(await service.post("/optim_step", step))
    path = await saved(service, model, 3)
    request = {"model_id": model, "seq_id": 4, "path": "s", "kind": "snapshot"}
    answer = await service.post("/save_weights_for_sampler", request)
    return session, path, (await service.result(answer))["path"]


async def test_training_goes_on_from_sampler_weights_with_a_fresh_optimizer(service: Any) -> None:
    """It goes on as from the training checkpoint without its optimizer, for more than one step."""
    session, training, sampler = await two_saves(service)
    losses = []
    for number, path in enumerate((training, sampler), 1):
        load = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": False}
        loaded = await service.result(await service.post("/load_weights", load))
        assert loaded.get("optimizer") == (None if path == training else "fresh")
        model = loaded["model_id"]
        losses.append([])
        for seq in (1, 3):
            output = await service.output(await service.forward_backward(model, seq))
            losses[-1].append(output.metrics["loss:sum"])
            step = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.1}}
            await service.result(await service.post("/optim_step", step))
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


async def test_sampler_weights_are_loaded_into_an_existing_model(service: Any) -> None:
    session, _, sampler = await two_saves(service)
    load = {"model_id": f"{session}:train:0", "seq_id": 5, "path": sampler, "optimizer": False}
    assert (await service.result(await service.post("/load_weights", load)))["optimizer"] == "fresh"


async def test_the_optimizer_of_sampler_weights_cannot_be_loaded(service: Any) -> None:
    session, _, sampler = await two_saves(service)
    load = {"session_id": session, "model_seq_id": 1, "path": sampler, "optimizer": True}
    told = await service.error(await service.post("/load_weights", load))
    assert "has no optimizer state; load it without" in told


async def test_an_export_is_not_loaded(service: Any) -> None:
    session = await service.session()
    model = await service.model(session)
    request = {"model_id": model, "seq_id": 1, "path": "e"}
    answer = await service.post("/save_weights_external", request)
    path = (await service.result(answer))["path"]
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    assert "is an export for download" in await service.error(
        await service.post("/load_weights", load)
    )


async def test_the_weights_info_of_a_checkpoint_is_its_shape(service: Any, bodies: Any) -> None:
    session = await service.session()
    lora = {"rank": 8, "seed": 1, "train_mlp": False}
    await service.result(
        await service.post("/create_model", bodies.create_model(session, lora_config=lora))
    )
    path = await saved(service, f"{session}:train:0", 1)
    info = await service.post("/weights_info", {"tinker_path": path})
    assert info == {
        "base_model": "tuneserve/fake",
        "is_lora": True,
        "lora_rank": 8,
        "adapter": "lora",
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a..b", ".hidden", "-x", "a b", "ä", "x" * 129, "a\x00"]
)
async def test_a_name_that_could_be_a_path_is_refused(service: Any, name: str) -> None:
    model = await service.model(await service.session())
    assert "path is not a checkpoint name" in await service.error(
        await save(service, model, 1, name)
    )


@pytest.mark.parametrize("name", ["000010", "final", "step-1.5_b", "x" * 128])
async def test_ordinary_names_are_accepted(service: Any, name: str) -> None:
    model = await service.model(await service.session())
    assert (await saved(service, model, 1, name)).endswith(f"/weights/{name}")


@pytest.mark.parametrize("ttl", [0, 3599, 315_360_001, -1, 10**30])
async def test_a_ttl_out_of_range_is_refused(service: Any, ttl: int) -> None:
    model = await service.model(await service.session())
    error = await service.error(await save(service, model, 1, ttl_seconds=ttl))
    assert error.startswith(f"ttl_seconds is {ttl if ttl < 10**24 else 'a number of 100 bits'};")


async def test_the_metadata_of_a_checkpoint_are_returned(service: Any) -> None:
    model = await service.model(await service.session())
    await saved(service, model, 1, user_metadata={"step": "10"})
    listed = await service.get(f"/training_runs/{model}/checkpoints")
    assert listed["checkpoints"][0]["user_metadata"] == {"step": "10"}


async def test_overwriting_replaces_the_metadata_too(service: Any) -> None:
    model = await service.model(await service.session())
    await saved(service, model, 1, user_metadata={"step": "10"})
    await saved(service, model, 2, overwrite=True, user_metadata={"other": "1"})
    listed = (await service.get(f"/training_runs/{model}/checkpoints"))["checkpoints"]
    assert [c["user_metadata"] for c in listed] == [{"other": "1"}]


async def test_an_export_is_downloaded_through_signed_links_without_a_key(service: Any) -> None:
    model = await service.model(await service.session())
    request = {"model_id": model, "seq_id": 1, "path": "out"}
    path = (await service.result(await service.post("/save_weights_external", request)))["path"]
    assert path == f"tinker://{model}/external_weights/out"
    answer = await service.get(
        f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    )
    assert set(answer["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    url = answer["urls"]["adapter_config.json"]
    config = await service.http.get(url)
    assert (config.status_code, json.loads(config.content)["r"]) == (200, 4)
    assert config.headers["content-length"] == str(len(config.content))
    for forged in (
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("expires=", "expires=9"),
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("tenant=t-", "tenant=t-0"),
        url.partition("?")[0],
    ):
        response = await service.http.get(forged)
        assert (response.status_code, response.json()["code"]) == (403, "link_invalid")


@pytest.mark.parametrize("member", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_damaged_export_is_not_sent(service: Any, member: str) -> None:
    model = await service.model(await service.session())
    request = {"model_id": model, "seq_id": 1, "path": "out"}
    await service.result(await service.post("/save_weights_external", request))
    answer = await service.get(
        f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    )
    url = answer["urls"][member]
    sound = (await service.http.get(url)).content
    file_id = re.search("/files/([0-9a-f]{32})/", url)[1]  # type: ignore[index]
    path = service.app.state.services.files.path(file_id) / member
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 4]))
    response = await service.http.get(url)
    assert (response.status_code, response.json()["code"]) == (500, "checkpoint_damaged")
    assert f"restore {file_id}/{member} from a backup" in response.json()["detail"]
    path.write_bytes(sound)
    assert (await service.http.get(url)).content == sound


async def test_old_sdks_do_not_see_the_checkpoint_type_that_they_do_not_know(
    service: Any,
) -> None:
    """SDKs up to 0.27 accept two type names only and fail on the whole list."""
    model = await service.model(await service.session())
    await saved(service, model, 1)
    request = {"model_id": model, "seq_id": 2, "path": "out"}
    await service.result(await service.post("/save_weights_external", request))
    for path in ("/checkpoints", f"/training_runs/{model}/checkpoints"):
        for version, types in {
            **{"0.25.0": {"training"}, "0.27.2": {"training"}},
            **{"0.28.0": {"training", "external"}, "0.38.0": {"training", "external"}},
            **{"": {"training", "external"}, "1.0": {"training", "external"}},
        }.items():
            headers = {"X-Stainless-Package-Version": version}
            found = (await service.get(path, headers=headers))["checkpoints"]
            assert {each["checkpoint_type"] for each in found} == types, (path, version)


async def test_only_exports_can_be_downloaded(service: Any) -> None:
    model = await service.model(await service.session())
    await saved(service, model, 1)
    response = await service.call(
        "GET", f"/training_runs/{model}/checkpoints/weights/a/external_weights_urls"
    )
    assert response.status_code == 400
    assert "save_weights_external" in response.json()["detail"]


async def test_an_export_for_recipients_is_encrypted(service: Any) -> None:
    import pyrage

    identity = pyrage.x25519.Identity.generate()
    model = await service.model(await service.session())
    request = {
        "model_id": model,
        "seq_id": 1,
        "path": "out",
        "age_encryption_recipients": [str(identity.to_public())],
    }
    await service.result(await service.post("/save_weights_external", request))
    urls = await service.get(
        f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    )
    sealed = await service.http.get(urls["urls"]["adapter_config.json.age"])
    assert json.loads(pyrage.decrypt(sealed.content, [identity]))["r"] == 4


async def test_a_recipient_that_is_not_an_age_key_is_refused(service: Any) -> None:
    model = await service.model(await service.session())
    for seq_id, recipients in enumerate((["ssh-rsa x"], ["age1nonsense"], ["age1x"] * 33), 1):
        request = {
            "model_id": model,
            "seq_id": seq_id,
            "path": "out",
            "age_encryption_recipients": recipients,
        }
        answer = await service.post("/save_weights_external", request)
        assert "age_encryption_recipients" in await service.error(answer)


async def test_a_sampler_save_needs_a_name_or_a_number(service: Any) -> None:
    model = await service.model(await service.session())
    request = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
    answer = await service.post("/save_weights_for_sampler", request)
    assert "sampling_session_seq_id" in await service.error(answer)
