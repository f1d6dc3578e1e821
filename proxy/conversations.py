"""The totals of each conversation: gathered in the process, written now and then, in no request's way."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from proxy.core.keys import conversation_key
from proxy.dialects.usage import Usage
from proxy.guard import contained
from proxy.logs import CONVERSATIONS_NOT_WRITTEN
from proxy.storage.records import Records

FLUSH_S = 1.0
# Conversations whose totals may wait to be written; beyond it the newest are not gathered.
MAX_WAITING = 10_000

_log = structlog.get_logger()


@dataclass(slots=True)
class Totals:
    """What a conversation has used; added to in place, because each request adds.

    Attributes:
        model: The model that was asked last; empty if it was not read.
        requests: Requests relayed.
        request_bytes: Bytes of their bodies, as the client sent them.
        prompt_tokens: Input tokens that the upstream reported.
        completion_tokens: Output tokens that it reported.
        cached_tokens: Input tokens that it had cached.
        last_at: Seconds since the epoch of the last request.
    """

    model: str = ""
    requests: int = 0
    request_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    last_at: float = 0.0


class Conversations:
    """Gathers totals and keeps them in the store.

    Args:
        records: Where they are kept.
        ttl_s: Seconds that they are kept after the last request.
        now: Seconds since the epoch.
    """

    def __init__(self, records: Records, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._ttl_s = ttl_s
        self._now = now
        self._waiting: dict[str, Totals] = {}
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        records.forgetters.append(self._forget)

    def note(
        self, tenant: str, conversation: str, model: str, request_bytes: int, usage: Usage | None
    ) -> None:
        """Add one request to the totals of its conversation, unless it was forgotten since it began."""
        key = conversation_key(tenant, conversation)
        if self._records.outdated.covers(key):
            return
        totals = self._waiting.get(key)
        if totals is None:
            if len(self._waiting) >= MAX_WAITING:
                return
            totals = self._waiting[key] = Totals()
        totals.model = model or totals.model
        totals.requests += 1
        totals.request_bytes += request_bytes
        totals.last_at = self._now()
        if usage is not None:
            totals.prompt_tokens += usage.prompt_tokens
            totals.completion_tokens += usage.completion_tokens
            totals.cached_tokens += usage.cached_tokens

    def start(self) -> None:
        """Begin to write in the background."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what waits, and end."""
        if self._task is not None:
            async with self._writing:  # what is being written is written to its end
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Write what waits."""
        async with self._writing:
            for key in list(self._waiting):
                if not self._records.in_use:
                    return  # the rest waits until the store is back
                with self._records.outdated.beginning():
                    await self._write(key)

    async def _write(self, key: str) -> None:
        [held] = await self._records.find([key], fresh=True)
        if self._records.outdated.covers(key):  # what was held of it is gone; what has come since waits
            return
        gathered = self._waiting.pop(key, None)
        if gathered is not None:
            await self._records.keep(key, _sum(held or {}, gathered), ttl_s=self._ttl_s)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._waiting if key.startswith(prefix)]:
            del self._waiting[key]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contained(_not_written):
                await self.flush()


def _sum(held: object, gathered: Totals) -> dict[str, object]:
    known = held if isinstance(held, dict) else {}

    def plus(name: str) -> int:
        before = known.get(name)
        return (before if isinstance(before, int) else 0) + int(getattr(gathered, name))

    counts = ("requests", "request_bytes", "prompt_tokens", "completion_tokens", "cached_tokens")
    model = gathered.model or known.get("model", "")
    return {**{name: plus(name) for name in counts}, "model": model, "last_at": gathered.last_at}


def _not_written(error: BaseException) -> None:
    _log.warning(CONVERSATIONS_NOT_WRITTEN, error=type(error).__name__)
