"""The facts about a base model that its clients can ask for."""

import math
from pathlib import Path

from tokenizers import Tokenizer

from tuneserve_engine.backend.jax.adapters.arrays import target_shapes
from tuneserve_engine.backend.jax.model.config import ModelConfig
from tuneserve_engine.core.adapter import BaseModelInfo
from tuneserve_engine.core.hub import revision_of
from tuneserve_engine.core.shapes import StaticShapes

_TOKENIZER = "tokenizer.json"


def base_model_info(
    folder: Path,
    config: ModelConfig,
    static_shapes: StaticShapes,
    name: str,
    tokenizers: tuple[str, str],
) -> BaseModelInfo:
    """Return the facts about a base model; ``tokenizers`` are its id here and for clients.

    Raises ``ValueError`` if the static shapes have a longer context than the model.
    """
    if static_shapes.context_length > config.context_length:
        raise ValueError(
            f"the static shapes have a context of {static_shapes.context_length} tokens; "
            f"{name} was built for {config.context_length}; lower it"
        )
    shapes = target_shapes(config)
    return BaseModelInfo(
        name=name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        context_length=static_shapes.context_length,
        max_rank=static_shapes.max_rank,
        tokenizer_id=tokenizers[0],
        eos_token_ids=config.eos_token_ids,
        parameters=sum(map(math.prod, shapes.values())),
        target_shapes=tuple(shapes.items()),
        revision=revision_of(folder),
        client_tokenizer_id=tokenizers[1],
    )


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the base model's tokenizer, if there is one."""
    path = folder / _TOKENIZER
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def tokenizer_json(folder: Path) -> str | None:
    """Return the text of ``tokenizer.json``, if there is one."""
    path = folder / _TOKENIZER
    return path.read_text(encoding="utf-8") if path.is_file() else None
