"""Held-out rows: their number, their copies, and the prompts in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve_client import chat_datum, next_token_datum, sft_datum
from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.data.forms import Row
from tuneserve_server.cli.held_out import (
    TooFewRows,
    encoded_prompt,
    prompt_in,
    prompt_of,
    split,
    weight_of,
)
from tuneserve_server.cli.train_rows import Rows, read_rows

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)


def rows_of(folder: Path, texts: list[str]) -> Rows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return read_rows(str(path))


def texts(rows: Rows) -> list[Any]:
    return [row.text for row in rows.rows]


@pytest.mark.parametrize(
    ("count", "share", "held"),
    [(40, 0.05, 2), (40, 0.2, 8), (10, 0.05, 1), (3, 0.9, 2), (2, 0.99, 1)],
)
def test_a_share_of_the_rows_is_held_out_and_the_rest_is_trained(
    tmp_path: Path, count: int, share: float, held: int
) -> None:
    names = [f"row {number}" for number in range(count)]
    trained, held_out = split(rows_of(tmp_path, names), share, 0)
    assert len(held_out.rows) == held
    assert sorted(texts(trained) + texts(held_out)) == sorted(names)


def test_the_seed_chooses_the_rows(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [f"row {number}" for number in range(40)])
    chosen = [texts(split(rows, 0.2, seed)[1]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_no_copy_of_a_held_out_row_is_trained_on(tmp_path: Path) -> None:
    names = [f"row {number % 5}" for number in range(20)]
    for seed in range(5):
        trained, held_out = split(rows_of(tmp_path, names), 0.4, seed)
        assert len(held_out.rows) == 8  # four copies of two rows
        assert not set(texts(trained)) & set(texts(held_out))


def test_copies_of_one_row_cannot_be_held_out(tmp_path: Path) -> None:
    with pytest.raises(TooFewRows, match=r"1 different row, .* --eval-file"):
        split(rows_of(tmp_path, ["same", "same"]), 0.5, 0)


def test_the_prompt_is_all_that_comes_before_the_answer() -> None:
    prompt = prompt_of(sft_datum(TOKENIZER, "The sky is", " blue."))
    assert prompt == TOKENIZER.encode("The sky is")
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Ahoy"}]
    assert prompt_of(chat_datum(TOKENIZER, said)) == TOKENIZER.apply_chat_template(said[:1])
    assert prompt_of(next_token_datum([5, 6, 7, 8, 9])) == [5, 6]  # half of the four read
    assert len(prompt_of(next_token_datum(list(range(100))))) == 16


def test_the_prompt_of_a_conversation_is_shown_as_its_last_message() -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Ahoy"},
        {"role": "user", "content": "What colour is coal?"},
        {"role": "assistant", "content": "Black!"},
    ]
    rows = [Row("row 1", said[:3]), Row("row 2", said)]
    for datum, text in (
        (chat_datum(TOKENIZER, said[:3]), "Hello"),
        (chat_datum(TOKENIZER, said), "What colour is coal?"),
        (chat_datum(TOKENIZER, said, learn="all"), "Hello"),
    ):
        found = prompt_in(datum, rows, TOKENIZER)
        assert (found.tokens, found.text) == (prompt_of(datum), text)


def test_a_prompt_without_a_text_of_its_own_keeps_the_marks_of_the_template() -> None:
    said = [{"role": "user", "content": ""}, {"role": "assistant", "content": "Ahoy"}]
    found = prompt_in(chat_datum(TOKENIZER, said), [Row("row 1", said)], TOKENIZER)
    assert found.text == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    other = [{"role": "user", "content": "Hello"}, said[1]]
    found = prompt_in(chat_datum(TOKENIZER, other), [Row("row 1", said)], TOKENIZER)
    assert found.text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_the_prompt_of_a_text_is_shown_as_it_is() -> None:
    datum = sft_datum(TOKENIZER, "The sky is", " blue.")
    rows = [Row("row 1", prompt="The sky is", completion=" blue.")]
    assert prompt_in(datum, rows, TOKENIZER).text == "The sky is"


def test_a_text_becomes_a_message_where_the_rows_are_conversations() -> None:
    said = [{"role": "user", "content": "Hello"}]
    assert encoded_prompt("Hello", TOKENIZER, as_chat=True) == TOKENIZER.apply_chat_template(said)
    assert encoded_prompt("Hello", TOKENIZER, as_chat=False) == TOKENIZER.encode("Hello")


def test_the_weight_of_data_is_the_sum_over_their_tokens() -> None:
    data = [next_token_datum([1, 2, 3], [0, 1, 0.5]), next_token_datum([1, 2])]
    assert weight_of(data) == 2.5
