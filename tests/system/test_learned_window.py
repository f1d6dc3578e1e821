"""What the proxy learns about a window from counts: no more than they show, and not for ever."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.system.black_box import Provider, Received, Reply, chat_reply, run_proxy
from tests.system.test_output_reserve import prose

PATH = "/v1/chat/completions"
# A row about messages has every request read, however small.
READ_ALL = {"compaction": {"trigger": [{"percent": 75}, {"messages": 100_000}]}, "summary": {"model": "none"}}


@contextmanager
def session(folder: Path, provider: Provider) -> Iterator[httpx.Client]:
    try:
        with run_proxy(folder, provider.url, READ_ALL) as proxy, proxy.client() as client:
            yield client
    finally:
        provider.close()


def ask(client: httpx.Client, *texts: str, **headers: str) -> httpx.Response:
    """Ask with a list of user messages."""
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    reply = client.post(PATH, json={"model": "some-model", "messages": messages}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def forwarded(provider: Provider) -> list[str]:
    """Texts of the messages that the provider was sent last."""
    last = [each for each in provider.received if each.method == "POST"][-1]
    return [each["content"] for each in last.json()["messages"]]


def answer(request: Received, window: int = 10**9, *, refuses: bool = False) -> Reply:
    """Counts four bytes as a token; over the window it refuses, or cuts in silence."""
    if request.method == "GET":
        return Reply(404)
    used = len(request.body) // 4
    if used > window and refuses:
        words = f"This model's maximum context length is {window} tokens. However, "
        words += f"your messages resulted in {used} tokens."
        error = {"message": words, "type": "invalid_request_error", "code": "context_length_exceeded"}
        return Reply(400, json.dumps({"error": error}).encode())
    reply = chat_reply(request)
    body = json.loads(reply.body)
    # An answer out of a cache would repeat both numbers.
    body["usage"] |= {"prompt_tokens": min(used, window), "completion_tokens": used % 97 + 1}
    return Reply(body=json.dumps(body).encode())


def test_one_odd_count_is_not_taken_for_the_window(tmp_path: Path) -> None:
    provider = Provider(answer)
    texts = [prose(4_000, f"part-{number}") for number in range(5)]
    with session(tmp_path, provider) as client:
        for number in range(4):
            ask(client, prose(1_500, f"first-{number}"))
        ask(client, "z" * 9_000)
        reply = ask(client, *texts)
    assert forwarded(provider) == texts
    assert reply.headers["x-compaction-context-limit"] == "128000"


def test_counts_that_stand_still_show_where_an_upstream_cuts_in_silence(tmp_path: Path) -> None:
    provider = Provider(lambda request: answer(request, 4_096))
    texts: list[str] = []
    with session(tmp_path, provider) as client:
        for number in range(20):
            texts.append(prose(500, f"part-{number}"))
            reply = ask(client, *texts)
        assert forwarded(provider) != texts
    assert reply.headers["x-compaction-context-limit"] == "4096"
    assert sum(map(len, forwarded(provider))) // 4 <= 4_096


def test_a_learned_window_rises_at_once_when_a_larger_request_is_accepted(tmp_path: Path) -> None:
    provider = Provider(lambda request: answer(request, 8_000, refuses=True))
    texts = [prose(1_000, f"part-{number}") for number in range(12)]
    with session(tmp_path, provider) as client:
        assert ask(client, *texts).headers["x-compaction-context-limit"] == "8000"
        provider.answer = answer
        ask(client, *texts, **{"x-compaction": "shadow"})  # goes on as it is, and is accepted
        reply = ask(client, *(f"Another one. {text}" for text in texts))
    assert reply.headers["x-compaction-context-limit"] == "128000"
    assert len(forwarded(provider)) == len(texts)
