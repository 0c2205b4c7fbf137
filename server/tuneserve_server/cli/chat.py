"""``tuneserve chat``: a conversation with a base model or any checkpoint."""

import sys
from typing import Annotated

import typer

from tuneserve_engine.core.errors import REFUSED
from tuneserve_server.cli.options import HERE, PATIENT_S, ApiKey, AsJson, Url, What, connected
from tuneserve_server.cli.output import end
from tuneserve_server.cli.resolve import checkpoint_or_base_model


def chat(  # noqa: PLR0913 - options
    what: What = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Send this prompt, print the answer and exit.", metavar="TEXT"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 gives the likeliest answer.")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the samples, for reproducible answers.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the base model's answer beside each answer.")
    ] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a checkpoint or a base model. Without a terminal, each input line is a turn."""
    from tuneserve_server.cli import chat_view  # a wrong argument is refused before
    from tuneserve_server.cli.conversation import ChatOptions, Conversation

    options = ChatOptions(temperature, max_tokens, seed, system)
    with connected(url, api_key, deadline_s=PATIENT_S, name="chat") as client:
        chosen = None if what is None else checkpoint_or_base_model(client, what)
        talks = [Conversation(client.sampler(chosen), options)]
        if compare and not talks[0].sampler.path:
            end(f"--compare needs a checkpoint, and {talks[0].name} is a base model", REFUSED)
        if compare:
            talks.append(Conversation(client.sampler(talks[0].sampler.base_model), options))
        is_live = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        if prompt is None and is_live:
            chat_view.converse(talks)
            return
        prompts = chat_view.lines_of_stdin() if prompt is None else iter([prompt])
        chat_view.run_prompts(prompts, talks, as_json=as_json)
