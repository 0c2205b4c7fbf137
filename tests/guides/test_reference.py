"""docs/reference.md is generated from the routes, and its examples are valid bodies."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuneserve_client.wire import account_types, checkpoint_types, run_types, types
from tuneserve_server.openai import types as openai_types
from tuneserve_server.openai.messages_api import types as messages_types
from tuneserve_server.openai.responses_api import types as responses_types

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference.md").read_text()


def test_the_page_equals_the_output_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import api_reference  # type: ignore[import-not-found]

    assert api_reference.page() == PAGE, "the API has changed: run make reference"


def test_every_route_of_the_overview_is_in_the_reference() -> None:
    overview = (ROOT / "docs/api.md").read_text()
    routes = re.findall(r"^\| `(\w+ /\S+)` \|", overview, re.M)
    named = {each.replace(":path}", "}") for each in routes}
    assert set(re.findall(r"^### `(\w+ /\S+)`$", PAGE, re.M)) == named
    assert len(routes) == len(named) > 40


def examples() -> Iterator[tuple[str, Any]]:
    """The name of the body's type, and the JSON body of the example request."""
    for section in PAGE.split("\n### ")[1:]:
        named = re.search(r"^Body: `(\w+)`\.$", section, re.M)
        sent = re.search(r"^```http\n.*?\n\n(.*?)\n```$", section, re.M | re.S)
        if named and sent:
            yield named[1], json.loads(sent[1])


@pytest.mark.parametrize(("name", "body"), list(examples()))
def test_every_example_is_a_valid_body_of_its_route(name: str, body: Any) -> None:
    modules = (
        *(types, run_types, account_types, checkpoint_types),
        *(openai_types, messages_types, responses_types),
    )
    known = next(vars(module)[name] for module in modules if name in vars(module))
    assert known.model_validate(body).model_fields_set == body.keys()


def test_every_link_on_the_page_leads_to_a_heading() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
