"""The runs and checkpoints that a user names: by id, a prefix of it, a name, or ``last``."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

import tuneserve_client as sdk  # its names are imported on first use
from tuneserve_client.paths import PATH_PREFIX, split_path
from tuneserve_server.cli.output import FAILED, end

if TYPE_CHECKING:
    from tuneserve_client.wire import run_types

LAST = "last"
_RUN_ID = re.compile(r".+:train:\d+")
_SAMPLER_ID = re.compile(r".+:sample:\d+")
_SHOWN = 8


def run_name(run: "run_types.TrainingRunResponse") -> str:
    """Return the name of the run or of its client, or an empty text."""
    return run.name or (run.user_metadata or {}).get("name", "")


def run_id(client: "sdk.Client", wanted: str) -> str:
    """Return the id of the run; ends the command unless exactly one run matches."""
    if _RUN_ID.fullmatch(wanted):
        return wanted
    runs = client.runs()
    shown = (each for each in runs if (each.user_metadata or {}).get("archived") != "true")
    if wanted == LAST and (newest := next(shown, None)):
        return newest.training_run_id
    found = _runs_like(runs, wanted)
    if len(found) == 1:
        return found[0].training_run_id
    if found:
        _end_ambiguous("run", wanted, map(_described, found))
    _end_unknown("run", wanted, _words(runs), "tuneserve runs list", _place(client, runs))


def checkpoint_path(
    client: "sdk.Client", wanted: str, *, training: bool = False, newest: bool = True
) -> str:
    """Return the path of the checkpoint; ends the command unless exactly one matches.

    With ``training``, only checkpoints that training can resume from match. With ``newest``, a run
    stands for its newest checkpoint.
    """
    if _is_whole(wanted):
        return wanted
    return _found(client, wanted, [], training=training, newest=newest)


def checkpoint_or_base_model(client: "sdk.Client", wanted: str) -> str:
    """Return the checkpoint's path, or the name of a base model or id of a sampler unchanged."""
    names = [] if _is_whole(wanted) else [each.model_name for each in client.base_models()]
    if _is_whole(wanted) or wanted in names or _SAMPLER_ID.fullmatch(wanted):
        return wanted
    return _found(client, wanted, names, training=False, newest=True)


def _found(
    client: "sdk.Client", wanted: str, base_models: list[str], *, training: bool, newest: bool
) -> str:
    known = [
        each for each in client.checkpoints() if not training or each.checkpoint_type == "training"
    ]
    if wanted == LAST and known:
        return known[0].tinker_path
    runs = client.runs()
    of_runs = {each.training_run_id for each in runs if run_name(each) == wanted}
    start = wanted.removeprefix(PATH_PREFIX)
    found = [
        path
        for path in (each.tinker_path for each in known)
        if path.removeprefix(PATH_PREFIX).startswith(start)
        or split_path(path)[0] in of_runs
        or split_path(path)[2] == wanted
    ]
    is_one_run = len({split_path(path)[0] for path in found}) == 1
    if len(found) == 1 or (newest and is_one_run):
        return found[0]
    if found:
        _end_ambiguous("checkpoint", wanted, found)
    words = {*base_models, *_words(runs), *(split_path(each.tinker_path)[2] for each in known)}
    listing = "tuneserve checkpoints list"
    _end_unknown("checkpoint", wanted, words, listing, _place(client, runs))


def _is_whole(wanted: str) -> bool:
    return wanted.startswith(PATH_PREFIX) and len(wanted.split("/")) > 4


def _runs_like(
    runs: Sequence["run_types.TrainingRunResponse"], wanted: str
) -> Sequence["run_types.TrainingRunResponse"]:
    """Return the runs of this name, or else those whose id begins so."""
    named = [each for each in runs if run_name(each) == wanted]
    return named or [each for each in runs if wanted and each.training_run_id.startswith(wanted)]


def _words(runs: Iterable["run_types.TrainingRunResponse"]) -> set[str]:
    return {run_name(each) or each.training_run_id for each in runs}


def _described(run: "run_types.TrainingRunResponse") -> str:
    name = run_name(run)
    return f"{run.training_run_id} ({name})" if name else run.training_run_id


def _end_ambiguous(kind: str, wanted: str, matches: Iterable[str]) -> NoReturn:
    found = list(matches)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    end(
        f"{wanted!r} matches {len(found)} {kind}s: {', '.join(found[:_SHOWN])}{more}; give more of "
        "the id",
        FAILED,
    )


def _place(client: "sdk.Client", runs: Sequence["run_types.TrainingRunResponse"]) -> str:
    """Return the server and, if it is known, the tenant, in brackets."""
    tenant = f", your tenant is {runs[0].model_owner}" if runs else ""
    return f" ({client.base_url}{tenant})"


def _end_unknown(
    kind: str, wanted: str, words: Iterable[str], listing: str, place: str
) -> NoReturn:
    near = get_close_matches(wanted, list(words), 3, 0.5)
    hint = f"the nearest names are {', '.join(near)}" if near else f"list yours with: {listing}"
    end(f"no {kind} has the name {wanted!r} or an id that begins so{place}; {hint}", FAILED)
