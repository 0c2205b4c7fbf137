"""The reference: the same model, adapter and batches in Hugging Face transformers and PEFT."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from bare_engine import Tokens

from tuneserve_engine.adapters.state import AdapterState
from tuneserve_engine.core.adapter import PROJECTIONS, UNEMBED, AdamwParams

_NO_TARGET = -100


class Peer:
    """A PEFT model that starts from the weights of one of our adapters.

    It is as fast as its libraries allow without extra code: fused AdamW, and scaled-dot-product
    attention without a mask, which causal models do not need for padding on the right.
    """

    def __init__(self, folder: Path, start: AdapterState, *, learning_rate: float) -> None:
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = _with_lora(model, start)
        adam = AdamwParams(learning_rate=learning_rate)
        self._optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            fused=True,
        )

    def step(self, sequences: Sequence[Tokens], *, rows: int | None = None) -> float:
        """Take one optimizer step on the sum of -logprob, and return the sum.

        With ``rows``, the step runs in micro-batches of so many sequences, the longest last.
        """
        total = 0.0
        for batch in micro_batches(sequences, rows or len(sequences)):
            tokens, targets = _padded(batch)
            logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=_NO_TARGET, reduction="sum"
            )
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def micro_batches(sequences: Sequence[Tokens], rows: int) -> Iterator[Sequence[Tokens]]:
    """Yield the sequences by length, ``rows`` at a time: no simpler way pads less."""
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), rows):
        yield ordered[start : start + rows]


def padded_tokens(sequences: Sequence[Tokens], rows: int) -> int:
    """Return the number of positions that such micro-batches compute."""
    return sum(len(b) * (len(b[-1]) - 1) for b in micro_batches(sequences, rows))


def _padded(batch: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(s) for s in batch) - 1
    tokens = np.zeros((len(batch), longest), np.int64)
    targets = np.full((len(batch), longest), _NO_TARGET, np.int64)
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, : len(sequence) - 1] = sequence[1:]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _with_lora(model: Any, start: AdapterState) -> Any:
    config = start.config
    head = ["lm_head"] if config.train_unembed else []
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=int(config.alpha), target_modules=[*PROJECTIONS, *head]
    )
    with warnings.catch_warnings(action="ignore"):  # about tied weights, and from its libraries
        wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for target, layer, module in _lora_modules(wrapped, head=config.train_unembed):
            for part, linear in (("A", module.lora_A), ("B", module.lora_B)):
                ours = start.weights[f"{target}.{part}"]
                ours = ours if layer is None else ours[layer]
                linear["default"].weight.copy_(torch.from_numpy(ours.T.copy()))
    return wrapped.train()


def _lora_modules(model: Any, *, head: bool) -> Iterator[tuple[str, int | None, Any]]:
    """Yield (our target, layer, PEFT's module) of every adapted linear layer."""
    decoder = model.base_model.model
    for layer, block in enumerate(decoder.model.layers):
        for target in PROJECTIONS:
            parent = block.mlp if hasattr(block.mlp, target) else block.self_attn
            yield target, layer, getattr(parent, target)
    if head:
        yield UNEMBED, None, decoder.lm_head
