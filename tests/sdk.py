"""Helpers for tests that use the official SDK."""

import gc
import json
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

_CLOSE_S = 30


@contextmanager
def service_client(url: str, api_key: str) -> Iterator[tinker.ServiceClient]:
    """A client whose session is finished at the end of the block.

    This replaces the client's own ``with``, which waits for its heartbeat (0.38.0). If the
    heartbeat is cancelled just as its answer arrives, it continues and the wait never ends. The
    session has been finished by then, and this function checks it.
    """
    client = tinker.ServiceClient(base_url=url, api_key=api_key)
    try:
        yield client
    except BaseException:
        client.close("errored")
        raise
    session_id = client.holder.get_session_id()
    try:
        client.close("success").result(timeout=_CLOSE_S)
    except TimeoutError:
        _check_ended(url, api_key, session_id)


def _check_ended(url: str, api_key: str, session_id: str) -> None:
    request = urllib.request.Request(
        f"{url}/api/v1/session_heartbeat",
        json.dumps({"session_id": session_id}).encode(),
        {"X-API-Key": api_key, "Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=_CLOSE_S).close()
    except urllib.error.HTTPError as error:
        assert error.code == 410, error
    else:
        raise AssertionError(f"session {session_id} was not finished by close()")


def close_clients() -> None:
    """Close every client that tests have left open, unpickled ones and ``RestClient``s too.

    Otherwise each client would keep calling its server, which has stopped or belongs to another
    test by then. The garbage collector would close its sockets during some later test, and that
    test would fail.
    """
    for each in gc.get_objects():
        if type(each) is InternalClientHolder:
            each.run_coroutine_threadsafe(each.aclose()).result(timeout=_CLOSE_S)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    gc.freeze()  # otherwise every module would take seconds to look through all that is left
