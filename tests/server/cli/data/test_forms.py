"""Forms of rows: the text trained on agrees with transformers' rendering of the template."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers

from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.train_rows import BadRows, Rows, encode, read_rows

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)
REFERENCE = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
ASKED = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Ahoy!"}
CHAT = [ASKED, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief"}
PART = [{"type": "text", "text": "Ahoy!"}]
CALL = [{"type": "function", "function": {"name": "sail", "arguments": {"to": "Rum"}}}]

FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ({"messages": CHAT}, CHAT),
    "trl": ({"prompt": [ASKED], "completion": [ANSWER]}, CHAT),
    "alpaca": ({"instruction": "Hello", "input": "", "output": "Ahoy!"}, CHAT),
    "alpaca with input": (
        {"instruction": "Say", "input": "Hello", "output": "Ahoy!"},
        [{"role": "user", "content": "Say\n\nHello"}, ANSWER],
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Ahoy!"},
            ]
        },
        CHAT,
    ),
    "sharegpt with system": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief"},
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Ahoy!"},
            ]
        },
        [{"role": "system", "content": "Be brief"}, *CHAT],
    ),
    "sharegpt that opens with gpt": (
        {
            "conversations": [
                {"from": "gpt", "value": "Yo."},
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Ahoy!"},
            ]
        },
        [{**ANSWER, "content": "Yo."}, *CHAT],
    ),
    "sharegpt with a system column": (
        {
            "system": "Be brief",
            "conversations": [
                {"from": "human", "value": "Hello"},
                {"from": "gpt", "value": "Ahoy!"},
            ],
        },
        [SYSTEM, *CHAT],
    ),
    "alpaca with a system column": (
        {"system": "Be brief", "instruction": "Hello", "output": "Ahoy!"},
        [SYSTEM, *CHAT],
    ),
    "alpaca with history": (
        {"history": [["Hello", "Arr."]], "instruction": "Hello", "output": "Ahoy!"},
        [ASKED, {**ANSWER, "content": "Arr."}, *CHAT],
    ),
    "alpaca without system or history": (
        {"system": "", "history": [], "instruction": "Hello", "output": "Ahoy!"},
        CHAT,
    ),
    "messages with a system column": ({"messages": CHAT, "system": "Be brief"}, [SYSTEM, *CHAT]),
    "the same system twice": (
        {"messages": [SYSTEM, *CHAT], "system": "Be brief"},
        [SYSTEM, *CHAT],
    ),
    "content parts": ({"messages": [ASKED, {**ANSWER, "content": PART}]}, CHAT),
    "tool call": (
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": CALL}, *CHAT]},
        [ASKED, {"role": "assistant", "content": "", "tool_calls": CALL}, *CHAT],
    ),
}


def rows_of(folder: Path, *values: Any, **options: Any) -> Rows:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in values))
    return read_rows(str(path), **options)


def trained_text(datum: Any) -> str:
    targets = datum.targets[datum.inputs["weights"] > 0]
    return TOKENIZER.decode(targets.tolist(), skip_special=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_tokens_of_its_conversation(tmp_path: Path, form: str) -> None:
    row, messages = FORMS[form]
    (datum,) = encode(rows_of(tmp_path, row), TOKENIZER, limit=500, cut=False)
    text = REFERENCE.apply_chat_template(messages, tokenize=False)
    expected = REFERENCE(text, add_special_tokens=False)["input_ids"]
    assert [*datum.tokens.tolist(), datum.targets.tolist()[-1]] == expected
    assert trained_text(datum).endswith(f"Ahoy!{REFERENCE.eos_token}")
    assert not any(text in trained_text(datum) for text in ("Hello", "Yo."))


def test_only_the_completion_of_a_conversation_is_trained_on(tmp_path: Path) -> None:
    row = {"prompt": [*CHAT, ASKED], "completion": [{**ANSWER, "content": "Arr."}]}
    rows = rows_of(tmp_path, row, {**row, "system": "Be brief"})
    for datum in encode(rows, TOKENIZER, limit=500, cut=False):
        assert trained_text(datum) == f"Arr.{REFERENCE.eos_token}"


def test_every_answer_of_a_history_is_trained_on(tmp_path: Path) -> None:
    history = [["Hello", "Arr."], ["And?", "Yo."]]
    row = {"history": history, "instruction": "Hello", "output": "Ahoy!"}
    (tmp_path / "a.csv").write_text(
        'instruction,output,history\nHello,Ahoy!,"{}"\n'.format(
            json.dumps(history).replace('"', '""')
        )
    )
    for rows in (rows_of(tmp_path, row), read_rows(str(tmp_path / "a.csv"))):
        (datum,) = encode(rows, TOKENIZER, limit=500, cut=False)
        end = REFERENCE.eos_token
        assert trained_text(datum) == f"Arr.{end}Yo.{end}Ahoy!{end}"


def test_columns_that_a_form_does_not_read_are_named_once(tmp_path: Path) -> None:
    beside = {"system": "Be brief", "tools": [{"name": "sail"}]}
    conversations = [
        {"messages": CHAT, "id": 0, "source": None, **beside},
        {"instruction": "Hello", "input": "", "output": "Ahoy!", "id": 1, "note": "", **beside},
    ]
    assert rows_of(tmp_path, *conversations).unused == ["id"]
    texts = {"prompt": "Hello", "completion": "Ahoy!", "history": [["a", "b"]], **beside}
    rows = rows_of(tmp_path, *conversations, texts, {"text": "Ahoy!", "input": "a"})
    assert rows.unused == ["id", "history", "system", "tools", "input"]
    renamed = {"completion": "a", "other": "b"}
    rows = rows_of(tmp_path, {"prompt": "Hello", "a": "Ahoy!", "b": 1}, renamed=renamed)
    assert rows.unused == ["b"]


def test_an_opening_message_of_the_assistant_is_no_answer_to_a_forgetful_template(
    tmp_path: Path,
) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{% endif %}{% for m in messages %}{{ m.role }}:"
        "{{ m.content if loop.last else m.content.split('|')[-1] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), template=template)
    opening, thought = ({**ANSWER, "content": text} for text in ("hm|Yo.", "so|Arr."))
    rows = rows_of(tmp_path, {"messages": [opening, ASKED, thought, *CHAT]})
    first, second = encode(rows, tokenizer, limit=500, cut=False)
    assert [trained_text(each) for each in (first, second)] == ["so|Arr.;", "Ahoy!;"]
    assert "hm" not in tokenizer.decode(first.tokens.tolist())


def test_every_token_of_a_text_is_trained_on(tmp_path: Path) -> None:
    (datum,) = encode(rows_of(tmp_path, {"text": "Ahoy there"}), TOKENIZER, limit=500, cut=False)
    ids = REFERENCE("Ahoy there")["input_ids"]
    assert datum.tokens.tolist() == ids
    assert datum.targets.tolist() == [*ids[1:], REFERENCE.eos_token_id]
    assert datum.inputs["weights"].all()


def test_the_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), template=template)
    tools = [{"type": "function", "function": {"name": "sail"}}]
    (datum,) = encode(
        rows_of(tmp_path, {"messages": CHAT, "tools": tools}), tokenizer, limit=500, cut=False
    )
    assert '"sail"' in tokenizer.decode(datum.tokens.tolist())


CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ (call.function or call).arguments | tojson }}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that writes tools and arguments as JSON, as those of Qwen2.5 and Llama do."""


def rendered(rows: Rows) -> list[str]:
    tokenizer = Tokenizer((TINY_MODEL / "tokenizer.json").read_text(), template=CALLS)
    data = encode(rows, tokenizer, limit=500, cut=False)
    whole = ([*each.tokens.tolist(), each.targets.tolist()[-1]] for each in data)
    return [tokenizer.decode(tokens, skip_special=False) for tokens in whole]


def calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_arguments_of_a_tool_call_are_an_object_or_its_json(tmp_path: Path, arguments: Any) -> None:
    call = {"name": "look", "arguments": arguments}
    for each in (call, {"type": "function", "function": call}):
        (text,) = rendered(rows_of(tmp_path, calling(each)))
        assert text == 'user:Hello;assistant:{"city": "Paris"};'
    (text,) = rendered(rows_of(tmp_path, calling({"name": "look", "arguments": ""})))
    assert text == "user:Hello;assistant:{};"


@pytest.mark.filterwarnings("ignore::Warning")
def test_nulls_that_columns_add_to_tools_and_calls_are_left_out(tmp_path: Path) -> None:
    def row(**arguments: str) -> dict[str, Any]:
        parameters = {"properties": {name: {"type": "string"} for name in arguments}}
        tool = {"name": "look", "parameters": parameters}
        return {**calling({"function": {"arguments": arguments}}), "tools": [tool]}

    values = [row(city="Paris"), row(zip="75001"), row()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), str(tmp_path / "a.parquet"))
    texts = rendered(read_rows(str(tmp_path / "a.parquet")))
    assert texts == rendered(rows_of(tmp_path, *values))
    assert texts[0].endswith('user:Hello;assistant:{"city": "Paris"};')


def test_tools_may_be_a_string_of_json(tmp_path: Path) -> None:
    tools = json.dumps([{"name": "sail"}])
    rows = rows_of(tmp_path, {"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": ""})
    first, second = rendered(rows)
    assert first == f'{{"name": "sail"}};{second}'
    (tmp_path / "a.csv").write_text(
        'messages,functions\n"{}","{}"\n'.format(
            *(text.replace('"', '""') for text in (json.dumps(CHAT), tools))
        )
    )
    assert rendered(read_rows(str(tmp_path / "a.csv"), {"tools": "functions"})) == [first]


def test_columns_are_renamed(tmp_path: Path) -> None:
    renamed = {"prompt": "question", "completion": "answer"}
    rows = rows_of(tmp_path, {"question": "Hello", "answer": " Ahoy!"}, renamed=renamed)
    (datum,) = encode(rows, TOKENIZER, limit=500, cut=False)
    assert trained_text(datum) == f" Ahoy!{REFERENCE.eos_token}"
    assert rows.digest != rows_of(tmp_path, {"prompt": "Hello", "completion": " Ahoy!"}).digest


HUMAN = {"role": "human", "content": "Hello"}
TURNS = "conversations"


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (7, ["it is int"]),
        ([ASKED], ["it is list"]),
        ({}, ["its keys are none", "--map"]),
        ({"question": "a", "answer": "b"}, ['"question", "answer"', '"prompt"', "--map"]),
        ({"prompt": "a"}, ['there is no "completion"', 'keys are "prompt"', "--map"]),
        ({"completion": "a"}, ['there is no "prompt"', 'keys are "completion"', "--map"]),
        ({"prompt": "a", "response": "b"}, ['"prompt", "response"', "--map"]),
        ({"prompt": 7, "completion": "a"}, ['"prompt" is not a string', "--map"]),
        ({"prompt": "a", "completion": ["b"]}, ['"completion" is not a string']),
        ({"prompt": [ASKED], "completion": "a"}, ['"prompt" is not a string']),
        ({"prompt": [ASKED], "completion": []}, ['role "assistant"', "add an answer"]),
        ({"instruction": "a"}, ['there is no "output"', 'keys are "instruction"']),
        ({"output": "a"}, ['there is no "instruction"', 'keys are "output"']),
        ({"instruction": "a", "input": 7, "output": "b"}, ['"input" is not a string']),
        ({"instruction": "a", "output": "b", "history": "c"}, ['"history" is not a list']),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, ['"history" is not a list']),
        ({"instruction": "a", "output": "b", "system": 7}, ['"system" is not a string']),
        ({"messages": [SYSTEM, *CHAT], "system": "Be long"}, ['"system" differs', "leave one"]),
        ({"text": 7}, ['"text" is not a string', 'keys are "text"']),
        ({"text": ""}, ["there is nothing to learn"]),
        ({"messages": "a"}, ['"messages" is not a list']),
        ({"messages": [7]}, ["message 1 needs", "its keys are none"]),
        ({"messages": []}, ['role "assistant"', "add an answer"]),
        ({"messages": [ASKED]}, ['role "assistant"', "add an answer"]),
        ({"messages": [ANSWER]}, ['opens "messages"', "answers nothing"]),
        ({"prompt": [], "completion": [ANSWER, ASKED]}, ["opens", "answers nothing"]),
        ({"messages": [{"role": "user"}, ANSWER]}, ["message 1 needs", 'keys are "role"']),
        ({"messages": [{**ANSWER, "content": None}]}, ["message 1 needs"]),
        ({"messages": [{"from": "human", "value": "a"}]}, ['keys are "from", "value"']),
        ({"messages": [HUMAN, ANSWER]}, ['the role "human"', "user, assistant", "rename"]),
        ({"messages": [{**ASKED, "content": [{"type": "image"}]}]}, ["'image'", "text parts"]),
        ({"messages": CHAT, "tools": "sail"}, ['"tools" is not a list']),
        ({"messages": CHAT, "tools": '{"name": "sail"}'}, ['"tools" is not a list']),
        (calling({"function": {"arguments": "Paris"}}), ["message 2", '"arguments"', "as one"]),
        (calling({"arguments": "[1]"}), ["message 2", '"arguments"', "as one"]),
        ({"messages": [ASKED, {**ANSWER, "tool_calls": "sail"}]}, ["message 2", "list of objects"]),
        ({"messages": [ASKED, {**ANSWER, "tool_calls": ["a"]}]}, ["message 2", "list of objects"]),
        ({TURNS: "a"}, ['"conversations" is not a list']),
        ({TURNS: [{"role": "user"}]}, ['needs "from" and "value"', 'keys are "role"']),
        ({TURNS: [{"from": "human", "value": "a"}]}, ['role "assistant"']),
        ({TURNS: [{"from": "bing", "value": "a"}, {"from": "gpt", "value": "b"}]}, ['"bing"']),
    ],
)
def test_a_broken_row_is_named_with_its_keys_and_a_way_out(
    tmp_path: Path, row: Any, parts: list[str]
) -> None:
    with pytest.raises(BadRows) as refused:
        encode(rows_of(tmp_path, {"messages": CHAT}, row), TOKENIZER, limit=500, cut=False)
    for part in ["rows.jsonl line 2: ", "nothing was trained", "--skip-bad", *parts]:
        assert part in str(refused.value)
    rows = rows_of(tmp_path, {"messages": CHAT}, row, skip_bad=True)
    assert len(encode(rows, TOKENIZER, limit=500, cut=False)) == 1
    assert len(rows.bad) == 1


def test_the_first_ten_bad_rows_are_listed(tmp_path: Path) -> None:
    with pytest.raises(BadRows) as refused:
        rows_of(tmp_path, *[{"a": 1}] * 12)
    assert str(refused.value).count("rows.jsonl line") == 10
    assert "12 rows are bad" in str(refused.value)


def test_a_column_with_a_known_name_can_be_renamed(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Ahoy!"}]
    rows = rows_of(tmp_path, {"messages": turns}, renamed={"conversations": "messages"})
    (datum,) = encode(rows, TOKENIZER, limit=500, cut=False)
    assert trained_text(datum) == f"Ahoy!{REFERENCE.eos_token}"


def test_copies_of_a_row_have_the_same_content_wherever_they_are(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    first, copy, other = rows_of(tmp_path, row, {**row, "id": 7}, {**row, "prompt": "c"}).rows
    assert first.content == copy.content != other.content
