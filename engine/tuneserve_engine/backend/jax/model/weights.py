"""Base models in the Hugging Face layout, loaded from disk or the hub into the decoder's stacks."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from tuneserve_engine.backend.jax.mesh import DeviceMesh
from tuneserve_engine.backend.jax.model.config import ModelConfig, token_ids
from tuneserve_engine.backend.jax.model.decoder import Decoder
from tuneserve_engine.backend.jax.model.weight_shapes import layer_shapes
from tuneserve_engine.core.backend_options import DType
from tuneserve_engine.core.hub import BadCheckpoint, resolve_base_model

_STORED_DTYPES = ("F32", "BF16", "F16")
_NAMES_SHOWN = 8

_MODULES = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


class TensorLocation(NamedTuple):
    """The place of a stored tensor: a weight of the decoder and, in a stack, the layer."""

    weight: str
    layer: int | None
    shape: tuple[int, ...]  # as stored: a projection is [d_out, d_in]


class Shardings(dict[str, Any]):
    """Shardings by weight, an argument that ``jax.jit`` compiles for."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def load_base_model(
    path_or_hub_id: str, *, dtype: DType, mesh: DeviceMesh | None = None
) -> tuple[Decoder, ModelConfig]:
    """Return the decoder with its weights in ``dtype`` on the devices of ``mesh``, and its config.

    By default, that is JAX's default device. A device has one whole layer at a time, beside its
    parts. The decoder is in evaluation mode. Host memory holds one layer at a time, or one of the
    tensors beside the layers. Raises ``BadCheckpoint`` or ``UnsupportedModel`` before reading any
    weight if names, shapes or options do not fit.
    """
    folder, mesh = resolve_base_model(path_or_hub_id), mesh or DeviceMesh()
    config = read_config(folder)
    with checked_files(folder, config) as files:
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
        parameters = {
            **dict(model.layers.items()),
            "embed": model.embed,
            "final_norm": model.final_norm,
        }
        if model.unembed is not None:
            parameters["unembed"] = model.unembed
        shardings = _shardings(parameters, mesh)
        weights = _read(files, config, jnp.dtype(dtype), mesh, shardings)
    for name, array in weights.items():
        parameters[name].set_value(array)
    return model, config


def _shardings(parameters: dict[str, Any], mesh: DeviceMesh) -> Shardings:
    """Return where each parameter is to be; nothing for the default device."""
    if mesh.count == 1:
        return Shardings({})
    return Shardings(
        {
            name: mesh.sharding(mesh.part_of(x.shape, x.get_metadata()["most_parts"]))
            for name, x in parameters.items()
        }
    )


@contextmanager
def checked_files(folder: Path, config: ModelConfig) -> Iterator[list[Any]]:
    """Open the weight files and check that their headers hold what ``config`` implies.

    Raises ``BadCheckpoint`` if they do not.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_weights(path)) for path in weight_files(folder)]
        _check(files, expected_tensors(config), config, folder)
        yield files


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration, with end-of-sequence ids from generation_config.json if present."""
    config = ModelConfig.from_hf(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = token_ids(_read_json(generation).get("eos_token_id"))
        if eos:
            return config.with_eos(eos)
    return config


def expected_tensors(config: ModelConfig) -> dict[str, TensorLocation]:
    """Return the location of every tensor of the checkpoint by its Hugging Face name."""
    table = (config.vocab_size, config.hidden)
    places = {
        "model.embed_tokens.weight": TensorLocation("embed", None, table),
        "model.norm.weight": TensorLocation("final_norm", None, (config.hidden,)),
    }
    if not config.tied_embeddings:
        places["lm_head.weight"] = TensorLocation("unembed", None, table)
    for name, shape in layer_shapes(config).items():
        module = _MODULES[name.removesuffix("_bias")]
        kind = "bias" if name.endswith("_bias") else "weight"
        for layer in range(config.layers):
            places[f"model.layers.{layer}.{module}.{kind}"] = TensorLocation(
                name, layer, shape[::-1]
            )
    return places


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing; a base model needs it") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the paths where the weights must be, whether the files exist or not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or set(map(type, names.values())) != {str}:
        raise BadCheckpoint(f"{index} has no weight_map of names; download the model again")
    return [folder / name for name in sorted(set(names.values()))]


def open_weights(path: Path) -> Any:
    """Open a file of weights and read its header. Raises ``BadCheckpoint``."""
    if not path.is_file():
        raise BadCheckpoint(
            f"{path} is missing; weights must be safetensors: one model.safetensors, or the files "
            "named in model.safetensors.index.json"
        )
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged ({error}); download or copy it again") from error


def _check(
    files: Iterable[Any], places: dict[str, TensorLocation], config: ModelConfig, folder: Path
) -> None:
    """Raise ``BadCheckpoint`` unless the files hold exactly the expected names and shapes."""
    missing, unexpected, wrong = set(places), [], []
    for file in files:
        for name in file.keys():
            missing.discard(name)
            if name not in places:
                unexpected.append(name)
                continue
            stored = file.get_slice(name)
            shape, stored_dtype = tuple(stored.get_shape()), stored.get_dtype()
            if shape != places[name].shape:
                wrong.append(f"{name} is {shape}, config.json implies {places[name].shape}")
            if stored_dtype not in _STORED_DTYPES:
                wrong.append(f"{name} is {stored_dtype}, supported are {', '.join(_STORED_DTYPES)}")
    # Buffers of old exports, and a stored head of a model whose embedding is tied to it.
    ignored = ("rotary_emb.inv_freq", "lm_head.weight" if config.tied_embeddings else "-")
    unexpected = [name for name in unexpected if not name.endswith(ignored)]
    problems = [
        f"{title} {_some(names)}"
        for title, names in (("missing", sorted(missing)), ("unexpected", unexpected), ("", wrong))
        if names
    ]
    if problems:
        raise BadCheckpoint(
            f"{folder} does not hold the {config.architecture} model of its config.json: "
            f"{'; '.join(problems)}"
        )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read(
    files: Iterable[Any],
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: DeviceMesh,
    shardings: Shardings,
) -> dict[str, jax.Array]:
    """Return the decoder's arrays by weight name.

    Layers are written into the stacks one by one. One program writes all weights of a layer,
    because compiling a program for each shape takes longer than running it. All other weights are
    whole on each device.
    """
    file_of = {name: file for file in files for name in file.keys()}
    names: dict[int | None, dict[str, str]] = {}  # by layer and weight
    for name, place in expected_tensors(config).items():
        names.setdefault(place.layer, {})[place.weight] = name

    whole = {}
    for weight, name in names[None].items():
        tensor = mesh.put(file_of[name].get_tensor(name))
        if not _are_finite(tensor):
            raise _not_finite(name)
        whole[weight] = tensor.astype(dtype)
        del tensor  # of the stored type; the last one would stay in memory
    shapes = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
    stacks: dict[str, jax.Array] = _zeros(tuple(shapes.items()), dtype, shardings)
    for layer in range(config.layers):
        tensors = {weight: file_of[name].get_tensor(name) for weight, name in names[layer].items()}
        stacks, is_finite = _write_layer(stacks, np.int32(layer), tensors, shardings)
        if not is_finite:
            bad = [weight for weight, tensor in tensors.items() if not np.isfinite(tensor).all()]
            raise _not_finite(", ".join(names[layer][weight] for weight in bad))
        del tensors  # before the next layer is read
    return whole | stacks


def stored_layers(folder: Path, dtype: DType, weight: str) -> Iterator[Any]:
    """Yield a projection's layers [D, F] from the files, in ``dtype``, as the device has them."""
    config = read_config(folder)
    with checked_files(folder, config) as files:
        file_of = {name: file for file in files for name in file.keys()}
        for name, place in expected_tensors(config).items():
            if place.weight == weight:
                yield file_of[name].get_tensor(name).T.astype(jnp.dtype(dtype))


def _not_finite(name: str) -> BadCheckpoint:
    return BadCheckpoint(f"{name} holds NaN or infinite values; download or copy it again")


@jax.jit
def _are_finite(*tensors: jax.Array) -> jax.Array:
    """Return whether all numbers are finite. One reduction compiles faster than one per tensor."""
    return jnp.concatenate([jnp.isfinite(x).ravel() for x in tensors]).all()


def _placed(stacks: dict[str, jax.Array], shardings: Shardings) -> dict[str, jax.Array]:
    known = {name: shardings[name] for name in stacks if name in shardings}
    placed = {name: stacks[name] for name in known}
    return {**stacks, **jax.lax.with_sharding_constraint(placed, known)}  # type: ignore[no-untyped-call]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: jnp.dtype, shardings: Shardings
) -> dict[str, jax.Array]:
    return _placed({name: jnp.zeros(shape, dtype) for name, shape in shapes}, shardings)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write_layer(
    stacks: dict[str, jax.Array],
    layer: jax.Array,
    tensors: dict[str, jax.Array],
    shardings: Shardings,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the donated stacks with one layer replaced, and whether its tensors are finite.

    The tensors are turned to [d_in, d_out].
    """
    written = {
        name: jax.lax.dynamic_update_index_in_dim(
            stack, tensors[name].T.astype(stack.dtype), layer, axis=0
        )
        for name, stack in stacks.items()
    }
    return _placed(written, shardings), _are_finite(*tensors.values())
