"""Rows from JSONL, JSON arrays, CSV, Parquet and Hugging Face datasets, each with its place."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_JSON_COLUMNS = ("messages", "conversations")
_FILE_SUFFIXES = frozenset(
    ".arrow .bz2 .csv .gz .json .jsonl .ndjson .parquet .tar .tsv .txt .xlsx .xz .zip .zst".split()
)
"""The ends of names that are those of a file that is missing, not of a dataset's id."""
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_CONFIG = "--config, or --eval-config for held-out rows"
_SPLIT = "--split, or --eval-split for held-out rows"
_ONE_A_LINE = "write each row as one JSON object, on a line of its own"


class NoSource(Exception):
    """Data that cannot be opened at all."""


@dataclass(frozen=True)
class RawRow:
    """A row before its form is known."""

    place: str
    """The line or the number of the row, as in ``line 3``."""
    read: Callable[[], Any]
    """Return the row's value. Raises ``ValueError`` if the row cannot be read."""


@dataclass(frozen=True)
class RowSource:
    name: str
    digest: str
    """The digest of the content, by which a resumed run recognizes its data."""
    rows: list[RawRow]


def open_source(data: str, config: str | None = None, split: str | None = None) -> RowSource:
    """Return the rows of a file, a directory or a dataset id.

    ``config`` and ``split`` name a configuration and a split of a dataset. By default, a dataset
    has one configuration, and the split is ``train``. Raises ``NoSource`` and ``OSError``.
    """
    path = Path(data)
    if path.is_file() and (config or split):
        raise NoSource(
            f"{data} is a file, which has no splits and no configurations; name none, or give a "
            "dataset"
        )
    if path.is_file() and path.suffix.lower() != ".parquet":
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        try:
            return RowSource(data, digest, list(_rows_in(path.suffix.lower(), content)))
        except NoSource as error:
            raise NoSource(f"{data}: {error}") from None
    check_exists(data)
    values = _dataset(data, path, config, split)
    text = json.dumps(values, default=str, sort_keys=True)
    rows = [_parsed(f"row {n}", _without_nulls(value)) for n, value in enumerate(values, 1)]
    return RowSource(data, hashlib.sha256(text.encode()).hexdigest()[:16], rows)


def check_exists(data: str) -> None:
    """Raise ``NoSource`` if the data is neither a path that exists nor like a dataset id."""
    path = Path(data)
    is_file_name = path.suffix.lower() in _FILE_SUFFIXES
    if not path.exists() and (is_file_name or not _ID.fullmatch(data)):
        raise NoSource(
            f"{data} does not exist; give a file, a directory, or a dataset id such as owner/name"
        )


def _rows_in(suffix: str, content: bytes) -> Iterator[RawRow]:
    if suffix in (".csv", ".tsv"):
        yield from _csv(content)
    elif suffix == ".json" and content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        try:
            values = _json(content, "correct the array")
        except ValueError as error:
            raise NoSource(f"the JSON array cannot be read: {error}") from None
        for number, value in enumerate(values, 1):
            yield _parsed(f"row {number}", value)
    elif suffix == ".json" and (value := _whole(content)) is not None:
        yield _parsed("row 1", value)
    else:
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield RawRow(f"line {number}", lambda line=line: _json(line))  # type: ignore[misc]


def _whole(content: bytes) -> Any:
    """Return the only JSON value of a file, or None."""
    try:
        return _json(content)
    except ValueError:
        return None


def _parsed(place: str, value: Any) -> RawRow:
    return RawRow(place, lambda: value)


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls inside its columns.

    Columns have a null for each key that an object lacks and that one of another row has.
    """
    return {name: _kept(value) for name, value in row.items()}


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items() if each is not None}
    return [_kept(each) for each in value] if isinstance(value, list) else value


def _json(text: bytes, way_out: str = _ONE_A_LINE) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8; save the file as UTF-8") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}; {way_out}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _csv(content: bytes) -> Iterator[RawRow]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise NoSource("the CSV file is not UTF-8; save it as UTF-8") from None
    header = text.partition("\n")[0]
    between = next((each for each in ",;\t" if each in header), ",")
    csv.field_size_limit(max(len(text), csv.field_size_limit()))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=between)
    try:
        for value in reader:
            yield RawRow(f"line {reader.line_num}", lambda value=value: _csv_row(value))  # type: ignore[misc]
    except csv.Error as error:
        raise NoSource(f"line {reader.line_num} of the CSV file: {error}") from None


def _csv_row(value: dict[str | None, Any]) -> dict[str | None, Any]:
    if None in value or None in value.values():
        names = [name for name in value if name is not None]
        cells = sum(each is not None for each in value.values()) - (None in value)
        keys = ", ".join(f'"{name}"' for name in names)
        raise ValueError(
            f"it has {cells + len(value.get(None, ()))} cells, and not as many cells as the header "
            f"has keys; its keys are {keys}; quote cells that have commas or line breaks"
        )
    for name in _JSON_COLUMNS:
        if value.get(name):
            value = {**value, name: _json(value[name].encode(), f'write "{name}" as JSON')}
    return value


def _dataset(data: str, path: Path, config: str | None, split: str | None) -> list[Any]:
    try:
        import datasets
        import pyarrow.parquet
    except ImportError:
        raise NoSource(
            f"{data} needs the package datasets; run pip install '.[data]' in a clone of "
            "tuneserve's repository"
        ) from None
    is_saved = any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json"))
    if is_saved and config:
        raise NoSource(f"{data} is a saved dataset, which has no configurations; name none")
    try:
        if path.is_file():
            return list(pyarrow.parquet.read_table(data).to_pylist())
        if is_saved:
            found = datasets.load_from_disk(data)
        else:
            found = datasets.load_dataset(data, config, split=split)
    except Exception as error:  # the package raises errors of many libraries
        way_out = f"; name one with {_CONFIG}" if "Config name is missing" in str(error) else ""
        raise NoSource(f"cannot read the dataset {data}: {error}{way_out}") from None
    if isinstance(found, dict):
        name = split or "train"
        if name not in found:
            raise NoSource(
                f"{data} has no split {name}; it has {', '.join(map(str, found))}; name one with "
                f"{_SPLIT}"
            )
        found = found[name]
    elif is_saved and split not in (None, str(found.split)):
        raise NoSource(f"{data} is a single split; name none, or give the folder of all splits")
    return list(found)
