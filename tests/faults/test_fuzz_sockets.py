"""Broken HTTP over real sockets: each connection is answered below 500 or ended, in time."""

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.mutations import CANARY, mutated_json, mutated_message
from tests.faults.processes import running_service

pytestmark = pytest.mark.anyio

CONNECTIONS = 400
AT_ONCE = 100
HEADERS = "Host: localhost\r\nX-API-Key: tml-a\r\nContent-Type: application/json\r\n"
POST = f"POST /api/v1/optim_step HTTP/1.1\r\n{HEADERS}"
BODY = json.dumps({"model_id": CANARY, "seq_id": 1, "adam_params": {"learning_rate": 0.1}})
POSTED = f"{POST}Content-Length: {len(BODY)}\r\n\r\n{BODY}"
CHUNKED = f"{POST}Transfer-Encoding: chunked\r\n\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
GET = f"GET /api/v1/training_runs?limit=3 HTTP/1.1\r\n{HEADERS}\r\n"
WHOLE = [
    *(POSTED, CHUNKED, GET, GET * 5, POSTED + CHUNKED + GET),
    f"{POST}Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}",
]
HOSTILE = [
    f"{POST}Content-Length: -1\r\n\r\n",
    f"{POST}Content-Length: 99999999999999999999\r\n\r\n",
    f"{POST}Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    f"{POST}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    f"{POST}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
    f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    f"{POST}Content-Encoding: zstd\r\nContent-Length: 4\r\n\r\n\x28\xb5\x2f\xfd",
    "GET http://other/api/v1/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /api/v1/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n\r\n",
    "GET /api/v1/files/%2e%2e%2f/%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /api/v1/sessions/%ff%00%ed%a0%80 HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n\r\n",
    "GET /\u00e9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\n\r\n",
    "GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET /api/v1/healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "GET /api/v1/healthz\r\n",
    "HEAD /api/v1/healthz HTTP/1.0\r\n\r\n",
    "BREW /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    f"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-\x00{CANARY}\r\n\r\n",
    "GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n folded\r\n\r\n",
    "GET /api/v1/sessions HTTP/1.1\r\nHost : x\r\nX-API-Key: tml-\u00ff\r\n\r\n",
    f"POST /api/v1/create_session HTTP/1.1\r\n{HEADERS}X-Idempotency-Key: \u00ff\x7f\r\n"
    "Content-Length: 2\r\n\r\n{}",
    "\r\n" * 100,
    "\0" * 100,
    "",
]


def hostile(rng: random.Random, number: int) -> bytes:
    """The bytes that the connection of this number sends."""
    if number < len(HOSTILE):
        return HOSTILE[number].encode("latin-1")
    if number % 2:  # the head is whole, the body is not
        body = mutated_json(rng, json.loads(BODY))[:50_000]
        return f"{POST}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return mutated_message(rng, rng.choice(WHOLE).encode(), 0)


async def exchanged(port: int, sent: bytes) -> bytes:
    """All bytes that the server sends before it ends the connection or falls silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(1.5):
            while piece := await reader.read(65_536):
                received += piece
    except (TimeoutError, ConnectionResetError):
        pass  # a kept-alive connection, or one that ended with unread bytes
    finally:
        writer.close()
    return received


def statuses(received: bytes, sent: bytes) -> list[int]:
    """The status of each answer, whose shape is checked."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            continue
        found.append(status)
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        assert length, head
        body, received = received[: int(length[1])], received[int(length[1]) :]
        if status != 200 and not sent.startswith(b"HEAD"):
            assert set(json.loads(body)) == {"detail", "code"}, (sent[:500], head, body)
    return found


async def test_broken_http_is_refused_or_disconnected(tmp_path: Path) -> None:
    rng = random.Random(14)
    seen: Counter[int] = Counter()
    with running_service(tmp_path, header_timeout_s=0.3, body_timeout_s=0.3) as service:

        async def send(number: int) -> None:
            sent = hostile(rng, number)
            for status in statuses(await exchanged(service.port, sent), sent) or [0]:
                assert status < 500, sent
                seen[status] += 1

        for start in range(0, CONNECTIONS, AT_ONCE):
            await asyncio.gather(*map(send, range(start, start + AT_ONCE)))
        assert service.health() == "ready"
    print(f"\n{CONNECTIONS} connections: {dict(seen)}")
    assert seen[422] > 20
    assert seen[400] > 20
    assert seen[408] > 3
