"""Put the documentation site into the wheel, if `make docs` has built it."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DocumentationHook(BuildHookInterface):  # type: ignore[type-arg]
    """Include docs/_build/html as a folder of the server's package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder; an editable install finds it in the repository."""
        site = Path(self.root, "docs/_build/html")
        if version != "editable" and (site / "index.html").is_file():
            build_data["force_include"][str(site)] = "tuneserve_server/site"
