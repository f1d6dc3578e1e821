"""Sessions of real agents: 80 requests in two tasks, before a strict provider with a small window.

`make test-agents AGENTS=codex,aider WINDOWS=24k` runs a part; `AGENTS` takes names of clients or `all`.
"""

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.system.agents.clients import CLIENTS, Client, Place, Task, install_client, run_client
from tests.system.agents.judge import Session, Verdict, judge_session
from tests.system.agents.provider import AgentProvider, Counting, fill_workspace, write_task
from tests.system.agents.recorder import run_recorder
from tests.system.agents.results import record_verdict
from tests.system.black_box import run_proxy

pytestmark = pytest.mark.timeout(2_400)  # only catches a hang

WINDOWS = {"24k": 24_000, "40k": 40_000, "128k": 128_000}


def _list_chosen(variable: str, known: list[str]) -> list[str]:
    """The names that a variable of the environment lists; all where it lists none."""
    listed = [name for name in os.environ.get(variable, "").split(",") if name and name != "all"]
    unknown = set(listed) - set(known)
    assert not unknown, f"{variable}: {sorted(unknown)} is not one of {known}"
    return listed or known


def _list_clients() -> list[Client]:
    names = _list_chosen("AGENTS", [*(each.name for each in CLIENTS), *(each.id for each in CLIENTS)])
    return [each for each in CLIENTS if each.name in names or each.id in names]


@pytest.mark.parametrize("counting", _list_chosen("COUNTINGS", [*get_args(Counting)]))
@pytest.mark.parametrize("source", _list_chosen("SOURCES", ["told", "learned"]))
@pytest.mark.parametrize("window", _list_chosen("WINDOWS", [*WINDOWS]))
@pytest.mark.parametrize("client", _list_clients(), ids=lambda client: client.id)
def test_an_agent_works_on_two_tasks_and_notices_nothing(
    client: Client,
    window: str,
    source: str,
    counting: Counting,
    tmp_path: Path,
) -> None:
    session = run_session(client, WINDOWS[window], counting, is_told=source == "told", folder=tmp_path)
    verdict = judge_session(session)
    cell = f"{window} {source} {counting}"
    record_verdict(client.name, client.wire, client.version, cell, verdict)
    if verdict.violations:
        keep_bodies(session, tmp_path)
        (tmp_path / "violations.json").write_text(json.dumps(verdict.violations, indent=1))
    assert verdict.violations == {}, describe_verdict(verdict, tmp_path)


def run_session(client: Client, window: int, counting: Counting, *, is_told: bool, folder: Path) -> Session:
    """Run a client's two tasks through a proxy of their own, and record them."""
    commands = install_client(client)
    for name in ("home", "workspace", "proxy"):
        (folder / name).mkdir()
    fill_workspace(folder / "workspace", client.instructions_file)
    provider = AgentProvider(
        client.tools, folder / "workspace", window, counting, client.is_step, client.plan
    )
    config: dict[str, Any] = {"store": {"url": f"sqlite:///{folder}/proxy/store.db"}}
    if is_told:
        config["models"] = {"*": {"window": window}}
    try:
        with (
            run_proxy(folder / "proxy", f"{provider.url}/v1", config) as proxy,
            run_recorder(proxy.url) as recorder,
        ):
            provider.exchanges = recorder.exchanges
            place = Place(recorder.url, folder / "home", folder / "workspace", commands)
            client.configure(place)
            ended = []
            for number in range(2):
                provider.begin_task(number)
                ended.append(run_client(client, place, Task(write_task(number + 1), is_resumed=number > 0)))
            with proxy.client() as http:
                conversations = http.get("/admin/v1/conversations").json()["conversations"]
            return Session(
                client,
                window,
                counting,
                tuple(recorder.exchanges),
                tuple(provider.forwarded),
                tuple(ended),
                conversations,
                provider.steps,
                {(folder / "workspace" / "state.txt").read_text().strip(), provider.state},
            )
    finally:
        provider.close()


def keep_bodies(session: Session, folder: Path) -> None:
    """Write all bodies of a session beside its other files, for whoever looks into a violation."""
    bodies = folder / "bodies"
    bodies.mkdir()
    for exchange in session.exchanges:
        (bodies / f"{exchange.number:03}-client.json").write_bytes(exchange.body)
        headers = {"path": exchange.path, "status": exchange.status, **exchange.answer_headers}
        (bodies / f"{exchange.number:03}-answer.json").write_text(json.dumps(headers, indent=1))
    for k, each in enumerate(session.forwarded):
        name = "proxy" if each.exchange is None else f"{each.exchange:03}"
        refused = "-refused" if each.is_too_long else ""
        (bodies / f"{name}-forwarded-{k:03}-{each.kind}{refused}.json").write_bytes(each.body)
    for number, ended in enumerate(session.ended, 1):
        (bodies / f"output-{number}.txt").write_text(ended.output)


def describe_verdict(verdict: Verdict, folder: Path) -> str:
    """The violations in a few lines, and where the bodies are."""
    lines = [f"{verdict.figures}", f"bodies: {folder / 'bodies'}"]
    for rule, found in verdict.violations.items():
        lines += [f"{rule}: {len(found)}", *(f"    {each}" for each in found[:3])]
    return "\n".join(lines)
