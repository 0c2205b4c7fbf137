"""The documentation site, built from the Markdown pages by `make docs`."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "tuneserve"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tuneserve"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
nitpicky = True
# The HTTP examples leave out the version, and the lexer expects it.
suppress_warnings = ["misc.highlighting_failure"]
# Only links between Python names: annotations name modules that the site does not describe.
nitpick_ignore_regex = [("py:.*", ".*")]

_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+|[^)#\s:]+/)(?:#[^)\s]*)?\)")


def replace_links_to_code(app: Sphinx, page: str, source: list[str]) -> None:
    """Write a link that leaves docs/ as the path in the repository, which the site does not hold.

    Raises ExtensionError if that path does not exist.
    """
    folder = (DOCS / page).parent

    def as_path(link: re.Match[str]) -> str:
        text, target = link[1], (folder / link[2]).resolve()
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise ExtensionError(f"docs/{page}.md: {link[2]} does not exist")
        if target.suffix in {".png", ".svg"} and target.is_relative_to(DOCS):
            return link[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if target.name.rstrip("/") in text else f"{text} ({path})"

    source[0] = _LINK.sub(as_path, source[0])


def setup(app: Sphinx) -> None:
    """Register the replacement of links."""
    app.connect("source-read", replace_links_to_code)
