"""Build the embedded base model: a Qwen3 of about a million weights, trained on generated text.

    python scripts/build_tiny_model.py            # about ten minutes on one CPU core
    python scripts/build_tiny_model.py --separate # only the last step, on existing weights

This needs the `dev` extra (torch, transformers). Equal seed, versions and machine produce equal
weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_model.corpus import documents
from tiny_model.tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

FOLDER = Path(__file__).parents[1] / "engine/tuneserve_engine/tiny_model"
VOCAB_SIZE = 1024
MAX_TOKENS = 2048
ROW_TOKENS = 128
ROWS = 16
PEAK_LR = 4e-3
TOKENIZER_DOCUMENTS = 20_000
ROPE_THETA = 10_000.0
# The keys of the Qwen3 files on the hub. They are listed here because each release of transformers
# spells the rest of a config differently.
CONFIG_KEYS = [
    "architectures", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id",
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "sliding_window",
    "tie_word_embeddings", "use_cache", "use_sliding_window", "vocab_size",
]  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
CROWDED = 0.1  # rows that are closer than this; tokens of the text have rows 0.28 apart
HELD_OUT_SEED = 10_000  # corpus seeds below are for training
HELD_OUT_ROWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--separate", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.separate:
        return separate_file(args.out / "model.safetensors", args.seed)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    texts = itertools.islice(documents(args.seed), TOKENIZER_DOCUMENTS)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    save_tokenizer(tokenizer, args.out, max_tokens=MAX_TOKENS)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    began = time.monotonic()
    pretrain(model, rows(tokenizer, args.seed), args.steps)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(separated(model.model.embed_tokens.weight, args.seed))
    held_out = torch.stack(list(itertools.islice(rows(tokenizer, HELD_OUT_SEED), HELD_OUT_ROWS)))
    with torch.no_grad():
        loss = float(row_loss(model, held_out))
    save_model(model, tokenizer, args.out)
    weights = sum(p.numel() for p in model.parameters())
    tokens = args.steps * ROWS * ROW_TOKENS
    print(
        f"{weights:,} weights, {tokens:,} tokens, {time.monotonic() - began:.0f} s; held-out loss "
        f"{loss:.3f} nats per token (uniform {math.log(VOCAB_SIZE):.3f})"
    )


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Return the shape of the model: Qwen3 in every detail, only small."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": ROPE_THETA, "rope_type": "default"},
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def rows(tokenizer: Tokenizer, seed: int) -> Iterator[Tensor]:
    """Yield rows of ROW_TOKENS + 1 ids. Each row starts with a new document.

    Documents in a row end with `<|endoftext|>`. The last document of a row is cut off.
    """
    end = tokenizer.token_to_id("<|endoftext|>")
    row: list[int] = []
    for text in documents(seed):
        row += [*tokenizer.encode(text.rstrip("\n")).ids, end]
        if len(row) > ROW_TOKENS:
            yield torch.tensor(row[: ROW_TOKENS + 1])
            row = []


def pretrain(model: Qwen3ForCausalLM, data: Iterator[Tensor], steps: int) -> None:
    """Train the model in place: AdamW, a short warm-up, then a cosine down to zero."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    for step in range(steps):
        loss = row_loss(model, torch.stack(list(itertools.islice(data, ROWS))))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {float(loss.detach()):.3f}", flush=True)


def row_loss(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of each row's next tokens."""
    logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def separated(table: Tensor, seed: int) -> Tensor:
    """Return the embedding [V, D] with a distinct row for every token.

    Training pushes all tokens that the text never contains in the same direction, to rows a few
    hundredths apart. The table is tied to the head, so these tokens could hardly be told apart.
    Each of them gets the mean of these rows, which keeps it as unlikely as before, plus a random
    direction. This direction is as long as the distance of other rows from their mean. A separated
    table stays as it is.
    """
    distances = torch.cdist(table, table, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(torch.inf)
    crowded = distances.min(1).values < CROWDED
    if not crowded.any():
        return table.clone()
    taught = table[~crowded]
    length = (taught - taught.mean(0)).norm(dim=1).mean()
    noise = torch.randn(
        int(crowded.sum()), table.shape[1], generator=torch.Generator().manual_seed(seed)
    )
    found = table.clone()
    found[crowded] = table[crowded].mean(0) + length * torch.nn.functional.normalize(noise)
    return found


def separate_file(path: Path, seed: int) -> None:
    """Separate the rows of existing weights."""
    weights = load_file(path)
    weights[EMBEDDING] = separated(weights[EMBEDDING], seed)
    save_file(weights, path, metadata={"format": "pt"})


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` and `generation_config.json`."""
    save_file(_named_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = {name: getattr(model.config, name) for name in CONFIG_KEYS}
    config |= {"rope_theta": ROPE_THETA, "rope_scaling": None, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    generation = {"do_sample": True, "eos_token_id": ends, "pad_token_id": ends[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _named_weights(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """Return the weights under their hub names, without a tied head."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.contiguous() for name, p in weights.items() if name != "lm_head.weight"}


if __name__ == "__main__":
    main()
