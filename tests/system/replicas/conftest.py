"""Replicas as processes of their own on one Redis server, before a provider that counts its summary calls."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import compaction_proxy
from compaction_proxy.cli.demo.chat import DemoUsage, Envelope, Reply, encode_completion
from compaction_proxy.cli.demo.provider import (
    AGENT_MODEL,
    SUMMARY_MODEL,
    DemoClient,
    DemoProvider,
    DemoProviderSettings,
    Receive,
    Scope,
    SeenRequest,
    Send,
)
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from tests.helpers.redis_servers import RedisServer
from tests.helpers.summaries import put_as_asked

JsonObject = dict[str, Any]
ROOT = Path(compaction_proxy.__file__).parents[2]
START_LIMIT_S = 60.0
END_LIMIT_S = 60.0
WINDOW_TOKENS = 4096
# A round is due above 2,458 tokens: 80 % of the window less a quarter in reserve.
FIRST_MESSAGES = 61
MESSAGE_WORDS = 45


WORDS = ("one", "two", "three", "four", "five", "six", "seven")


class Upstream:
    """The demo provider, whose summary calls are counted, answered in words of their own, or held up.

    Attributes:
        numbered: Whether the n-th summary says that it is the n-th; else the demo's own, the same each time.
        hold: Waits for as long as a summary call with this body is to take, before anything else does.
        held_s: Seconds that the next summary calls take, in their order; later ones take none.
        summaries: How many summary calls there were.
        answered: How many of them have been answered.
    """

    def __init__(self, *, numbered: bool = False, window: int = WINDOW_TOKENS) -> None:
        counter = TiktokenCounter(lambda _: None)
        counter.warm_up()
        self.provider = DemoProvider(DemoProviderSettings(counter, window=window, log_records=10_000))
        self.numbered = numbered
        self.hold: Callable[[bytes], Awaitable[None]] | None = None
        self.held_s: list[float] = []
        self.summaries = 0
        self.answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.provider(scope, receive, send)
            return
        raw = await DemoClient(receive, send).read_body()
        if raw and json.loads(raw)["model"] == SUMMARY_MODEL:
            self.summaries += 1
            number = self.summaries
            if self.hold is not None:
                await self.hold(raw)
            await asyncio.sleep(self.held_s.pop(0) if self.held_s else 0)
            if self.numbered:
                text = (
                    f"Summary {number}. They counted from one to seven, again and again, and asked nothing."
                )
                shown = put_as_asked(text, raw.decode())
                said = encode_completion(Envelope("s", 0, SUMMARY_MODEL), Reply(shown), DemoUsage(1, 1, 0))
                await DemoClient(receive, send).send_json(200, said)
                self.answered += 1
                return
            self.answered += 1
        first = iter([{"type": "http.request", "body": raw}])

        async def replayed() -> Any:
            return next(first, None) or await receive()

        await self.provider(scope, replayed, send)

    def forwarded(self, marker: str) -> list[bytes]:
        """Bodies that reached the conversation model and hold the marker, oldest first."""
        wanted = marker.encode()
        return [seen.body for seen in self.log if wanted in seen.body]

    @property
    def log(self) -> Sequence[SeenRequest]:
        """Requests to the conversation model, oldest first."""
        return [seen for seen in self.provider.log if seen.model == AGENT_MODEL]


def message(marker: str, number: int) -> JsonObject:
    """One message of a conversation: its marker and number, and words."""
    role = ("user", "assistant")[number % 2]
    return {"role": role, "content": f"{marker} {number}. " + f"{WORDS[number % 7]} " * MESSAGE_WORDS}


def conversation(marker: str, messages: int = FIRST_MESSAGES) -> list[JsonObject]:
    """A conversation that ends with a user message; the default length is over the trigger."""
    assert messages % 2
    return [message(marker, number) for number in range(messages)]


def body(messages: Sequence[JsonObject], **more: Any) -> bytes:
    return json.dumps({"model": AGENT_MODEL, "messages": list(messages), **more}).encode()


@dataclass
class Replica:
    """A proxy process that accepts requests.

    Attributes:
        process: The process; the parent where there are workers.
        url: Where it listens.
        errors: The file that its log goes to.
        client: Speaks to it.
    """

    process: asyncio.subprocess.Process
    url: str
    errors: Path
    client: httpx.AsyncClient

    async def ask(self, content: bytes, **headers: str) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", content=content, headers=headers)

    async def store(self) -> str:
        """How the store is, as it says."""
        found: str = (await self.client.get("/readyz")).json()["store"]
        return found

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def events(self, name: str) -> list[JsonObject]:
        """Log lines of one event."""
        lines = [json.loads(line) for line in self.errors.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]


@dataclass
class Replicas:
    """Starts replicas, and ends them all."""

    folder: Path
    stack: contextlib.AsyncExitStack
    started: int = 0

    async def start(
        self,
        upstream: str,
        store: str,
        *arguments: str,
        window: int | None = WINDOW_TOKENS,
        prefix: Sequence[str] = (),
        **environ: str,
    ) -> Replica:
        """A replica that accepts requests; `prefix` is a command that becomes the one that follows it."""
        self.started += 1
        errors = self.folder / f"replica-{self.started}.log"
        models = json.dumps({"demo-*": {"window": window}}) if window else "{}"
        with errors.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *prefix, sys.executable, "-m", "compaction_proxy", "serve", "--port", "0",
                "--upstream", f"{upstream}/v1", *arguments,
                cwd=self.folder,
                env={
                    "HOME": str(self.folder),
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(ROOT),
                    "COMPACTION_PROXY__STORE__URL": store,
                    "COMPACTION_PROXY__SUMMARY__MODEL": SUMMARY_MODEL,
                    "COMPACTION_PROXY__MODELS": models,
                    **environ,
                },
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.stack.push_async_callback(_ended, process)
        url = await asyncio.wait_for(_listening(process, errors.read_text), START_LIMIT_S)
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
        client = httpx.AsyncClient(
            base_url=url,
            timeout=60,
            limits=limits,
            trust_env=False,
            headers={"authorization": "Bearer sk-test"},
        )
        await self.stack.enter_async_context(client)
        return Replica(process, url, errors, client)

    async def pair(self, upstream: str, store: str, **settings: Any) -> tuple[Replica, Replica]:
        """Two replicas that accept requests."""
        first, second = await asyncio.gather(*(self.start(upstream, store, **settings) for _ in range(2)))
        return first, second

    async def end(self, replica: Replica) -> None:
        """Tell one to end, and wait until it has."""
        replica.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(replica.process.wait(), END_LIMIT_S) == 0, replica.errors.read_text()


async def _listening(process: asyncio.subprocess.Process, log: Callable[[], str]) -> str:
    """Where a proxy says that it listens, once it has said all it has to say."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or "OPENAI_BASE_URL" not in lines[-1]:
        line = await process.stdout.readline()
        assert line, log()
        lines.append(line.decode().rstrip())
    return lines[0].rpartition(" ")[2]


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.communicate()


class Replicated:
    """What tests need, without an import between test files."""

    conversation = staticmethod(conversation)
    body = staticmethod(body)

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def note(self, text: str) -> None:
        """Say what was measured; pytest shows it with `-s`."""
        print(text)  # noqa: T201 - a test's figures are for people

    @asynccontextmanager
    async def scene(
        self, *options: str, numbered: bool = False
    ) -> AsyncIterator[tuple[Upstream, str, Replicas, RedisServer]]:
        """A provider and its URL, who starts replicas, and a Redis server with these options."""
        upstream = Upstream(numbered=numbered)
        folder = self._folders.mktemp("replicas")
        with RedisServer(folder, *options) as server:
            async with serve_embedded(upstream) as url, contextlib.AsyncExitStack() as stack:
                yield upstream, url, Replicas(folder, stack), server


@pytest.fixture(scope="session")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Replicated:
    return Replicated(tmp_path_factory)
