"""The engines that the contract is run on, on both event loops. Another one joins by a line in `ENGINES`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.types import HttpEngine, HttpRequest, HttpResponse
from tests.helpers.certificates import self_signed
from tests.helpers.virtual_time import VirtualTimeLoop

ENGINES: dict[str, Callable[..., HttpEngine]] = {"native": NativeEngine}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., HttpEngine]]:
    """Makes engines, and closes them."""
    made: list[HttpEngine] = []

    def make(**options: Any) -> HttpEngine:
        made.append(ENGINES[request.param](**options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.fixture
def runslow(request: pytest.FixtureRequest) -> bool:
    """Whether the numbers are those of a release, not those of every day."""
    return bool(request.config.getoption("--runslow"))


def asked(port: int, body: Any = b"{}", method: str = "POST", **fields: Any) -> HttpRequest:
    """A request to this machine; `fields` of `HttpRequest` beat what is usual here."""
    made = HttpRequest(method, f"http://127.0.0.1:{port}", b"/x", [], body, None, 30.0, 30.0)
    return made._replace(**fields)


async def collected(response: HttpResponse) -> bytes:
    """The whole body."""
    body = b""
    try:
        while chunk := await response.read():
            body += chunk
    finally:
        await response.aclose()
    return body


@pytest.fixture
def ask() -> Callable[..., HttpRequest]:
    return asked


@pytest.fixture
def whole() -> Callable[[HttpResponse], Any]:
    return collected


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost and its key, in one file."""
    file = tmp_path_factory.mktemp("tls") / "localhost.pem"
    file.write_bytes(b"".join(self_signed()))
    return file
