"""The byte-level BPE tokenizer of the embedded model: Qwen3's control tokens and chat format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Qwen3's control tokens, in its order. Clients look them up by text. Only the first three and the
# think and tool tags occur in the training text.
CONTROL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
# As in Qwen3: decoding with skip_special_tokens must keep these tags.
VISIBLE_TOKENS = {
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
}  # fmt: skip
# As Qwen splits text: words, single digits, punctuation and spaces, each apart from the others.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- set tool_prompt %}
{%- if tools %}{{ '# Tools\\n\\nCall a function with <tool_call>{"name": ..., "arguments": ...}\
</tool_call>.\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools>' }}
{%- endif %}
{%- endset %}
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + ('\\n\\n' + tool_prompt if tools else '') \
+ '<|im_end|>\\n' }}
{%- elif tools %}
{{- '<|im_start|>system\\n' + tool_prompt + '<|im_end|>\\n' }}
{%- endif %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in rest %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is string and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{"name": ' \
+ (call.name | tojson) + ', "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocab_size` ids that can encode every byte string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = (piece for text in texts for piece in _without_control_tokens(text))
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text not in VISIBLE_TOKENS, normalized=False)
            for text in CONTROL_TOKENS
        ]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for `AutoTokenizer`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # Not Qwen2Tokenizer: transformers 5 rebuilds it with NFC, which loses some text.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": text not in VISIBLE_TOKENS,
            }
            for text in CONTROL_TOKENS
        },
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def _without_control_tokens(text: str) -> list[str]:
    for token in CONTROL_TOKENS:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]
