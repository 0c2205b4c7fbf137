"""The preview counts rows and tokens, and marks the part of a row that is trained on."""

import io
import json
from pathlib import Path

from rich.console import Console

from tuneserve_client.wire.tokenizer import Tokenizer
from tuneserve_engine.settings.common import TINY_MODEL
from tuneserve_server.cli.train_preview import Preview
from tuneserve_server.cli.train_rows import encode, read_rows

TOKENIZER = Tokenizer.from_folder(TINY_MODEL)


def test_the_preview_counts_and_marks(tmp_path: Path) -> None:
    same = {"prompt": "The sky is", "completion": " blue."}
    values = [same, same, {"prompt": "Hm", "completion": ""}, {"a": 1}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, values)))
    rows = read_rows(str(path), skip_bad=True)
    datums = encode(rows, TOKENIZER, limit=100, cut=False)
    preview = Preview.from_data(rows, datums, TOKENIZER, steps=5)
    assert (preview.rows, preview.skipped, preview.duplicates, preview.empty_answers) == (
        3,
        1,
        1,
        1,
    )
    out = io.StringIO()
    preview.show(Console(file=out, width=200), as_json=False)
    end = TOKENIZER.decode([TOKENIZER.eos_token_id or 0], skip_special=False)
    assert f"The sky is« blue.{end}»" in out.getvalue()
    assert "5 steps" in out.getvalue() and "duplicate rows: 1" in out.getvalue()
    coloured = io.StringIO()
    preview.show(
        Console(file=coloured, force_terminal=True, color_system="standard"), as_json=False
    )
    assert "\x1b[32m blue." in coloured.getvalue()


def test_the_preview_names_columns_that_are_not_used(tmp_path: Path) -> None:
    row = {"prompt": "The sky is", "completion": " blue."}
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({**row, f"other{n}": n}) for n in range(12))
    )
    rows = read_rows(str(tmp_path / "rows.jsonl"))
    datums = encode(rows, TOKENIZER, limit=100, cut=False)
    preview = Preview.from_data(rows, datums, TOKENIZER, steps=5)
    assert preview.unused_columns == [f"other{n}" for n in range(12)]
    out = io.StringIO()
    preview.show(Console(file=out, width=80), as_json=False)
    assert out.getvalue().count("columns not used: other0, other1, ") == 1
    assert "other8, other9 and 2 more\n" in out.getvalue()


def test_the_preview_counts_the_rows_that_are_cut(tmp_path: Path) -> None:
    long, short = ({"prompt": "The sky is", "completion": " blue" * n} for n in (50, 1))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [long, short, long])))
    rows = read_rows(str(tmp_path / "rows.jsonl"))
    datums = encode(rows, TOKENIZER, limit=20, cut=True)
    preview = Preview.from_data(rows, datums, TOKENIZER, steps=5)
    assert (preview.rows, preview.cut, preview.longest) == (3, 2, 20)
    out = io.StringIO()
    preview.show(Console(file=out, width=80), as_json=False)
    assert "rows cut by --max-tokens: 2\n" in out.getvalue()
