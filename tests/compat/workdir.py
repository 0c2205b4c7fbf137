"""A folder from which the cookbook runs offline.

It has a tokenizer and small data sets, named as on the hub, where ``transformers`` and ``datasets``
find them before they would go online.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MODEL_NAME = "Qwen/Qwen3-8B"  # a name whose renderer the cookbook knows
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
GSM8K_CARD = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "lemon": "yellow"}
PEOPLE = ("Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Jack")
# rl_loop starts from an adapter taught to answer with one of these at random, so that rewards
# differ inside a group and can be learnt from.
ANSWERS = (3, 7)

Row = dict[str, Any]


def lay_out(folder: Path, model: Path) -> None:
    """Write the tokenizer of `model` as Qwen/Qwen3-8B, and every data set that the recipes load."""
    tokenizer = folder / MODEL_NAME
    tokenizer.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, tokenizer / name)
    _splits(folder / "HuggingFaceH4/no_robots/data", _conversations, train=96, test=16)
    _splits(folder / "openai/gsm8k/main", _word_problems, train=160, test=16)
    (folder / "openai/gsm8k/README.md").write_text(GSM8K_CARD)
    _splits(folder / "Anthropic/hh-rlhf/data", _preferences, train=256, test=16)
    _splits(folder / "zwhe99/DeepMath-103K/data", _questions, train=64)
    _splits(folder / "open-thoughts/OpenThoughts3-1.2M/data", _reasoning, train=64)
    _splits(folder / "hicai-zju/SciKnowEval/data", _multiple_choice, test=64)
    _splits(folder / "allenai/tulu-3-sft-mixture/data", _conversations, train=64)
    _write(folder / "rubric.jsonl", _rubrics(16))


def _splits(folder: Path, rows: Any, **sizes: int) -> None:
    folder.mkdir(parents=True)
    for split, size in sizes.items():
        _write(folder / f"{split}.jsonl", rows(size))


def _write(file: Path, rows: Iterable[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _facts(count: int) -> Iterator[tuple[int, str, str, str]]:
    """Yields a number, a person, a thing and its colour, all different from their neighbours'."""
    things = list(COLOURS)
    for index in range(count):
        thing = things[index % len(things)]
        yield index, PEOPLE[index % len(PEOPLE)], thing, COLOURS[thing]


def _conversations(count: int) -> Iterator[Row]:
    for index, person, thing, colour in _facts(count):
        messages = [
            {"role": "user", "content": f"{person} asks: what colour is the {thing}?"},
            {"role": "assistant", "content": f"Dear {person}, the {thing} is {colour}."},
        ]
        if index % 3 == 0:
            messages += [
                {"role": "user", "content": "Are you sure?"},
                {"role": "assistant", "content": f"Yes, {person}, it is {colour}."},
            ]
        yield {"prompt": messages[0]["content"], "prompt_id": str(index), "messages": messages}


def _word_problems(count: int) -> Iterator[Row]:
    for index, person, thing, _ in _facts(count):
        answer = ANSWERS[index % len(ANSWERS)]
        yield {
            "question": f"{person} has {answer - 1} pictures of the {thing} and draws one more. "
            f"How many pictures does {person} have?",
            "answer": f"{answer - 1} and 1 make {answer}.\n#### {answer}",
        }


def _preferences(count: int) -> Iterator[Row]:
    for _, person, thing, colour in _facts(count):
        prompt = f"\n\nHuman: {person} asks: what colour is the {thing}?\n\nAssistant: "
        yield {"chosen": f"{prompt}It is {colour}, {person}.", "rejected": f"{prompt}Go away."}


def _questions(count: int) -> Iterator[Row]:
    for row in _word_problems(count):
        yield {"question": row["question"], "final_answer": row["answer"].split()[-1]}


def _reasoning(count: int) -> Iterator[Row]:
    for _, person, thing, colour in _facts(count):
        yield {
            "conversations": [
                {"from": "human", "value": f"What colour is the {thing}, {person}?"},
                {"from": "gpt", "value": f"I look at the {thing}. It is {colour}."},
            ]
        }


def _multiple_choice(count: int) -> Iterator[Row]:
    for index, person, thing, colour in _facts(count):
        wrong = "grey"
        texts = [colour, wrong] if index % 2 else [wrong, colour]
        yield {
            "question": f"{person} asks: what colour is the {thing}?",
            "choices": {"label": ["A", "B"], "text": texts},
            "answerKey": "A" if index % 2 else "B",
            "domain": "Chemistry",
            "type": "mcq-2-choices",
            "details": {"level": "L3"},
        }


def _rubrics(count: int) -> Iterator[Row]:
    for _, person, thing, colour in _facts(count):
        yield {
            "convo": [{"role": "user", "content": f"{person} asks: what colour is the {thing}?"}],
            "rubric_items": [
                {
                    "rubric_str": f"Does the answer say {colour}?",
                    "extraction_regex": r"<score>(.*?)</score>",
                    "grader_output_format_instruction": "Answer with <score>1</score> or 0.",
                }
            ],
        }
