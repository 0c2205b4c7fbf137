"""Check that no product file is longer than 400 lines, and no function's body longer than 60.

    python -m scripts.check_sizes

A file or a function beyond its limit usually holds two ideas. ``EXCEPTIONS`` names those that hold
one, each with its reason.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "clients/tuneserve_client",
    "engine/tuneserve_engine",
    "server/tuneserve_server",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
EXCEPTIONS = {
    "clients/tuneserve_client/wire/types.py": "a list: every body of the API, with descriptions",
    "server/tuneserve_server/settings.py": "a list: every setting of the API, with descriptions",
    "engine/tuneserve_engine/store/base.py": "a seam: the queue and the store, with docstrings",
    "engine/tuneserve_engine/store/sqlite/store.py": "the methods of that seam, an operation each",
    "engine/tuneserve_engine/store/redis/store.py": "the methods of that seam, a script each",
}


def violations(file: Path, name: str) -> Iterator[str]:
    text = file.read_text()
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES and name not in EXCEPTIONS:
        yield f"{name}: {lines} lines, the limit is {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0], node.body[-1]
            assert last.end_lineno is not None
            length = last.end_lineno - first.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{name}:{node.name}" not in EXCEPTIONS:
                yield f"{name}:{node.name}: {length} lines, the limit is {MAX_FUNCTION_LINES}"


def main() -> int:
    found = [
        violation
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if not file.name.endswith("_pb2.py")
        for violation in violations(file, file.relative_to(ROOT).as_posix())
    ]
    print("\n".join([*found, f"{len(found)} too long, {len(EXCEPTIONS)} named exceptions"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
