"""Judges a session by what was recorded of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.system.agents.clients import Client, Ended
from tests.system.agents.provider import (
    REQUESTS_PER_TASK,
    Counting,
    Forwarded,
    decode_body,
    find_wire,
    write_instructions,
    write_task,
)
from tests.system.agents.recorder import Exchange
from tests.system.agents.wires import BYTES_PER_TOKEN, WIRES, Wire

# What the proxy keeps back of the window at most: docs/configuration.md.
USABLE_SHARE = 0.75
# Above this share of the window the fixed part leaves no room to judge the number of summaries.
LARGE_FIXED_SHARE = 0.6
REQUESTS_PER_SUMMARY = 5
UNCHANGED = {"", "none", "scheduled", "bypassed", "shadow"}
EDGE_CHARACTERS = 80  # of a cut text that must be left at its head and its tail
STREAM_ERRORS = (b'"type": "response.failed"', b'"type":"response.failed"', b"event: error")
RULES = tuple(line for line in write_instructions().splitlines() if line.startswith("- RULE-"))


@dataclass(frozen=True)
class Session:
    """What was recorded of a session.

    Attributes:
        client: Who it was.
        window: Tokens of the provider's window.
        counting: What the provider counts against it.
        exchanges: The client's requests and their answers.
        forwarded: What reached the provider.
        ended: How the client's processes ended.
        conversations: The proxy's list of conversations.
        steps: Steps of the session that the provider has answered.
        states: What state.txt holds and what it should hold; one text where they agree.
    """

    client: Client
    window: int
    counting: Counting
    exchanges: Sequence[Exchange]
    forwarded: Sequence[Forwarded]
    ended: Sequence[Ended]
    conversations: Sequence[Mapping[str, Any]]
    steps: int
    states: set[str]


@dataclass
class Verdict:
    """What came of a session.

    Attributes:
        violations: What was wrong, by rule.
        figures: Counts of the session.
    """

    violations: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)

    def add(self, rule: str, found: Iterator[str] | Sequence[str]) -> None:
        """Add what was found against a rule, if anything was."""
        listed = list(found)
        if listed:
            self.violations[rule] = listed


def judge_session(session: Session) -> Verdict:
    """Returns what was wrong in a session, and its figures."""
    verdict = Verdict()
    steps = _pair_steps(session)
    summaries = sum(each.kind == "summary" for each in session.forwarded)
    refusals = sum(each.is_too_long for each in session.forwarded)
    fixed = max((_size_of_fixed(session, body) for _, body, _ in steps), default=0)
    verdict.figures = {
        "requests": len(steps),
        "compacted": sum(each.compaction_status in ("applied", "reused") for each, _, _ in steps),
        "summaries": summaries,
        "refusals": refusals,
        "fixed_tokens": fixed,
        "largest_tokens": max((each.tokens for each in session.forwarded if not each.is_too_long), default=0),
        "conversations": len(session.conversations),
    }
    verdict.add("client errors", _find_client_errors(session))
    verdict.add("invalid requests", _find_invalid(session))
    verdict.add("one conversation", _find_extra_conversations(session))
    verdict.add("kept whole", _find_losses(session, steps))
    if fixed <= LARGE_FIXED_SHARE * session.window and summaries * REQUESTS_PER_SUMMARY > len(steps):
        verdict.add("summary calls", [f"{summaries} for {len(steps)} requests"])
    if refusals > 1:
        listed = [each for each in session.forwarded if each.is_too_long]
        verdict.add(
            "refusals", [f"{each.kind} of {each.tokens} tokens, for {each.exchange}" for each in listed]
        )
    verdict.add("bytes and status", _find_alterations(session))
    return verdict


Step = tuple[Exchange, Any, Any]


def _pair_steps(session: Session) -> list[Step]:
    """The steps: each with the client's body and the last one that was forwarded for it, both decoded."""
    last = {each.exchange: each for each in session.forwarded if each.kind == "step"}
    return [
        (exchange, json.loads(_decode_exchange(exchange)), json.loads(last[exchange.number].body))
        for exchange in session.exchanges
        if exchange.number in last
    ]


def _decode_exchange(exchange: Exchange) -> bytes:
    return decode_body(exchange.body, exchange.headers.get("content-encoding", ""))


def _carries_conversation(exchange: Exchange) -> bool:
    return exchange.method == "POST" and find_wire(exchange.path) is not None


def _find_client_errors(session: Session) -> Iterator[str]:
    yield from _find_process_errors(session)
    yield from _find_answer_errors(session)


def _find_process_errors(session: Session) -> Iterator[str]:
    for number, ended in enumerate(session.ended, 1):
        if ended.exit_code:
            yield f"task {number}: exit code {ended.exit_code}: {ended.output[-300:]!r}"
        for line in ended.output.splitlines():
            if line.strip().lower().startswith(session.client.error_lines):
                yield f"task {number}: {line.strip()[:300]}"


def _find_answer_errors(session: Session) -> Iterator[str]:
    if session.steps < 2 * REQUESTS_PER_TASK:
        yield f"the session ended after {session.steps} of {2 * REQUESTS_PER_TASK} steps"
    if len(session.states) > 1:
        yield f"the client's edits did not succeed: {session.states}"
    for exchange in filter(_carries_conversation, session.exchanges):
        if exchange.status >= 400 or any(mark in exchange.answer for mark in STREAM_ERRORS):
            yield f"request {exchange.number}: {exchange.status} {exchange.answer[-300:]!r}"


def _find_invalid(session: Session) -> Iterator[str]:
    for each in session.forwarded:
        if each.faults:
            status = session.exchanges[each.exchange].compaction_status if each.exchange is not None else ""
            yield f"request {each.exchange} ({status}): {'; '.join(each.faults)[:500]}"


def _find_extra_conversations(session: Session) -> Iterator[str]:
    if len(session.conversations) != 1:
        sizes = [each.get("requests") for each in session.conversations]
        yield f"{len(session.conversations)} conversations, of so many requests: {sizes}"


def _strip_marks(value: Any) -> Any:
    """A value without the marks of Messages that may move from request to request."""
    if isinstance(value, dict):
        return {key: _strip_marks(each) for key, each in value.items() if key != "cache_control"}
    return [_strip_marks(each) for each in value] if isinstance(value, list) else value


def _join_texts(wire: Wire, body: Any) -> str:
    return "\n".join(text for item in wire.list_items(body) for text in wire.list_texts(item))


def _list_newest_texts(session: Session, body: Any) -> list[str]:
    """The newest tool results; where the request ends otherwise, the texts of its last message."""
    wire = WIRES[session.client.wire]
    items = wire.list_items(body)
    texts = wire.list_newest_results(body) or wire.list_texts(items[-1])
    marks = session.client.newest_marks
    fresh = [text for item in items for text in wire.list_texts(item) if marks and text.startswith(marks)]
    return [text for text in (*texts, *fresh) if text.strip()]


def _size_of_fixed(session: Session, body: Any) -> int:
    """Tokens of system prompt, privileged messages, tools and the project's instructions."""
    wire = WIRES[session.client.wire]
    texts = _join_texts(wire, body)
    rules = sum(len(rule) for rule in RULES if rule in texts)
    return (len(json.dumps(wire.get_fixed_part(body))) + rules) // BYTES_PER_TOKEN


def _find_losses(session: Session, steps: Sequence[Step]) -> Iterator[str]:
    """What did not reach the provider whole although there was room; without room, head and tail."""
    for exchange, sent, forwarded in steps:
        wire = WIRES[session.client.wire]
        before, after = _join_texts(wire, sent), _join_texts(wire, forwarded)
        results = _list_newest_texts(session, sent)
        tasks = [task for task in (write_task(1), write_task(2)) if task in before]
        need = _size_of_fixed(session, sent) + sum(map(len, (*tasks, *results))) // BYTES_PER_TOKEN
        place = f"request {exchange.number} ({exchange.compaction_status}, {need} needed)"
        if _strip_marks(wire.get_fixed_part(sent)) != _strip_marks(wire.get_fixed_part(forwarded)):
            yield f"{place}: system prompt or tools are altered"
        if need <= USABLE_SHARE * session.window:
            lost_rules = sum(rule in before and rule not in after for rule in RULES)
            yield from [f"{place}: {lost_rules} lines of the instructions"] if lost_rules else []
            yield from (f"{place}: task {task[5]}" for task in tasks if not _has_every_sentence(after, task))
            yield from (f"{place}: newest result {text[:40]!r}" for text in results if text not in after)
        else:
            for text in results:
                if text[:EDGE_CHARACTERS] not in after or text[-EDGE_CHARACTERS:] not in after:
                    yield f"{place}: head or tail of the newest result {text[:40]!r}"


def _has_every_sentence(text: str, task: str) -> bool:
    """Whether a task stands in a text word for word; rules in it may stand apart from what is asked."""
    return all(sentence in text for sentence in task.split(". "))


def _find_alterations(session: Session) -> Iterator[str]:
    """Requests whose bytes and whose status do not agree."""
    by_exchange: dict[int, list[Forwarded]] = {}
    for each in session.forwarded:
        if each.exchange is not None:
            by_exchange.setdefault(each.exchange, []).append(each)
    for exchange in session.exchanges:
        if not _carries_conversation(exchange):
            continue
        status, attempts = exchange.compaction_status, by_exchange.get(exchange.number, [])
        if "x-compaction-max-tokens" in exchange.answer_headers or not attempts:
            continue
        is_same = attempts[-1].raw == exchange.body
        if status in UNCHANGED and not is_same:
            yield f"request {exchange.number}: {status or 'no status'}, but its bytes were altered"
        if status in ("applied", "reused") and attempts[-1].body == _decode_exchange(exchange):
            yield f"request {exchange.number}: {status}, but its bytes are the client's"
