"""Each search of what was removed is counted by who asked: people, the model, agents, auto-recall."""

import re
from typing import Any

import httpx
import pytest

FACT = "the caretaker keeps the spare key under the blue flowerpot"
FILLER = "The sun went down behind the hills and the shepherds drove their flocks home. " * 12
FOUND, NOTHING = "Where does the caretaker keep the spare key?", "zyzzyva quokka"
LINE = re.compile(r'compaction_recall_searches_total\{outcome="(\w+)",source="(\w+)"\} (\S+)')
Counts = dict[tuple[str, str], float]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, auto-recall waits for its search."""
    monkeypatch.setattr("compaction_proxy.compaction.auto_recall.DEADLINE_S", 10.0)


async def counted(client: httpx.AsyncClient) -> Counts:
    text = (await client.get("/metrics")).text
    return {(source, outcome): float(value) for outcome, source, value in LINE.findall(text)}


def conversation(question: str) -> list[dict[str, Any]]:
    told = [{"role": "system", "content": "You help."}]
    for number in range(30):
        said = FACT if number == 2 else "nothing of note"
        told += [
            {"role": "user", "content": f"Read page {number}."},
            {"role": "assistant", "content": f"{FILLER}{said}. {FILLER}"},
        ]
    return [*told, {"role": "user", "content": question}]


async def by_people(client: httpx.AsyncClient, _: Any, name: str, query: str) -> None:
    answer = await client.get(f"/admin/v1/conversations/{name}/search", params={"q": query})
    assert answer.status_code == 200


async def by_agents(client: httpx.AsyncClient, stack: Any, _: str, query: str) -> None:
    called = {"name": "memory_search", "arguments": {"query": query}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": called}
    fields = {**stack.fields, "accept": "application/json"}
    assert (await client.post("/mcp", json=call, headers=fields)).status_code == 200


async def test_each_search_counts_for_whoever_asked_and_by_whether_there_was_anything(
    stack: Any, s: Any
) -> None:
    stack.script(s.said("Yes."))
    first = await stack.post(model="inject", messages=conversation("Go on."))
    name = first.headers["x-compaction-session"]
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as client:
        for source, ask in (("api", by_people), ("mcp", by_agents)):
            before = await counted(client)
            for query in (FOUND, FOUND, NOTHING):
                await ask(client, stack, name, query)
            assert since(before, await counted(client)) == {(source, "found"): 2, (source, "nothing"): 1}


@pytest.mark.parametrize(("query", "outcome"), [(FOUND, "found"), (NOTHING, "nothing")])
async def test_searches_of_the_model_and_for_it_count_too(
    stack: Any, s: Any, query: str, outcome: str
) -> None:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as client:
        before = await counted(client)
        stack.script(s.said("", s.recall(1, f'{{"query":"{query}"}}')), s.said("I see."))
        await stack.post(model="inject", messages=conversation(query))
        then = await counted(client)
        assert since(before, then) == {("model", outcome): 1}
        stack.script(s.said("I see."))
        for _ in range(2):  # chosen once a turn
            await stack.post(model="reminded", messages=conversation(query))
        assert since(then, await counted(client)) == {("auto", outcome): 1}


def since(before: Counts, now: Counts) -> Counts:
    """What was counted between two looks."""
    more = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: value for name, value in more.items() if value}
