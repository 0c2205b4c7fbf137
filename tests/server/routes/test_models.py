"""The adapter kind that a client asks for, in either way, and the answer that describes it.

Every weight of the fake base model has 4 singular directions, and a quarter of them is one.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.fake_backend import FAKE_INFO
from tuneserve_engine.core.adapter import PROJECTIONS, AdapterConfig
from tuneserve_engine.core.jobs import CreateModel, encode
from tuneserve_engine.core.records import ModelRecord

pytestmark = pytest.mark.anyio

QUARTER = {"kind": "osft", "unfreeze_ratio": 0.25}
OF_QUARTER = {"unfreeze_ratio": "0.25", "form": "factors"}


async def create(service: Any, request: dict[str, Any]) -> tuple[str, AdapterConfig]:
    """The model's id, and the configuration that the worker received."""
    result = await service.result(await service.post("/create_model", request))
    model_id = result["model_id"]
    return model_id, service.backend._adapters[model_id].state.config


async def record(service: Any, model_id: str) -> ModelRecord:
    found: ModelRecord = await service.services.store.get_record(ModelRecord, model_id)
    return found


async def saved(service: Any, model_id: str) -> str:
    request = {"model_id": model_id, "seq_id": 1, "path": "kept"}
    path: str = (await service.result(await service.post("/save_weights", request)))["path"]
    return path


@pytest.mark.parametrize(
    ("fields", "kind", "options", "rank"),
    [
        ({}, "lora", {}, 4),
        ({"adapter": {"kind": "lora"}}, "lora", {}, 4),
        ({"adapter": {"kind": "rslora", "rank": 9}}, "rslora", {}, 9),
        ({"adapter": QUARTER}, "osft", OF_QUARTER, 1),
        ({"adapter": QUARTER | {"form": "core"}}, "osft", OF_QUARTER | {"form": "core"}, 1),
        ({"adapter": {"kind": "osft", "rank": 3}}, "osft", {"form": "factors"}, 3),
        ({"user_metadata": {"adapter": "rslora"}}, "rslora", {}, 4),
        ({"user_metadata": {"adapter": "osft", "unfreeze_ratio": "0.250"}}, "osft", OF_QUARTER, 1),
        ({"user_metadata": {"adapter": "osft", "unfreeze_ratio": 0.5}}, "osft", None, 2),
        ({"user_metadata": {"form": "core", "unfreeze_ratio": "9"}}, "lora", {}, 4),
    ],
)
async def test_the_kind_and_its_options_come_from_the_field_or_from_the_metadata(
    service: Any,
    bodies: Any,
    fields: dict[str, Any],
    kind: str,
    options: dict[str, str] | None,
    rank: int,
) -> None:
    request = bodies.create_model(await service.session(), **fields)
    model_id, config = await create(service, request)
    assert (config.kind, config.rank) == (kind, rank)
    assert options in (None, config.options)
    # An osft adapter never trains the unembedding, whatever the SDK's default says.
    assert config.train_unembed is (kind != "osft")
    assert (await record(service, model_id)).config == config


async def test_an_osft_adapter_without_its_own_rank_takes_that_of_the_lora_config(
    service: Any, bodies: Any
) -> None:
    fields = {"lora_config": {"rank": 2, "seed": 1}, "adapter": {"kind": "osft"}}
    _, config = await create(service, bodies.create_model(await service.session(), **fields))
    assert config.rank == 2


async def test_metadata_that_ask_for_a_kind_are_stored_like_others(
    service: Any, bodies: Any
) -> None:
    given = {"adapter": "osft", "unfreeze_ratio": "0.25", "name": "run 7"}
    request = bodies.create_model(await service.session(), user_metadata=given)
    model_id, config = await create(service, request)
    run = await service.get(f"/training_runs/{model_id}")
    assert run["user_metadata"] == given
    assert "name" not in config.options


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"adapter": {"kind": "dora"}},
            "adapter 'dora' is no kind of adapter; this server has lora, rslora, osft",
        ),
        ({"user_metadata": {"adapter": ""}}, "adapter '' is no kind of adapter"),
        (
            {"user_metadata": {"adapter": "osft", "rank": "64"}},
            "has an entry rank, '64'; send the rank as lora_config.rank",
        ),
        ({"adapter": {}}, "adapter.kind: Field required"),
        (
            {"adapter": QUARTER | {"ratio": 0.5}},
            "'ratio' is no option of adapters of kind osft; it has unfreeze_ratio, form",
        ),
        ({"adapter": {"kind": "lora", "form": "core"}}, "'form' is no option of adapters of kind"),
        (
            {"adapter": QUARTER | {"form": "dense"}},
            "form is 'dense'; adapters of kind osft have factors, short_fixed, core",
        ),
        (
            {"adapter": QUARTER | {"rank": 1}},
            "adapter.rank is 1 and adapter.unfreeze_ratio 0.25; each says how many directions are "
            "trained: leave one out",
        ),
        (
            {"adapter": QUARTER, "user_metadata": {"adapter": "rslora"}},
            "adapter is 'osft', and user_metadata has an entry adapter, 'rslora'",
        ),
        ({"adapter": QUARTER | {"unfreeze_ratio": 1.0}}, "unfreeze_ratio is '1.0'; it must be"),
        ({"user_metadata": {"adapter": "osft", "unfreeze_ratio": "nan"}}, "ratio is 'nan'; it"),
        ({"adapter": {"kind": "osft", "rank": "3"}}, "adapter.rank: Input should be a valid"),
        (
            {"adapter": {"kind": "rslora", "rank": 33}},
            "adapter.rank is 33; this server takes 1 to 32 for 'tuneserve/fake'",
        ),
        ({"adapter": {"kind": "osft", "rank": 0}}, "adapter.rank is 0; this server takes 1 to 32"),
        ({"adapter": {"kind": "osft"}}, "rank is 4, and no weight has more than 4 singular"),
        (
            {
                "adapter": QUARTER,
                "lora_config": {"rank": 4, "train_attn": False, "train_mlp": False},
            },
            "osft leaves the unembedding as it is; set one of the two to true",
        ),
    ],
)
async def test_an_unknown_kind_or_option_is_refused_with_the_valid_ones(
    service: Any, bodies: Any, fields: dict[str, Any], named: str
) -> None:
    request = bodies.create_model(await service.session(), **fields)
    assert named in await service.error(await service.post("/create_model", request))


async def test_a_ratio_that_exceeds_the_room_is_refused_with_the_bytes(
    api: Any, bodies: Any
) -> None:
    wide = tuple((target, (2, 64, 200)) for target in PROJECTIONS)
    await api.start_worker(info=replace(FAKE_INFO, max_rank=15, target_shapes=wide))
    request = bodies.create_model(await api.session(), adapter=QUARTER)
    error = await api.error(await api.post("/create_model", request))
    # By hand: U and V have 16 * (200 + 64) numbers and S has 16, three times for the moments. Add
    # the pair's gradient, for 7 targets with 2 layers.
    numbers = 14 * (3 * 16 * (200 + 64 + 1) + 16 * (200 + 64))
    assert "this adapter has rank 16; this server takes 1 to 15; " in error
    assert f"takes {math.floor(40 * numbers / 2**20 + 0.5) / 10} MiB" in error


async def test_a_kind_that_needs_shapes_waits_for_a_worker_that_reports_them(
    api: Any, bodies: Any
) -> None:
    session = await api.session()
    request = bodies.create_model(session, adapter=QUARTER)
    response = await api.call("POST", "/create_model", json=request)
    assert (response.status_code, response.json()["code"]) == (503, "model_unavailable")
    assert "how many directions its weights have" in response.json()["detail"]
    assert "retry-after" in response.headers
    await api.start_worker()
    _, config = await create(api, request)
    assert config.kind == "osft"


async def test_models_and_checkpoints_are_described_with_kind_and_resolved_rank(
    service: Any, bodies: Any
) -> None:
    request = bodies.create_model(await service.session(), adapter=QUARTER)
    model_id, _ = await create(service, request)
    path = await saved(service, model_id)
    told = [
        await service.post("/get_info", {"model_id": model_id}),
        await service.post("/weights_info", {"tinker_path": path}),
        await service.get(f"/training_runs/{model_id}"),
    ]
    for body in told:
        shown = {name: body[name] for name in ("is_lora", "lora_rank", "adapter")}
        assert shown == {"is_lora": True, "lora_rank": 1, "adapter": "osft"}
    (run,) = (await service.services.live.look(None)).runs
    assert (run.adapter, run.rank) == ("osft", 1)


# --- models from a checkpoint ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [None, {"adapter": "osft", "unfreeze_ratio": ".25", "form": "factors"}]
)
async def test_a_model_made_from_a_checkpoint_has_its_kind(
    service: Any, bodies: Any, given: dict[str, str] | None
) -> None:
    session = await service.session()
    model_id, config = await create(service, bodies.create_model(session, adapter=QUARTER))
    path = await saved(service, model_id)
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    await service.result(await service.post("/load_weights", load | {"user_metadata": given}))
    loaded = service.backend._adapters[f"{session}:train:1"].state.config
    assert loaded == config
    assert (await record(service, f"{session}:train:1")).config.kind == "osft"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"adapter": "lora"},
            "asks for adapter 'lora'; {path} has 'osft', and so does every model",
        ),
        ({"adapter": "nothing"}, "asks for adapter 'nothing'; {path} has 'osft'"),
        ({"adapter": "osft", "form": "core"}, "asks for form 'core'; {path} has 'factors'"),
        ({"adapter": "osft", "unfreeze_ratio": "0.5"}, "unfreeze_ratio '0.5'; {path} has '0.25'"),
    ],
)
async def test_metadata_that_ask_for_another_kind_than_the_checkpoints_are_refused(
    service: Any, bodies: Any, given: dict[str, str], named: str
) -> None:
    session = await service.session()
    model_id, _ = await create(service, bodies.create_model(session, adapter=QUARTER))
    path = await saved(service, model_id)
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    answer = await service.post("/load_weights", load | {"user_metadata": given})
    assert named.format(path=path) in await service.error(answer)


def test_a_configuration_of_a_release_before_adapter_kinds_is_lora() -> None:
    config = b'{"rank":4,"alpha":8.0,"seed":1,"train_mlp":false}'
    old = msgspec.json.decode(config, type=AdapterConfig)
    assert old == AdapterConfig(4, 8.0, 1, train_mlp=False, kind="lora", options={}, frozen="")
    payload = msgspec.msgpack.encode({"base_model": "m", "config": msgspec.json.decode(config)})
    assert msgspec.msgpack.decode(payload, type=CreateModel) == CreateModel("m", old)
    assert msgspec.msgpack.decode(encode(CreateModel("m", old)), type=CreateModel).config == old


# --- while the base model is decomposed -----------------------------------------------------------


async def polled(api: Any, answer: dict[str, Any]) -> tuple[str, str | None]:
    response = await api.call("POST", "/retrieve_future", json=answer)
    assert response.status_code == 408, response.text
    body = response.json()
    return body["queue_state"], body.get("queue_state_reason")


async def decomposing(api: Any, done: float, of: float = 196.0, name: str = "one") -> int:
    """The epoch of a worker that reports its progress and does nothing else."""
    epoch: int = (await api.services.store.lease(name, f"process of {name}", FAKE_INFO)).epoch
    await api.services.store.renew(epoch, {"weights_decomposed": done, "weights_to_decompose": of})
    return epoch


async def test_a_creation_that_waits_for_the_base_models_directions_shows_their_progress(
    api: Any, bodies: Any
) -> None:
    epoch = await decomposing(api, 34.0)
    session = await api.session()
    created = await api.post("/create_model", bodies.create_model(session, adapter=QUARTER))
    await api.post("/create_model", bodies.create_model(session, 1))
    trained = await api.forward_backward(f"{session}:train:0", 1)
    told = ("paused_capacity", "the base model's directions: 34 of 196 weights decomposed")
    assert [await polled(api, each) for each in (created, trained)] == [told, told]
    await decomposing(api, 2.0, name="two")
    assert (await polled(api, created))[1] == (
        "the base model's directions: 36 of 392 weights decomposed"
    )
    await api.services.store.renew(
        epoch, {"weights_decomposed": 196.0, "weights_to_decompose": 196.0}
    )
    assert (await polled(api, created))[1] == (
        "the base model's directions: 2 of 196 weights decomposed"
    )


@pytest.mark.parametrize(("done", "of"), [(0.0, 0.0), (196.0, 196.0)])
async def test_progress_is_not_shown_while_nothing_is_decomposed(
    api: Any, bodies: Any, done: float, of: float
) -> None:
    await decomposing(api, done, of)
    request = bodies.create_model(await api.session(), adapter=QUARTER)
    assert await polled(api, await api.post("/create_model", request)) == ("active", None)


async def test_progress_is_shown_from_the_first_weight(api: Any, bodies: Any) -> None:
    await decomposing(api, 0.0)
    request = bodies.create_model(await api.session(), adapter=QUARTER)
    told = "the base model's directions: 0 of 196 weights decomposed"
    assert (await polled(api, await api.post("/create_model", request)))[1] == told


async def test_models_that_need_no_directions_do_not_wait_for_them(api: Any, bodies: Any) -> None:
    await decomposing(api, 34.0)
    session = await api.session()
    created = await api.post("/create_model", bodies.create_model(session))
    sampler = await api.sampler(session)
    sampled = await api.post("/asample", bodies.asample(sampler, 0))
    for answer in (created, sampled):
        assert await polled(api, answer) == ("active", None)
