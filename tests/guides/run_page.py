"""Runs one page as its reader would: ``python run_page.py PAGE``, in the reader's folder.

Python blocks share their names, shell blocks their folder, and both share exported variables. The
address on the pages stands for TUNESERVE_URL.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.guides.pages import HERE, URL, blocks, runner

_ENVIRONMENT = ".environment"


def main(page: Path) -> None:
    """Run every block that is to be run. A failure ends the process and names its line."""
    server = os.environ["TUNESERVE_URL"]
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if runner(page, block) != HERE:
            continue
        place = f"{page.name}, line {block.line}"
        print(f"--- {place}", flush=True)
        code = block.code.replace(URL, server)
        if block.language == "python":
            lines = "\n" * (block.line - 1)  # so that a traceback shows the line of the page
            exec(compile(lines + code, str(page), "exec"), names)
        else:
            _run_shell(code, place)


def _run_shell(code: str, place: str) -> None:
    script = f"set -euo pipefail\n{code}\nenv -0 > {_ENVIRONMENT}"
    if subprocess.run(["bash", "-c", script]).returncode != 0:
        sys.exit(f"{place}: a command failed:\n{code}")
    kept = Path(_ENVIRONMENT).read_text().split("\0")
    os.environ.update(line.split("=", 1) for line in kept if "=" in line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # as in test_examples.py
