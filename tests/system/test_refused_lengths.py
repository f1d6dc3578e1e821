"""A prompt that is refused as too long, with its count: what goes on in its place, and what stays whole."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.system.black_box import Provider, Received, Reply, chat_reply, run_proxy

PATH = "/v1/chat/completions"
SENTENCE = (
    "The worker reads the next job from the queue, and then writes its result into the table of reports. "
)
LINE = "for k in jobs: q.put((k.id, k.n+1)); t[k]=f(k, v)\n"


def prose(tokens: int) -> str:
    """English of so many tokens as the provider counts them, four bytes each."""
    return (SENTENCE * (4 * tokens // len(SENTENCE) + 1))[: 4 * tokens]


def code(tokens: int) -> str:
    """Code of so many tokens as the provider counts them; tokenizers count somewhat more."""
    return (LINE * (4 * tokens // len(LINE) + 1))[: 4 * tokens]


def count_tokens(body: Any) -> int:
    """A token for four bytes of roles, texts and calls, and one for three bytes of tools."""
    counted = (
        (each["role"], each.get("content") or "", each.get("tool_calls") or "") for each in body["messages"]
    )
    return len(json.dumps(list(counted))) // 4 + len(json.dumps(body.get("tools", ""))) // 3


def refuse(window: int, used: int) -> Reply:
    words = f"This model's maximum context length is {window} tokens. However, your messages resulted in "
    error = {"message": f"{words}{used} tokens.", "type": "invalid_request_error"}
    return Reply(400, json.dumps({"error": {**error, "code": "context_length_exceeded"}}).encode())


@contextmanager
def limited(folder: Path, window: int) -> Iterator[tuple[Provider, httpx.Client]]:
    """A provider with this window, and a client that reaches it through the proxy."""

    def answer(request: Received) -> Reply:
        if request.method == "GET":
            return Reply(404)
        used = count_tokens(request.json())
        return refuse(window, used) if used > window else chat_reply(request)

    provider = Provider(answer)
    try:
        with (
            run_proxy(folder, provider.url, {"summary": {"model": "none"}}) as proxy,
            proxy.client() as client,
        ):
            yield provider, client
    finally:
        provider.close()


def received(provider: Provider) -> list[Any]:
    """The chat requests so far, oldest first."""
    return [request.json() for request in provider.received if request.method == "POST"]


def call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": "read", "arguments": json.dumps({"path": arguments})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def test_a_small_new_result_is_cut_where_all_else_must_stay(tmp_path: Path) -> None:
    read = f"<it begins> {prose(130)} <it ends>"
    messages = [
        {"role": "system", "content": prose(1_600)},
        {"role": "user", "content": prose(750)},
        call("c1", "report.txt"),
        result("c1", read),
    ]
    body = {"model": "m", "messages": messages}
    with limited(tmp_path, count_tokens(body) - 30) as (provider, client):
        reply = client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        *whole, cut = received(provider)[-1]["messages"]
    assert whole == messages[:-1]
    assert (cut["content"][:11], cut["content"][-9:]) == ("<it begins>", "<it ends>")


def conversation(task: str, said: Callable[[int], str]) -> dict[str, Any]:
    """A request with this task, a few short turns of what `said` gives, and tools that take most of it."""
    messages = [{"role": "system", "content": prose(100)}, {"role": "user", "content": task}]
    for _ in range(8):
        messages += [{"role": "assistant", "content": said(25)}, {"role": "user", "content": said(12)}]
    names = {f"k{k}": {"type": "x"} for k in range(400)}
    tool = {"name": "read", "description": "Reads.", "parameters": names}
    return {"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}


def without_turns(body: dict[str, Any]) -> dict[str, Any]:
    """The same with the system prompt, the task and the latest message only."""
    first, task, *_, latest = body["messages"]
    return {**body, "messages": [first, task, latest]}


def test_the_task_stays_whole_where_the_turns_behind_it_make_enough_room(tmp_path: Path) -> None:
    body = conversation(prose(60), prose)
    window = int(1.025 * count_tokens(without_turns(body)))
    with limited(tmp_path, window) as (provider, client):
        reply = client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        forwarded = received(provider)[-1]["messages"]
    assert body["messages"][1] in forwarded


def test_a_task_that_is_refused_whole_is_sent_with_head_and_tail(tmp_path: Path) -> None:
    body = conversation(f"<it begins> {prose(200)} <it ends>", code)
    window = count_tokens(without_turns(body)) - 5
    with limited(tmp_path, window) as (provider, client):
        reply = client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        lists = [each["messages"] for each in received(provider)]
    assert [body["messages"][1] in each for each in lists] == [True, True, False]
    task = lists[-1][1]["content"]
    assert (task[:11], task[-9:]) == ("<it begins>", "<it ends>")
