"""`POST …/responses/compact` where the upstream's refusal is packed, as clients allow it to be."""

import gzip
import json
from typing import Any

import pytest

PATH = "/v1/responses/compact"
BODY = json.dumps({"model": "m", "input": [{"role": "user", "content": "Go on."}]}).encode()
NO_SUCH_MODEL = gzip.compress(json.dumps({"error": {"message": "?", "code": "model_not_found"}}).encode())
NO_SUCH_PATH = gzip.compress(json.dumps({"detail": "Not Found"}).encode())


@pytest.mark.parametrize(
    ("said", "relayed"), [(NO_SUCH_MODEL, True), (NO_SUCH_PATH, False)], ids=["no such model", "no such path"]
)
async def test_a_packed_refusal_is_understood(wire: Any, said: bytes, *, relayed: bool) -> None:
    async def refused(exchange: Any) -> None:
        head = b"HTTP/1.1 404 Not Found\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
        await exchange.send(head % len(said) + said)

    async with wire.running_upstream(refused) as upstream, wire.running_proxy(upstream.port) as port:
        reply = await wire.ask(port, wire.post(PATH, BODY))
    assert (reply.status, reply.body == said) == ((404, True) if relayed else (200, False))
