"""Log lines for machines: one JSON object each, with the subject of the line and nothing else."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tuneserve_engine.core.jobs import Job, JobKind
from tuneserve_engine.telemetry import logs

BODY = b"what the client wrote"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The JSON output of a logger of this test."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.JsonLines("worker"))
    logger = logging.getLogger("of_a_test")
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_names_its_time_level_process_logger_and_message(stream: io.StringIO) -> None:
    logging.getLogger("of_a_test").warning("two\nlines of %s", "text")
    (line,) = lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "process": "worker",
        "logger": "of_a_test",
        "message": "two\nlines of text",
    }


def test_a_line_about_a_job_has_its_ids_but_not_its_body(stream: io.StringIO) -> None:
    job = Job("alice", JobKind.OPTIM_STEP, "m", 1, BODY, model_id="m", request_id="r")
    logging.getLogger("of_a_test").error("failed", extra={**logs.job_fields(job), "secret": "s"})
    (line,) = lines(stream)
    assert [line[name] for name in ("request_id", "tenant", "model_id")] == ["r", "alice", "m"]
    assert "secret" not in line and BODY.decode() not in stream.getvalue()


def test_an_exception_is_one_field(stream: io.StringIO) -> None:
    try:
        raise ValueError("too\nlong")
    except ValueError:
        logging.getLogger("of_a_test").exception("failed")
    (line,) = lines(stream)
    assert (
        line["exception"].startswith("Traceback") and "ValueError: too\nlong" in line["exception"]
    )


def test_noted_fields_are_in_every_line_until_other_work_starts(stream: io.StringIO) -> None:
    logger = logging.getLogger("of_a_test")
    logs.begin()
    logs.add_fields(tenant="alice", model_id=None)
    logger.warning("one")
    logs.begin()
    logger.warning("two")
    assert [line.get("tenant", "nobody") for line in lines(stream)] == ["alice", "nobody"]
    assert not any("model_id" in line for line in lines(stream))
