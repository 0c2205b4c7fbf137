"""The log lines of a process: text for people, or one JSON object each for machines.

A line has fields (``FIELDS``) beside its message: from ``extra``, which ``of`` makes for a job, and
from ``note`` calls since ``begin``. No field ever holds a body or a key.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from tuneserve_engine.core.jobs import Job
from tuneserve_engine.settings.common import CommonSettings

FIELDS = (
    "request_id",
    "request_ids",
    "tenant",
    "tenants",
    "model_id",
    "batch_id",
    "method",
    "route",
    "status",
    "duration_ms",
    "trace_id",
)
"""The fields of a line, in this order."""

_about: ContextVar[dict[str, Any] | None] = ContextVar("about", default=None)


def start(process: str, settings: CommonSettings) -> None:
    """Set up logging to stderr for this process, as its settings say."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(process)
        if settings.log_format == "json"
        else logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s")
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    if settings.log_format == "json":  # make log lines of Python's own warnings and tracebacks too
        logging.captureWarnings(True)
        sys.excepthook = _uncaught


def last_word(process: str, error: Exception) -> None:
    """Report why this process ends: as a log line if it logs in JSON, else as plain text."""
    if is_json():
        logging.getLogger(__name__).error("%s", error)
    else:
        print(f"tuneserve {process}: {error}", file=sys.stderr)


def is_json() -> bool:
    """Return whether this process logs in JSON."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("uncaught", exc_info=(kind, error, trace))


def begin() -> None:
    """Clear the noted fields, for this task and the tasks that it starts from now on."""
    _about.set({})


def add_fields(**fields: str | None) -> None:
    """Add fields to the lines that follow; a no-op before ``begin``."""
    noted = _about.get()
    if noted is not None:
        noted |= {name: value for name, value in fields.items() if value is not None}


def noted_fields() -> dict[str, Any]:
    """Return the fields noted since ``begin``."""
    return dict(_about.get() or {})


def job_fields(job: Job) -> dict[str, Any]:
    """Return the ``extra`` of a line about a job."""
    fields = {"request_id": job.request_id, "tenant": job.tenant}
    return fields if job.model_id is None else fields | {"model_id": job.model_id}


class JsonLines(logging.Formatter):
    """A formatter that writes each record as one line of JSON, with a traceback as a field."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = {**noted_fields(), **vars(record)}
        line |= {name: known[name] for name in FIELDS if name in known}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
