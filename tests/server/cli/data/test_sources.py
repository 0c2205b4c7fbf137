"""Sources of rows: every kind of file holds the same rows."""

import json
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tuneserve_server.cli.data.sources import NoSource, check_exists, open_source
from tuneserve_server.cli.train_rows import BadRows, read_rows

ROWS = [
    {"prompt": "Hello, you", "completion": "Ahoy"},
    {"prompt": "two\nlines", "completion": "Arr"},
]


def values(data: Path, *part: str | None) -> list[object]:
    return [row.read() for row in open_source(str(data), *part).rows]


def test_json_lines_arrays_and_csv_hold_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "a.csv").write_text('prompt,completion\n"Hello, you",Ahoy\n"two\nlines",Arr\n')
    for name in ("a.jsonl", "a.json", "lines.json", "a.csv"):
        assert values(tmp_path / name) == ROWS
    assert [row.place for row in open_source(str(tmp_path / "a.jsonl")).rows] == [
        "line 1",
        "line 3",
    ]
    assert [row.place for row in open_source(str(tmp_path / "a.csv")).rows] == ["line 2", "line 4"]


@pytest.mark.filterwarnings("ignore::Warning")
def test_parquet_and_saved_datasets_hold_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(ROWS))
    made = datasets.Dataset(table, fingerprint="rows")
    pyarrow.parquet.write_table(table.table, str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "splits"))
    for name in ("a.parquet", "one", "splits"):
        assert values(tmp_path / name) == ROWS
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(NoSource, match="no split train; it has test"):
        open_source(str(tmp_path / "other"))


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Parquet files with two configurations, one with two splits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "parts").mkdir()
    for name in ("main-train", "main-test", "other-test"):
        table = pyarrow.Table.from_pylist([{"text": name}])
        pyarrow.parquet.write_table(table, str(tmp_path / "parts" / f"{name}.parquet"))
    (tmp_path / "parts" / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n"
        "  - {split: train, path: main-train.parquet}\n  - {split: test, path: main-test.parquet}\n"
        "- config_name: other\n  data_files:\n  - {split: test, path: other-test.parquet}\n"
        "---\n"
    )
    return tmp_path / "parts"


@pytest.mark.filterwarnings("ignore::Warning")
def test_a_split_and_a_configuration_of_a_dataset_can_be_named(parts: Path) -> None:
    assert values(parts, "main") == [{"text": "main-train"}]
    assert values(parts, "main", "test") == [{"text": "main-test"}]
    assert values(parts, "other", "test") == [{"text": "other-test"}]
    assert open_source(str(parts), "main").digest != open_source(str(parts), "main", "test").digest
    with pytest.raises(NoSource, match="no split train; it has test; name one with --split, or"):
        open_source(str(parts), "other")
    with pytest.raises(NoSource, match=r"(?s)main.*other.*name one with --config, or --eval-conf"):
        open_source(str(parts))
    with pytest.raises(NoSource, match=r"validation.*train.*test"):
        open_source(str(parts), "main", "validation")


@pytest.mark.filterwarnings("ignore::Warning")
def test_a_split_of_a_saved_dataset_can_be_named(tmp_path: Path) -> None:
    first, second = (
        datasets.Dataset(
            datasets.table.InMemoryTable(pyarrow.Table.from_pylist([row])), fingerprint="rows"
        )
        for row in ROWS
    )
    both = datasets.DatasetDict({"train_sft": first, "test_sft": second})
    both.save_to_disk(str(tmp_path / "both"))
    assert values(tmp_path / "both", None, "train_sft") == ROWS[:1]
    assert values(tmp_path / "both", None, "test_sft") == ROWS[1:]
    with pytest.raises(NoSource, match="no split train; it has train_sft, test_sft; name one"):
        open_source(str(tmp_path / "both"))
    with pytest.raises(NoSource, match="no split test; it has train_sft, test_sft; name one"):
        open_source(str(tmp_path / "both"), None, "test")
    with pytest.raises(BadRows, match="both split test_sft row 1: there is no"):
        read_rows(str(tmp_path / "both"), {"text": "a"}, split="test_sft")
    with pytest.raises(NoSource, match="no configurations"):
        open_source(str(tmp_path / "both"), "main", "train_sft")
    with pytest.raises(NoSource, match="is a single split"):
        open_source(str(tmp_path / "both" / "test_sft"), None, "train_sft")


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]))
    for part in (("main", None), (None, "test")):
        with pytest.raises(NoSource, match="is a file, which has no splits"):
            open_source(str(tmp_path / "a.jsonl"), *part)


def test_without_the_extra_the_error_tells_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NoSource, match=r"pip install '\.\[data\]' in a clone"):
        open_source(str(tmp_path))


def test_data_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoSource, match=r"nope.jsonl does not exist"):
        open_source(str(tmp_path / "nope.jsonl"))
    (tmp_path / "a.json").write_text("[1,")
    with pytest.raises(NoSource, match="JSON array cannot be read"):
        open_source(str(tmp_path / "a.json"))


@pytest.mark.parametrize("name", ["teknium/OpenHermes-2.5", "openai/gsm8k", "a.b/c.d-1_x"])
def test_dataset_ids_may_have_dots(name: str) -> None:
    check_exists(name)


@pytest.mark.parametrize(
    "name",
    [
        *("data/rows.jsonl", "data/rows.JSON", "data/rows.parquet", "data/rows.jsonl.gz"),
        *("./rows", "../rows", "/tmp/nope", "~/rows", "rows", "a/b/c", "data/", "a b/c"),
    ],
)
def test_a_file_that_is_missing_is_no_dataset_id(name: str) -> None:
    with pytest.raises(NoSource, match="does not exist; give a file, a directory, or a dataset id"):
        check_exists(name)


def test_a_csv_row_with_other_cells_than_the_header_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,b,c\n")
    (row,) = open_source(str(tmp_path / "a.csv")).rows
    with pytest.raises(ValueError, match="as many cells as the header"):
        row.read()


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    text = "a" * 200_000  # the csv module's own limit is 131,072 characters
    (tmp_path / "a.csv").write_text(f"text,id\n{text},1\nb\n")
    long, broken = open_source(str(tmp_path / "a.csv")).rows
    assert long.read() == {"text": text, "id": "1"}
    with pytest.raises(ValueError, match="as many cells as the header"):
        broken.read()


@pytest.mark.parametrize(("name", "between"), [("a.csv", ";"), ("a.tsv", "\t"), ("b.csv", "\t")])
def test_columns_may_have_semicolons_or_tabs_between_them(
    tmp_path: Path, name: str, between: str
) -> None:
    lines = [("prompt", "completion"), ("Hello, you", "Ahoy"), ('"two\nlines"', "Arr")]
    (tmp_path / name).write_text("".join(f"{between.join(line)}\n" for line in lines))
    assert values(tmp_path / name) == ROWS


def test_a_json_file_of_one_object_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=2))
    (row,) = open_source(str(tmp_path / "a.json")).rows
    assert (row.place, row.read()) == ("row 1", ROWS[0])
