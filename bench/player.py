"""Plays recorded conversations through the installed command, as a process, and reads what it forwards.

`COMPACTION_PROXY=/other/venv/bin/compaction-proxy` plays them through another version.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for helpers of the tests

import httpx
from frontier_lists import Forwarded, JsonObject

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
MODEL, SUMMARY_MODEL = "gpt-4o", "summary"
READER_WINDOW = 16_384
READER_LIMIT_S = 900.0
VAGUE = "The user and the assistant went through everyday matters of the project and agreed on them."


def read_rows(folder: Path) -> list[JsonObject]:
    """The conversations of all files of a folder, each id once."""
    lines = (line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines())
    rows = (json.loads(line) for line in lines)
    return list({row["id"]: row for row in rows}.values())


class Player:
    """Plays conversations through a proxy and returns what was forwarded.

    Args:
        proxy: A running proxy before `provider`.
        provider: Answers it.
        summary: What writes summaries.
    """

    def __init__(self, proxy: Proxy, provider: Provider, client: httpx.Client, summary: str) -> None:
        self._proxy = proxy
        self._provider = provider
        self._client = client
        self._summary = summary
        self._said: list[str] = []
        self._counted = 0, 0
        provider.answer = self._answer

    def _answer(self, request: Received) -> Reply:
        body = request.json() if request.body else {}
        if body.get("model") != SUMMARY_MODEL:
            return chat_reply(request)
        asked = "\n".join(str(each.get("content")) for each in body["messages"])
        return chat_reply(request, self._write(re.findall(r"^### .+$", asked, re.MULTILINE)))

    def _write(self, headings: Sequence[str]) -> str:
        """A summary that says next to nothing, and calls everything open where it is a wrong one."""
        rows = [f"| {' '.join(text.split())[:120]} | nothing yet | open |" for text in self._said]
        table = ["| Request | Outcome | Status |", "|---|---|---|"]
        parts = []
        for heading in dict.fromkeys(headings):
            is_table = self._summary == "wrong" and "Request" in heading
            parts.append("\n".join([heading, *([*table, *rows] if is_table else [f"- {VAGUE}"])]))
        return "\n\n".join(parts) or VAGUE

    def play(
        self, row: JsonObject, cuts: Sequence[int], then: Callable[[int, Forwarded], None] = lambda *_: None
    ) -> dict[int, Forwarded]:
        """Sends the first messages of a conversation, for each cut in order.

        Args:
            row: The conversation.
            cuts: How many messages each request has.
            then: Called after each request, while the proxy stands there.

        Returns:
            What was forwarded, by cut.
        """
        found: dict[int, Forwarded] = {}
        for cut in cuts:
            messages = row["messages"][:cut]
            self._said = [str(each["content"]) for each in messages[:-1] if each["role"] == "user"]
            self._provider.received.clear()
            body = {"model": MODEL, "messages": messages}
            if row.get("tools"):
                body["tools"] = row["tools"]
            answer = self._client.post("/v1/chat/completions", json=body, headers=self._headers(row))
            answer.raise_for_status()
            self._proxy.wait_for_quiet()  # rounds are also made behind answers
            sent = [each.json() for each in self._provider.received if each.body]
            forwarded = next(each for each in sent if each["model"] == MODEL)["messages"]
            found[cut] = Forwarded(
                messages,
                forwarded,
                answer.headers.get("x-compaction-status", ""),
                answer.headers.get("x-compaction-session", ""),
                int(answer.headers.get("x-compaction-round", 0)),
            )
            then(cut, found[cut])
        return found

    def count_summaries(self) -> JsonObject:
        """Counts the compactions since the last call: all, those the model answered, and failed ones.

        A model that is too slow is left alone for a while, and texts without a model stand in. Figures are
        about the model only if it has answered.
        """
        finished = self._proxy.log_lines("compaction.finished")
        failed = self._proxy.log_lines("compaction.failed")
        new = finished[self._counted[0] :]
        counts = {
            "finished": len(new),
            "answered": sum(bool(each.get("completion_tokens")) for each in new),
            "failed": len(failed) - self._counted[1],
        }
        self._counted = len(finished), len(failed)
        return counts

    def search(self, row: JsonObject, query: str) -> str:
        """What the tool `memory_search` answers, over MCP."""
        call = {"name": "memory_search", "arguments": {"query": query}}
        answer = self._client.post(
            "/mcp",
            json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
            headers={**self._headers(row), "accept": "application/json, text/event-stream"},
        )
        answer.raise_for_status()
        return "\n".join(part["text"] for part in answer.json()["result"]["content"])

    @staticmethod
    def _headers(row: JsonObject) -> dict[str, str]:
        return {"x-session-id": row["id"], "authorization": "Bearer sk-frontier"}


@contextmanager
def open_player(summary: str, window: int, reader: str) -> Iterator[Player]:
    """A player over a proxy whose model has so large a window."""
    section: JsonObject = {"model": SUMMARY_MODEL}
    models: JsonObject = {MODEL: {"window": window}}
    if summary == "none":
        section = {"model": "none"}
    elif summary == "reader":
        section = {"model": "reader", "base_url": reader, "api_key": "none", "timeout_s": READER_LIMIT_S}
        models["reader"] = {"window": READER_WINDOW}
    config = {"models": models, "summary": section, "compaction": {"max_block_s": READER_LIMIT_S}}
    provider = Provider()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with (
                run_proxy(Path(folder), provider.url, config) as proxy,
                proxy.client(timeout=2 * READER_LIMIT_S) as client,
            ):
                yield Player(proxy, provider, client, summary)
        finally:
            provider.close()
