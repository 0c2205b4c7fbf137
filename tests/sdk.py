"""The official SDK, as tests with real clients use it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import tinker

_CLOSE_S = 30


@contextmanager
def service_client(url: str, api_key: str) -> Iterator[tinker.ServiceClient]:
    """A client whose session is finished in the end.

    In place of the client's own ``with``, which waits for its heartbeat (0.38.0): where that is
    cancelled just as its answer arrives, it goes on, and the wait is for ever. The session has been
    finished by then, which is looked at.
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
