"""The commonest way to put something before a provider: FastAPI in front, httpx behind, nothing between.

In its favour, it parses nothing, keeps one pooled client without a limit, and relays the answer as it comes.

    python bench/plain_relay.py UPSTREAM        prints the URL it listens on, and serves until it is ended
"""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

_NOT_SENT_ON = frozenset({"host", "content-length", "connection"})
_NOT_SENT_BACK = frozenset({"transfer-encoding", "connection"})


def create_app(upstream: str) -> FastAPI:
    """A relay to `upstream`, a URL without a path."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=upstream, timeout=600, limits=limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def relay(request: Request) -> StreamingResponse:
        sent = client.build_request(
            "POST",
            httpx.URL("/v1/chat/completions", query=request.url.query.encode()),
            headers=[(key, held) for key, held in request.headers.items() if key not in _NOT_SENT_ON],
            content=await request.body(),
        )
        answer = await client.send(sent, stream=True)
        kept = {key: held for key, held in answer.headers.items() if key not in _NOT_SENT_BACK}
        ended = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=ended)

    return app


if __name__ == "__main__":
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(
        create_app(sys.argv[1]), loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
    uvicorn.Server(settings).run([bound])
