"""Rows of training files: bad ones are named by their line, and only answers are learnt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.train_rows import BadRows, encode, read_rows

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last else m.content.split('|')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that leaves out the thoughts before the last answer, as Qwen3's does."""


def file_of(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows)
    )
    return str(path)


def learnt(datum: Any) -> str:
    targets = datum.targets[datum.inputs["weights"] > 0]
    return TOKENIZER.decode(targets.tolist(), skip_special=False)


def said(*texts: str) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is list; it must be an object"),
        ("[" * 200_000, "it is nested too deeply"),
        ({"prompt": "a"}, 'there is no "completion"'),
        ({"completion": "a"}, 'there is no "prompt"'),
        ({"prompt": 7, "completion": "a"}, '"prompt" is not a string'),
        ({"messages": "hello"}, '"messages" is not a list'),
        ({"messages": [{"role": "user"}]}, "message 1 needs a string"),
        (said("hello"), 'no message with the role "assistant"'),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    path = file_of(tmp_path, good, "", row, good, row)
    with pytest.raises(BadRows, match=r"rows.jsonl line 3: ") as refused:
        read_rows(str(path))
    assert reason in str(refused.value)
    assert "line 5: " in str(refused.value)
    assert "2 rows are bad" in str(refused.value) and "--skip-bad" in str(refused.value)


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": "\ud800 b"}, said("a\udfff", "b")], ids=["text", "chat"]
)
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path: Path, row: Any) -> None:
    rows = read_rows(file_of(tmp_path, {"prompt": "a", "completion": "b"}, row))
    with pytest.raises(BadRows, match="line 2: the text has half of a surrogate pair"):
        encode(rows, TOKENIZER, limit=100, cut=False)


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(BadRows, match="line 1: it is not UTF-8"):
        read_rows(str(path))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match="has no rows"):
        read_rows(file_of(tmp_path, "", " "))


def test_only_answers_are_learnt(tmp_path: Path) -> None:
    rows = read_rows(
        file_of(
            tmp_path,
            {"prompt": "The sky is", "completion": " blue."},
            said("Hello", "Ahoy!", "And you?", "Arr."),
        )
    )
    text, chat = encode(rows, TOKENIZER, limit=100, cut=False)
    end = TOKENIZER.decode([TOKENIZER.eos_token_id or 0], skip_special=False)
    assert learnt(text) == f" blue.{end}"
    assert learnt(chat) == f"Ahoy!{end}Arr.{end}"


def test_if_the_template_rewrites_past_answers_each_answer_gets_its_own_datum(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), template=FORGETFUL)
    rows = read_rows(file_of(tmp_path, said("Hi", "hm|Ahoy", "And?", "so|Arr")))
    first, second = encode(rows, tokenizer, limit=100, cut=False)
    assert learnt(first).startswith("hm|Ahoy")
    assert learnt(second).startswith("so|Arr")
    assert "hm" not in tokenizer.decode(second.tokens.tolist())


def test_a_row_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    rows = read_rows(file_of(tmp_path, {"prompt": "The sky is", "completion": " blue." * 50}))
    with pytest.raises(BadRows, match=r"line 1: it has \d+ tokens, and at most 20 fit"):
        encode(rows, TOKENIZER, limit=20, cut=False)
    (whole,) = encode(rows, TOKENIZER, limit=1000, cut=False)
    (cut,) = encode(rows, TOKENIZER, limit=20, cut=True)
    assert len(cut) == 20
    np.testing.assert_array_equal(cut.targets, whole.targets[:20])
    with pytest.raises(BadRows, match="line 1: there is nothing to learn"):
        encode(rows, TOKENIZER, limit=2, cut=True)
