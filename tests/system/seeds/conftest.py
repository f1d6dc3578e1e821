"""The whole proxy on a socket, before a provider that the test speaks for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.storage.store import Store
from tests.system.seeds.stage import MODEL, JsonObject, Place, Placed, Provider


@pytest.fixture
def placed(proxied: Any) -> Placed:
    """Runs the proxy with a strategy; sections of the configuration may be given."""

    @asynccontextmanager
    async def running(
        strategy: str,
        *,
        window: int | None = None,
        store: Store | None = None,
        compaction: JsonObject | None = None,
        **sections: Any,
    ) -> AsyncIterator[Place]:
        provider = Provider()
        settings = {"models": {MODEL: {"window": window}}} if window else {}
        made = {"compaction": {"strategy": strategy, **(compaction or {})}, **settings, **sections}
        async with serve_embedded(provider) as url, proxied(url, store=store, **made) as client:
            yield Place(client, provider)

    return running
