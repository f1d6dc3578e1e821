"""How much of what questions are about is at hand after compaction: in the context, or found by search.

    uv run python bench/evidence.py FILE.jsonl [--strategies anchored,full,…] [--rows 2] [--trigger-share 0.4]

FILE holds a conversation a line, `{id, messages, qa}`; `qa` lists `{question, answer, evidence_msgs}`, where
`evidence_msgs` are the indexes of the messages with the answer. A client re-sends its growing conversation in
a few steps, with a summary model that extracts; T is a share of its size. Then each message of evidence is

- in context, if its text, or the answer that it holds, stands in what the provider was sent last;
- found, if it is not, but a search for the longest words of the question, or for two of them, brings it up.
"""

import argparse
import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import structlog
from retention import Provider

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.server import serve_embedded

JsonObject = dict[str, Any]

STEPS = 8
WORDS = 4
HITS = 20
LEAST_WORD_CHARACTERS = 4
LEAST_ANSWER_CHARACTERS = 3
CHARACTERS_A_TOKEN = 4
SUMMARY_MODEL = "summary"
KEY = "sk-test"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Share:
    """What became of the evidence, in messages.

    Attributes:
        asked: How many there were.
        context: Of these, still in the context.
        found: Of the others, found by search.
        failed: Requests that were not answered.
        size: Forwarded characters for each one sent, in the last request.
    """

    asked: int
    context: int
    found: int
    failed: int
    size: float


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def words(question: str) -> list[str]:
    """The longest words of a question: what somebody would search for."""
    found = dict.fromkeys(each for each in _WORD.findall(question) if len(each) >= LEAST_WORD_CHARACTERS)
    return sorted(found, key=len, reverse=True)[:WORDS]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One message that holds the answer to a question.

    Attributes:
        question: The question.
        index: Of the message.
        texts: Of these one must be at hand: what is quoted of the message or all of it; the answers it holds.
    """

    question: str
    index: int
    texts: tuple[str, ...]


def evidence(row: JsonObject) -> Iterator[Evidence]:
    """The evidence for each question of a conversation."""
    for asked in row["qa"]:
        given = asked["answer"]
        answers = [_plain(str(each)) for each in (given if isinstance(given, list) else [given])]
        quoted = _plain(asked["evidence"]) if isinstance(asked["evidence"], str) else ""
        for index in asked["evidence_msgs"]:
            whole = _plain(_text(row["messages"][index]))
            held = [each for each in answers if len(each) >= LEAST_ANSWER_CHARACTERS and each in whole]
            wanted = quoted if quoted and quoted in whole else whole
            yield Evidence(asked["question"], index, (wanted, *held))


async def _found(client: httpx.AsyncClient, conversation: str, wanted: Evidence) -> bool:
    """Whether a search for one of the words, or for two of them together, brings the message up."""
    asked = words(wanted.question)
    queries = [*(f"{one} {other}" for one in asked for other in asked if one < other), *asked]
    for query in queries:
        path = f"/admin/v1/conversations/{conversation}/search"
        answer = await client.get(path, params={"q": query, "limit": HITS})
        hits = answer.json()["hits"] if answer.status_code == httpx.codes.OK else []
        if any(hit["index"] == wanted.index for hit in hits):
            return True
    return False


async def share(strategy: str, row: JsonObject, trigger_share: float) -> Share:
    """What became of the evidence of one conversation."""
    provider = Provider()
    tokens = sum(len(_text(each)) for each in row["messages"]) / CHARACTERS_A_TOKEN
    async with serve_embedded(provider) as upstream:
        config = Config.model_validate(
            {
                "server": {"admin_key": "none"},
                "upstream": {"base_url": f"{upstream}/v1"},
                "store": {"url": "memory://"},
                "compaction": {"strategy": strategy, "trigger": [{"tokens": int(trigger_share * tokens)}]},
                "summary": {"model": SUMMARY_MODEL},
            }
        )
        async with (
            serve_embedded(create_app(config)) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            return await _share(client, provider, row)


async def _share(client: httpx.AsyncClient, provider: Provider, row: JsonObject) -> Share:
    messages, failed, conversation = row["messages"], 0, ""
    client.headers["authorization"] = f"Bearer {KEY}"
    ends = [k + 1 for k, each in enumerate(messages) if each["role"] in {"user", "tool"}]
    for step in range(1, STEPS + 1):
        sent = messages[: ends[len(ends) * step // STEPS - 1]]
        body = {"model": "gpt-4o", "messages": sent}
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": row["id"]})
        failed += answer.status_code != httpx.codes.OK
        conversation = answer.headers.get("x-compaction-session", conversation)
    forwarded = [_text(each) for each in json.loads(provider.last)["messages"]]
    context = _plain("\n".join(forwarded))
    skipped = sum(1 for each in messages if each["role"] in {"system", "developer"})
    held = found = asked = 0
    for each in evidence(row):
        if each.index >= len(sent):
            continue
        asked += 1
        if any(text in context for text in each.texts):
            held += 1
        elif await _found(client, conversation, replace(each, index=each.index - skipped)):
            found += 1
    size = sum(map(len, forwarded)) / max(1, sum(len(_text(each)) for each in sent))
    return Share(asked, held, found, failed, size)


def _line(strategy: str, kind: str, shares: Sequence[Share]) -> str:
    asked = max(1, sum(each.asked for each in shares))
    context = sum(each.context for each in shares) / asked
    found = sum(each.found for each in shares) / asked
    size = sum(each.size for each in shares) / len(shares)
    failed = sum(each.failed for each in shares)
    cells = [strategy, kind, str(asked), f"{context:.0%}", f"{found:.0%}", f"{context + found:.0%}"]
    return "| " + " | ".join([*cells, f"{size:.2f}", str(failed)]) + " |"


async def main(arguments: Sequence[str]) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Evidence after compaction.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--rows", type=int, default=2, help="conversations of each kind")
    parser.add_argument("--trigger-share", type=float, default=0.4)
    options = parser.parse_args(arguments)
    kinds: dict[str, list[JsonObject]] = {}
    for line in options.file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("qa"):
            kinds.setdefault(row["id"].partition("-")[0], []).append(row)
    print("| strategy | of | evidence | in context | found | together | size | failed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for strategy in options.strategies.split(","):
        for kind, rows in kinds.items():
            shares = [await share(strategy, row, options.trigger_share) for row in rows[: options.rows]]
            print(_line(strategy, kind, shares), flush=True)


if __name__ == "__main__":
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)  # the table is what this prints
    structlog.configure(wrapper_class=quiet)
    asyncio.run(main(sys.argv[1:]))
