"""A machine on which somebody follows the pages: a proxy before the demo provider, and an empty folder."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from pydantic import SecretStr

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import SUMMARY_MODEL, DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import (
    CompactionSection,
    ModelSection,
    ServerSection,
    StoreSection,
    SummarySection,
    UpstreamSection,
)
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import CharacterCounter
from tests.docs.pretended import PROGRAMS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEY = "sk-docs"
ADMIN_KEY = "admin-docs"
MODEL = "gpt-5.4-mini"
# A conversation long enough for a round.
TOLD = [
    {"role": role, "content": f"{text} {number}. " + "More was said than anybody needs to know. " * 20}
    for number in range(12)
    for role, text in (("user", "What about port"), ("assistant", "It is port"))
]
ASKED = {"model": MODEL, "messages": [*TOLD, {"role": "user", "content": "Go on."}]}


@dataclass(frozen=True)
class Machine:
    """Where pages are followed.

    Attributes:
        address: Host and port of the proxy.
        provider: Of the provider behind it.
        environ: What a shell gets to see.
        headers: Of an answer that a round was made for.
    """

    address: str
    provider: str
    environ: dict[str, str]
    headers: httpx.Headers

    @property
    def conversation(self) -> str:
        return self.headers["x-compaction-session"]

    def here(self, text: str) -> str:
        """A block of a page, about this machine's proxy, provider and conversation."""
        named = {
            "127.0.0.1:4141": self.address,
            "127.0.0.1:8000": self.provider,
            "c_0123…": self.conversation,
        }
        for shown, real in named.items():
            text = text.replace(shown, real)
        return text


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[str, str]]:
    """The URLs of a proxy and of the provider behind it."""
    provider = DemoProvider(
        DemoProviderSettings(CharacterCounter(), window=8192, models=(MODEL, SUMMARY_MODEL))
    )
    async with serve_embedded(provider) as direct:
        config = Config(
            server=ServerSection(port=0, secret=SecretStr("docs"), admin_key=SecretStr(ADMIN_KEY)),
            upstream=UpstreamSection(base_url=f"{direct}/v1"),
            store=StoreSection(url="memory://"),
            summary=SummarySection(model=SUMMARY_MODEL),
            compaction=CompactionSection(counter="characters"),
            models={"*": ModelSection(window=8192)},
        )
        async with serve_embedded(create_app(config)) as root:
            yield root, direct


def programs(folder: Path) -> None:
    """Put into a folder what a shell finds: ours as it is, and stand-ins for what a test must not call."""
    folder.mkdir()
    lines = {"python": f'exec {sys.executable} "$@"'}
    lines |= {name: f'exec python {HERE}/pretended.py {name} "$@"' for name in PROGRAMS}
    # What several pages show in the same words is run for the first of them.
    lines["compaction-proxy"] = (
        'case "$1" in doctor|run|savings) done="$HOME/$(echo "$*" | tr -c a-z0-9 _)";; *) done=;; esac\n'
        f'test -n "$done" && test -e "$done" || python {HERE}/command_line.py "$@" || exit\n'
        'test -z "$done" || touch "$done"'
    )
    # The stream has no end: its beginning is enough, and then curl's exit code is 28.
    curl = shutil.which("curl")
    lines["curl"] = (
        f'case "$*" in *events/stream*) {curl} -sSf --max-time 1 "$@" || test $? = 28;;\n'
        f'*) exec {curl} -sS --fail-with-body --max-time 20 "$@";; esac'
    )
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    programs(folder / "bin")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running()) as (root, direct):
        answer = httpx.post(
            f"{root}/v1/chat/completions", json=ASKED, trust_env=False, timeout=20,
            headers={"authorization": f"Bearer {KEY}", "x-session-id": "docs", "x-compaction": "force"},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        address = root.removeprefix("http://")
        environ = {
            "PATH": f"{folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OPENAI_API_KEY": KEY,
            "KEY": ADMIN_KEY,
            "COMPACTION_PROXY__SERVER__PORT": address.rpartition(":")[2],
            "COMPACTION_PROXY__SERVER__ADMIN_KEY": ADMIN_KEY,
            "COMPACTION_PROXY__UPSTREAM__BASE_URL": f"{direct}/v1",
            "COMPACTION_PROXY__SUMMARY__MODEL": SUMMARY_MODEL,
            "COMPACTION_PROXY__COMPACTION__COUNTER": "characters",
            "COMPACTION_PROXY__STORE__URL": f"sqlite:///{folder}/state.db",
        }
        yield Machine(address, direct.removeprefix("http://"), environ, answer.headers)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what the pages take for granted: an agent, and a conversation."""
    (tmp_path / "agent.py").write_text("import os\nprint(os.environ['OPENAI_BASE_URL'])\n")
    for name in ("talk.json", "turn.json"):
        (tmp_path / name).write_text(json.dumps(ASKED))
    return tmp_path
