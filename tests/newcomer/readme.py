"""The commands that the README tells a newcomer to type, and their expected results."""

import json
import re
import shlex
import warnings
from pathlib import Path

import peft
import torch
import transformers

from tuneserve_engine.settings.common import TINY_MODEL

ROOT = Path(__file__).parents[2]
SECTION = "## Your own rows: three commands"
PATH = "tinker://…"
"""A placeholder in the third command for the path that the second one prints."""


def section() -> str:
    _, _, rest = (ROOT / "README.md").read_text().partition(f"{SECTION}\n")
    return rest.partition("\n## ")[0]


def _block(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", section(), re.M | re.S)
    return str(block)


def rows() -> str:
    """The file of rows for the commands."""
    return _block("json")


def commands() -> list[list[str]]:
    return [shlex.split(line) for line in _block("sh").splitlines()]


def trained_path(said: str) -> str:
    """The path that a newcomer copies from the second command into the third."""
    (path,) = re.findall(r"^saved as (tinker://\S+)$", said, re.M)
    return str(path)


def answer_in_peft(adapter: Path) -> str:
    """The likeliest answer to the first row's question, by the exported adapter in PEFT."""
    (asked, _) = json.loads(rows().splitlines()[0])["messages"]
    with warnings.catch_warnings(action="ignore"):  # each library warns about the other
        base = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
        model = peft.PeftModel.from_pretrained(base, adapter)
        inputs = tokenizer.apply_chat_template(
            [asked], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        drawn = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    return str(tokenizer.decode(drawn[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
