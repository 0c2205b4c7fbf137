"""A folder of files: those in the documented forms train as they are, and broken ones say why not.

``tests/data/forms/good`` and ``broken`` have the files; the test writes the Parquet file itself.
"""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from tests import quick_service
from tuneserve_server.cli import main as cli
from tuneserve_server.cli.local_server import LocalServer

FORMS = Path(__file__).parents[1] / "data" / "forms"
GOOD = sorted(path.name for path in (FORMS / "good").iterdir())

LEARNT = {
    "alpaca.csv": (2, "Green."),
    "alpaca.json": (2, "Green."),
    "content-parts.jsonl": (1, "Arr, brown!"),
    "messages.csv": (2, "Arr, green!"),
    "messages.jsonl": (2, "Arr, green!"),
    "prompt-completion.jsonl": (2, " blue."),
    "semicolons.csv": (2, " blue, mostly."),
    "sharegpt.json": (2, "Ahoy!"),
    "texts.jsonl": (2, "sky is blue."),
    "tool-calls.jsonl": (1, "Arr, brown!"),
    "trl-conversational.jsonl": (2, "Arr, green!"),
    "rows.parquet": (2, " blue."),
}
"""The number of rows of each file, and a text that its first row teaches."""

BROKEN = {
    "completion-empty.jsonl": ('are "prompt", "completion"', "add an answer"),
    "completion-messages.jsonl": ('are "prompt", "completion"', "--map prompt="),
    "conversations-without-gpt.jsonl": ('are "conversations"', "add an answer"),
    "from-value-messages.jsonl": ('are "from", "value"', "--map conversations=messages"),
    "image.jsonl": ('are "messages"', "leave it out"),
    "input-number.jsonl": ('are "instruction", "input", "output"', "--map prompt="),
    "list.jsonl": ("it is list", "it must be an object with"),
    "messages-text.jsonl": ('are "messages"', "it must be a list of messages"),
    "no-answer.jsonl": ('are "messages"', "add an answer"),
    "no-comma.json": ("line 3 column 3", "correct the array"),
    "no-completion.jsonl": ('are "prompt"', "--map prompt="),
    "no-content.jsonl": ('are "role"', "correct the message"),
    "no-instruction.jsonl": ('are "input", "output"', "--map prompt="),
    "no-keys.jsonl": ("its keys are none", "it must be an object with"),
    "no-output.jsonl": ('are "instruction", "input"', "--map prompt="),
    "no-prompt.jsonl": ('are "completion"', "--map prompt="),
    "not-json.jsonl": ("it is not JSON: Expecting ',' delimiter", "one JSON object"),
    "not-utf8.jsonl": ("it is not UTF-8", "save the file as UTF-8"),
    "number.jsonl": ("it is int", "it must be an object with"),
    "prompt-number.jsonl": ('are "prompt", "completion"', "--map prompt="),
    "question-answer.jsonl": ('are "question", "answer"', "--map prompt=question"),
    "response.jsonl": ('are "prompt", "response"', "--map prompt="),
    "text-empty.jsonl": ('are "text"', "add a text"),
    "text-instead-of-object.jsonl": ("it is str", "it must be an object with"),
    "text-list.jsonl": ('are "text"', "--map prompt="),
    "too-many-cells.csv": ('are "prompt", "completion"', "quote cells"),
    "tools-text.jsonl": ('are "tools", "messages"', "make it a list of tools"),
    "turn-without-value.jsonl": ('are "from"', "add the missing one"),
    "unknown-role.jsonl": ('are "messages"', "rename the role"),
    "wrapped.json": ('are "train"', "it must be an object with"),
}
"""The words about each file: what was found, which are the keys if there are any, and a way out."""

PLACES = {"no-comma.json": "the JSON array", "wrapped.json": "row 1"}
"""The places of faults that are not in line 3."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LocalServer(tmp_path_factory.mktemp("service"), **quick_service.QUICK) as running:
        yield running


@pytest.fixture
def dry_run(server, tmp_path_factory, monkeypatch):
    """A dry run of a file, as a command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))

    def run(path):
        return CliRunner().invoke(
            cli.app, ["train", str(path), "--dry-run", "--json", "--url", server.url]
        )

    return run


@pytest.fixture
def good(tmp_path):
    """The folder of files in the documented forms."""
    for name in GOOD:
        (tmp_path / name).symlink_to(FORMS / "good" / name)
    rows = [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "A", "completion": " b"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(tmp_path / "rows.parquet"))
    return tmp_path


def test_the_folder_has_twelve_good_files_and_thirty_broken_ones(good):
    assert sorted(path.name for path in good.iterdir()) == sorted(LEARNT)
    assert sorted(path.name for path in (FORMS / "broken").iterdir()) == sorted(BROKEN)
    assert (len(LEARNT), len(BROKEN)) == (12, 30)


@pytest.mark.parametrize("name", LEARNT)
def test_a_file_in_a_documented_form_trains_without_editing(dry_run, good, name):
    ran = dry_run(good / name)
    assert ran.exit_code == 0, ran.output
    shown = json.loads(ran.stdout)
    rows, text = LEARNT[name]
    assert (shown["rows"], shown["skipped"]) == (rows, 0)
    assert any(text in part["text"] for part in shown["example"] if part["trained"])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_line_the_keys_and_a_way_out(dry_run, name):
    path = FORMS / "broken" / name
    ran = dry_run(path)
    assert ran.exit_code in (1, 2), ran.output
    (said,) = ran.stderr.splitlines()
    place = PLACES.get(name, "line 3")
    assert said.startswith(f"tuneserve: {path}") and place in said
    for words in BROKEN[name]:
        assert words in said


def test_each_bad_row_is_named_on_a_line_of_its_own(dry_run, tmp_path):
    said = [("user", "Hello"), ("a\nb", ""), ("assistant", "Ahoy!")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 12)
    ran = dry_run(path)
    assert ran.exit_code == 1
    *lines, last = ran.stderr.splitlines()
    assert [line.removeprefix("tuneserve: ").partition(": ")[0] for line in lines] == [
        f"{path} line {number}" for number in range(1, 11)
    ]
    assert last.startswith("12 rows are bad and nothing was trained")
