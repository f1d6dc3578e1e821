"""What forwarded lists say of the work: what is open, what was done with which outcome, what was observed.

    uv run python bench/frontier.py [FOLDER] [--summary none,poor] [--sample N] [--json FILE] [--show N]
    uv run python bench/frontier.py FOLDER --summary reader --reader URL --parts desk,coding --resume FILE

FOLDER holds conversations, one a line, `{id, messages, …}`; by default the small ones of `tests/fixtures`.
Each is played as it grew through the installed command, as a process: one request for every user turn, one
before every call that writes, one for every mark. What reaches the provider is read from outside
(`frontier_lists.py`), so `COMPACTION_PROXY=/other/venv/bin/compaction-proxy` measures another version with
the same judge. Requests that went on as they came are not judged.

**Requests**: conversations of tau-bench's airline desk (ids `tau-…`). A user message is a request if it asks:
a question, "please", "I'd like", "I need", "can you" and the like. A short approval ("Yes, please proceed.")
and a message that only tells something are none. A conversation is finished if the user ended it
("###STOP###") without asking anything. Conversations whose user went to look for an id first (postponed),
that were handed over to a person or broke off are no finished ones; they are printed apart.

- `open at the end`: user messages of which something is called open, and items that are about no message, for
  each request. Whatever is called open counts, the denominator has only requests; so it may exceed 1.
- `named in the middle`: before each call that writes, the request behind it. That is the latest request of
  the turns since the last write, or about what the tool does; one that only wants to see or know something
  counts if there is no other. It is named if it stands there as it was sent or if an item that is called open
  is about it. `covered` are those that do not stand there as they were sent.

**Marks**: requests in coding sessions, marked by hand (`tests/fixtures/frontier_marks.json`), with their
state at a cut and what must be found of their outcome. What was answered at one cut is so at the later ones.

**Writes**: the same conversations as for requests. Before each user turn, each call that wrote: its tool, its
ids and its outcome stand together, in one item of a stand-in, or in call and result as they were sent. `each
somewhere` asks only that each stands anywhere. `next arguments`: values of the next gold action that the
conversation had shown by then; each is forwarded, or found by one `memory_search` for the words of argument
and tool.

**Values**: from all of these and from function-calling conversations (ids `bfcl-multi…`), drawn by `--seed`
from everything that stand-ins say was observed; `frontier_values.py` judges them.

`--summary` names who writes summaries: `none`, nobody; `poor`, vague sentences under the headings asked for;
`wrong`, the same with every user message called open; `reader`, the model at the URL `--reader`.

`--resume FILE` keeps the figures of each conversation in FILE, with the number of summaries that the model
answered. It leaves out conversations that are in FILE and prints the sums over all. It judges no values. A
summary of the reader takes two to nine minutes. So `bench/frontier_reader.jsonl` holds the coding sessions
that were played with it so far; copy it and go on.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from frontier_lists import (
    Forwarded,
    JsonObject,
    Value,
    observed_values,
    open_items,
    phrase,
    read_items,
    rule_items,
    words,
)
from frontier_values import judge, read_sources
from player import FIXTURES, MODEL, Player, open_player, read_rows

from compaction_proxy.providers.tokenizers import TiktokenCounter

MARKS = FIXTURES / "frontier_marks.json"
VALUES = 300
# An item is about a message if so much of its words stand there, and a phrase stands in an item likewise.
ABOUT, PHRASE_SHARE, LEAST_WORDS = 0.6, 0.7, 3
# Words of an error that have to stand together.
ERROR_WORDS = 4
# A longer approval says something new.
APPROVAL_WORDS = 16

STOP = "###STOP###"
TOPICS = {
    "book_reservation": r"book|reserv|fly|flight|trip|travel|ticket",
    "cancel_reservation": r"cancel|refund",
    "update_reservation_flights": r"chang|modif|upgrad|downgrad|switch|mov|adjust|resched|updat|push|"
    r"business|economy|nonstop|earlier|later|cabin|class|flight",
    "update_reservation_baggages": r"bag|luggage|suitcase",
    "update_reservation_passengers": r"passenger|name|companion|remov|replac",
    "send_certificate": r"compensat|certificat|voucher|delay|cancel|refund",
}
WRITES = frozenset(TOPICS)
_ASKS = re.compile(
    r"\?|\bplease\b|\b(?:i(?:.d| would) like|i(?:.m| am| was)? ?(?:want|need|hoping|looking|trying|wish)|"
    r"i.ll (?:go|take|proceed)|let.?s|can you|could you|would you|help me|go ahead|proceed)\b",
    re.IGNORECASE,
)
_APPROVES = re.compile(
    r"^\W*(?:yes|yeah|sure|ok|okay|great|perfect|alright|sounds good|that works|i confirm)\b", re.IGNORECASE
)
_CONDITION = re.compile(r"\bif (?:i|you) need\b[^.!?]*", re.IGNORECASE)
_ADDS = re.compile(r"\?|\b(?:also|but|instead|another|however)\b", re.IGNORECASE)
_LOOKS_UP = re.compile(
    r"\b(?:see|show|tell|know|check|what|which|how|why|is there|are there)\b", re.IGNORECASE
)
_POSTPONES = re.compile(
    r"(?:get back to you|reach (?:back )?out|contact you|be in touch)(?! if)|let you know as soon|"
    r"talk (?:to you )?soon|"
    r"(?:try|check|look|find).{0,40}\b(?:later|find|first)\b|(?:once|when) i (?:have|find)|"
    r"(?:look for|gather|provide) (?:those|these|them|the|that).{0,40}(?:details|information|shortly)",
    re.IGNORECASE,
)
_SUCCESS = re.compile(
    r"\b(?:done|ok|success\w*|succeeded|booked|updated|changed|modified|cancell?ed|added|confirmed|paid|sent|issued|"
    r"completed?|status|total|refund\w*)\b|[→✓]|->",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Figure:
    """A share, what it should be, and the cases that spoil it.

    Attributes:
        name: What is counted.
        hits: Cases of the share.
        of: All cases.
        goal: What the share should be at least, or at most; None: no goal.
        at_most: Whether the goal is an upper bound.
        cases: What to look at: false hits of an upper bound, misses of a lower one.
    """

    name: str
    hits: int = 0
    of: int = 0
    goal: float | None = None
    at_most: bool = False
    cases: list[str] = field(default_factory=list)

    def count(self, *, is_hit: bool, case: str) -> None:
        """Count a case; it is kept if it spoils the share."""
        self.of += 1
        self.hits += is_hit
        if is_hit == self.at_most:
            self.cases.append(case)

    @property
    def share(self) -> float | None:
        return self.hits / self.of if self.of else None

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without a goal or cases."""
        if self.goal is None or self.share is None:
            return None
        return self.share <= self.goal if self.at_most else self.share >= self.goal


@dataclass(frozen=True, slots=True)
class Write:
    """A call that writes, as a conversation holds it.

    Attributes:
        index: Of the assistant message.
        answer: Of the message with the result.
        tool: Its name.
        arguments: As the model gave them.
        result: What the tool said.
    """

    index: int
    answer: int
    tool: str
    arguments: JsonObject
    result: str

    @property
    def has_failed(self) -> bool:
        return self.result.startswith("Error")

    @property
    def keys(self) -> list[str]:
        """The arguments that tell this call from others."""
        given = self.arguments
        name = "user_id" if self.tool == "send_certificate" else "reservation_id"
        found = [str(given[name])] if name in given else []
        found += [str(each["flight_number"]) for each in given.get("flights", ())]
        if self.tool == "update_reservation_passengers":
            found += [str(each["last_name"]) for each in given["passengers"]]
        elif self.tool == "update_reservation_baggages":
            found.append(str(given["total_baggages"]))
        elif self.tool == "send_certificate":
            found.append(str(given["amount"]))
        return list(dict.fromkeys(found))

    def has_outcome(self, text: str) -> bool:
        """Whether a text tells how the call ended."""
        if self.has_failed:
            said = phrase(self.result.partition(":")[2]).split()[:ERROR_WORDS]
            return f" {' '.join(said)} " in phrase(text)
        if self.tool == "book_reservation":
            return _holds(text, json.loads(self.result)["reservation_id"])
        return bool(_SUCCESS.search(re.sub(r"\w+_\w+", "", text)))

    def is_told(self, text: str) -> bool:
        """Whether one text holds tool, keys and outcome."""
        named = self.tool.replace("_", " ") in re.sub(r"[_\s]+", " ", text).lower()
        return named and all(_holds(text, key) for key in self.keys) and self.has_outcome(text)


def _holds(text: str, value: str) -> bool:
    """Whether a text holds a value that nothing continues."""
    return bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE))


def is_request(text: str) -> bool:
    """Whether a user message asks for something: see the top of this file."""
    said = _CONDITION.sub("", text).replace(STOP, "").strip()
    is_short = len(said.split()) <= APPROVAL_WORDS
    return bool(_ASKS.search(said)) and not (is_short and _APPROVES.match(said) and not _ADDS.search(said))


def ending(messages: Sequence[JsonObject]) -> str:
    """How a conversation ended: `finished`, `postponed`, `handed over` or `broken off`."""
    last = messages[-1]
    if last["role"] == "tool" and "ransfer" in str(last["content"]):
        return "handed over"
    if (
        last["role"] != "user"
        or STOP not in last["content"]
        or _ASKS.search(_CONDITION.sub("", last["content"]))
    ):
        return "broken off"
    said = [str(each["content"]) for each in messages if each["role"] == "user"]
    return (
        "postponed" if any(_POSTPONES.search(_CONDITION.sub("", each)) for each in said[-3:]) else "finished"
    )


def read_writes(messages: Sequence[JsonObject]) -> list[Write]:
    """The calls that write, with their results."""
    found = []
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            if call["function"]["name"] in WRITES:
                answer = index + 1 + number
                arguments = json.loads(call["function"]["arguments"])
                result = str(messages[answer]["content"])
                found.append(Write(index, answer, call["function"]["name"], arguments, result))
    return found


def find_request(messages: Sequence[JsonObject], write: Write) -> int | None:
    """The index of the user message that a call follows from: see `named in the middle` above."""
    topic = re.compile(TOPICS[write.tool], re.IGNORECASE)
    users = [index for index, each in enumerate(messages) if each["role"] == "user"]
    earlier = [each.index for each in read_writes(messages) if each.index < users[-1]]
    said = [
        (is_request(text), not _LOOKS_UP.search(text), index)
        for index in users
        for text in [str(messages[index]["content"])]
        if index > max(earlier, default=-1) or topic.search(text)
    ]
    return max(said)[-1] if said else None


def find_subject(item: str, messages: Sequence[JsonObject]) -> int | None:
    """The index of the user message that an item is about, the latest of equal ones; None: of no message."""
    said = words(item)
    shares = [
        (len(said & words(str(each["content"]))) / len(said), index)
        for index, each in enumerate(messages)
        if each["role"] == "user" and said
    ]
    share, index = max(shares, default=(0.0, 0))
    return index if share >= ABOUT else None


def is_about(item: str, asked: str) -> bool:
    """Whether an item says what was asked: the phrase itself, or most of its words."""
    wanted = words(asked)
    is_long = len(wanted) >= LEAST_WORDS
    share = len(wanted & words(item)) / max(1, len(wanted))
    return phrase(asked) in phrase(item) or (is_long and share >= PHRASE_SHARE)


class Requests:
    """Requests of finished conversations, and of those that are cut before a call that writes."""

    def __init__(self) -> None:
        self.finished = Figure("open at the end, of finished requests", goal=0.1, at_most=True)
        self.messages = Figure("open at the end, of user messages", at_most=True)
        self.others = Figure("open at the end, postponed, handed over, broken off", at_most=True)
        self.named = Figure("named in the middle", goal=0.95)
        self.covered = Figure("named in the middle, covered", goal=0.95)

    @property
    def figures(self) -> list[Figure]:
        return [self.finished, self.messages, self.others, self.named, self.covered]

    def judge_end(self, row: JsonObject, end: Forwarded) -> None:
        """What the last request of a conversation says is open."""
        before = row["messages"][:-1]
        asked = [each for each in before if each["role"] == "user" and is_request(each["content"])]
        told = [each for each in before if each["role"] == "user"]
        items = open_items(end.stand_ins)
        subjects = [find_subject(item, before) for item in items]
        false = len({subject for subject in subjects if subject is not None}) + subjects.count(None)
        is_finished = ending(row["messages"]) == "finished"
        for figure, base in (
            (self.finished if is_finished else self.others, len(asked)),
            (self.messages, len(told) if is_finished else 0),
        ):
            if base:
                figure.hits += false
                figure.of += base
                figure.cases += [f"{row['id']}: {item}" for item in items]

    def judge_middle(self, row: JsonObject, write: Write, forwarded: Forwarded) -> None:
        """Whether the request behind a call that comes next is named."""
        asked = find_request(forwarded.client, write)
        if asked is None or not forwarded.is_compacted:
            return
        message = row["messages"][asked]
        is_verbatim = forwarded.holds(message)
        items = open_items(forwarded.stand_ins)
        named = any(
            len(words(item)) >= LEAST_WORDS
            and len(words(item) & words(message["content"])) / len(words(item)) >= ABOUT
            for item in items
        )
        case = f"{row['id']} at {write.index}, {write.tool}: {message['content'][:100]!r}"
        self.named.count(is_hit=named or is_verbatim, case=case)
        if not is_verbatim:
            self.covered.count(is_hit=named, case=case)


class Writes:
    """Calls that wrote, and what the next gold action needs."""

    def __init__(self) -> None:
        self.together = Figure("writes: tool, keys and outcome together", goal=0.95)
        self.apart = Figure("writes: each somewhere", goal=0.95)
        self.gone = Figure("writes no longer there as sent, together")
        self.forwarded = Figure("next arguments forwarded")
        self.found = Figure("next arguments forwarded or found", goal=0.9)

    @property
    def figures(self) -> list[Figure]:
        return [self.together, self.apart, self.gone, self.forwarded, self.found]

    def judge_writes(self, row: JsonObject, writes: Sequence[Write], forwarded: Forwarded) -> None:
        """Whether every call so far can be read."""
        cut = len(forwarded.client)
        text = forwarded.text
        bullets = [item.text for each in forwarded.stand_ins for item in read_items(each)]
        for write in writes:
            if write.answer >= cut:
                continue
            is_there = all(forwarded.holds(row["messages"][index]) for index in (write.index, write.answer))
            together = is_there or any(map(write.is_told, bullets))
            case = f"{row['id']} before {cut}: {write.tool} {write.keys}, {write.result[:60]!r}"
            self.together.count(is_hit=together, case=case)
            self.apart.count(is_hit=is_there or write.is_told(text), case=case)
            if not is_there:
                self.gone.count(is_hit=together, case=case)

    def judge_next(
        self, player: Player, row: JsonObject, writes: Sequence[Write], forwarded: Forwarded
    ) -> None:
        """Whether what the next gold action needs, and was shown, can be had."""
        cut = len(forwarded.client)
        action = _next_action(row.get("gold_actions", ()), [each for each in writes if each.index < cut])
        if action is None:
            return
        shown = Forwarded(forwarded.client, forwarded.client, "", "").text
        for names, value in _leaves(action["kwargs"]):
            if not _holds(shown, value):
                continue
            case = f"{row['id']} before {cut}: {action['name']} {names}={value}"
            is_there = _holds(forwarded.text, value)
            self.forwarded.count(is_hit=is_there, case=case)
            query = f"{names} {action['name']}".replace("_", " ")
            self.found.count(is_hit=is_there or _holds(player.search(row, query), value), case=case)


def _next_action(gold: Sequence[JsonObject], done: Sequence[Write]) -> JsonObject | None:
    """The first gold action that writes and has not been done; None: there is no more."""
    made = [(each.tool, each.arguments) for each in done if not each.has_failed]
    for action in gold:
        if action["name"] in WRITES and (action["name"], action["kwargs"]) not in made:
            return action
    return None


def _leaves(node: object, names: str = "") -> Iterator[tuple[str, str]]:
    """The values of arguments that could be looked up, with the names above them."""
    if isinstance(node, Mapping):
        for key, held in node.items():
            yield from _leaves(held, f"{names} {key}".strip())
    elif isinstance(node, list):
        for held in node:
            yield from _leaves(held, names)
    elif isinstance(node, str) and len(node) > 2:
        yield names, node


class Marks:
    """Requests that were marked by hand."""

    def __init__(self) -> None:
        self.answered = Figure("marks: answered, called open", goal=0.1, at_most=True)
        self.later = Figure("marks: answered, called open at any later cut", goal=0.1, at_most=True)
        self.withdrawn = Figure("marks: withdrawn, called open or a rule", goal=0.1, at_most=True)
        self.open = Figure("marks: open, named", goal=0.95)
        self.covered = Figure("marks: open, named, covered", goal=0.95)
        self.outcome = Figure("marks: outcome forwarded")
        self.outcome_covered = Figure("marks: outcome forwarded, reply covered")

    @property
    def figures(self) -> list[Figure]:
        return [
            self.answered,
            self.later,
            self.withdrawn,
            self.open,
            self.covered,
            self.outcome,
            self.outcome_covered,
        ]

    def judge_later(self, row: JsonObject, mark: JsonObject, forwarded: Forwarded) -> None:
        """Whether a request that was answered at its cut is called open at a later one."""
        if forwarded.is_compacted:
            is_open = any(is_about(item, mark["asked"]) for item in open_items(forwarded.stand_ins))
            case = f"{row['id']} before {len(forwarded.client)}: {mark['asked']!r}"
            self.later.count(is_hit=is_open, case=case)

    def judge(self, row: JsonObject, mark: JsonObject, forwarded: Forwarded) -> None:
        """Whether what is forwarded agrees with a mark."""
        if not forwarded.is_compacted:
            return
        items = open_items(forwarded.stand_ins)
        is_open = any(is_about(item, mark["asked"]) for item in items)
        case = f"{row['id']} before {mark['cut']}: {mark['asked']!r} {mark['outcome'] or ''}"
        if mark["state"] == "open":
            is_verbatim = forwarded.holds(row["messages"][mark["message"]])
            self.open.count(is_hit=is_open or is_verbatim, case=case)
            if not is_verbatim:
                self.covered.count(is_hit=is_open, case=case)
        elif mark["state"] == "withdrawn":
            rules = rule_items(forwarded.stand_ins)
            is_rule = any(is_about(item, mark["asked"]) for item in rules)
            self.withdrawn.count(is_hit=is_open or is_rule, case=case)
        else:
            self.answered.count(is_hit=is_open, case=case)
            text = " ".join(forwarded.text.casefold().split())
            is_found = all(" ".join(each.casefold().split()) in text for each in mark["outcome"])
            self.outcome.count(is_hit=is_found, case=case)
            later = row["messages"][mark["message"] + 1 : mark["cut"]]
            holders = [each for each in later if mark["outcome"][0].casefold() in json.dumps(each).casefold()]
            if not any(map(forwarded.holds, holders)):
                self.outcome_covered.count(is_hit=is_found, case=case)


@dataclass(slots=True)
class Observations:
    """Values that were said to be observed, and the sizes of what carries them.

    Attributes:
        values: Each with its conversation.
        ledgers: Texts of the ledgers, by kind of conversation.
        stand_ins: Texts of everything that stands in, likewise.
    """

    values: dict[tuple[str, Value], JsonObject] = field(default_factory=dict)
    ledgers: dict[str, list[str]] = field(default_factory=dict)
    stand_ins: dict[str, list[str]] = field(default_factory=dict)

    def read(self, kind: str, row: JsonObject, forwarded: Forwarded) -> None:
        """Take what a forwarded list says was observed."""
        if not forwarded.is_compacted:
            return
        texts = forwarded.stand_ins
        self.values |= {(row["id"], value): row for value in observed_values(texts)}
        self.ledgers.setdefault(kind, []).append(forwarded.ledger)
        self.stand_ins.setdefault(kind, []).append("\n".join(texts))

    def draw(self, seed: int, count: int) -> list[Figure]:
        """Judge so many values, drawn evenly from all that differ."""
        both = Figure("values: named and whole", goal=0.95)
        whole, named = Figure("values: whole"), Figure("values: named")
        of_done = Figure("values of records (paths): named and whole")
        order = sorted(self.values, key=lambda each: (each[0], each[1].section, each[1].label, each[1].text))
        sources: dict[str, Any] = {}
        for name, value in random.Random(seed).sample(order, min(count, len(order))):
            if name not in sources:
                sources[name] = read_sources(self.values[name, value]["messages"])
            is_whole, is_named = judge(value, sources[name])
            case = f"{name}: {value.label}: {value.text}"
            both.count(is_hit=is_whole and is_named, case=f"{case}{'' if is_whole else ' (not whole)'}")
            whole.count(is_hit=is_whole, case=case)
            named.count(is_hit=is_named, case=case)
            if value.section == "done":
                of_done.count(is_hit=is_whole and is_named, case=case)
        return [both, whole, named, of_done]


def play_desk(player: Player, rows: Sequence[JsonObject], observations: Observations) -> list[Figure]:
    """The figures of conversations of the airline desk."""
    requests, done = Requests(), Writes()
    for row in rows:
        messages = row["messages"]
        writes = read_writes(messages)
        before = {write.index: write for write in writes}
        turns = {index + 1 for index, each in enumerate(messages) if each["role"] == "user"}
        last = len(messages) if messages[-1]["role"] != "assistant" else len(messages) - 1

        def judge_cut(
            cut: int,
            forwarded: Forwarded,
            row: JsonObject = row,
            writes: Sequence[Write] = writes,
            before: Mapping[int, Write] = before,
            turns: set[int] = turns,
        ) -> None:
            observations.read("desk", row, forwarded)
            if cut in before:
                requests.judge_middle(row, before[cut], forwarded)
            if cut in turns and forwarded.is_compacted:
                done.judge_writes(row, writes, forwarded)
                done.judge_next(player, row, writes, forwarded)

        lists = player.play(row, sorted({*turns, *before, last}), judge_cut)
        if lists[last].is_compacted:
            requests.judge_end(row, lists[last])
    return [*requests.figures, *done.figures]


def play_marks(
    player: Player, rows: Sequence[JsonObject], marks: Sequence[JsonObject], observations: Observations
) -> list[Figure]:
    """The figures of the coding sessions."""
    judged = Marks()
    for row in rows:
        own = [
            mark
            for mark in marks
            if mark["conversation"] == row["id"] and mark["cut"] <= len(row["messages"])
        ]
        for mark in own:
            check_mark(row, mark)
        cuts = {mark["cut"] for mark in own}
        turns = {index + 1 for index, each in enumerate(row["messages"]) if each["role"] == "user"}
        cuts |= {turn for turn in turns if turn < max(cuts)}
        lists = player.play(row, sorted(cuts))
        for mark in own:
            judged.judge(row, mark, lists[mark["cut"]])
            if mark["state"] == "answered" and len(words(mark["asked"])) > LEAST_WORDS:
                for cut in sorted({other["cut"] for other in own if other["cut"] > mark["cut"]}):
                    judged.judge_later(row, mark, lists[cut])
        for forwarded in lists.values():
            observations.read("coding", row, forwarded)
    return judged.figures


def play_rows(
    play: Callable[[Sequence[JsonObject]], list[Figure]],
    count_summaries: Callable[[], JsonObject],
    part: str,
    rows: Sequence[JsonObject],
    path: Path,
) -> list[Figure]:
    """The sums of the figures of each row; `path` keeps those of the rows that are done.

    Args:
        play: Returns the figures of rows.
        count_summaries: Counts the summaries since the last call, by who wrote them.
        part: Name of these rows in the file.
        rows: The conversations.
        path: A file of JSON lines, one a conversation.
    """
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    judged = [each for each in map(json.loads, lines) if each["part"] == part]
    done = {each["conversation"] for each in judged}
    for row in rows:
        if row["id"] not in done:
            figures = [asdict(each) for each in play([row])]
            judged.append(
                {"part": part, "conversation": row["id"], "summaries": count_summaries(), "figures": figures}
            )
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(judged[-1], ensure_ascii=False) + "\n")
    sums: dict[str, Figure] = {}
    for each in judged:
        for fields in each["figures"]:
            total = sums.setdefault(fields["name"], Figure(**fields | {"hits": 0, "of": 0, "cases": []}))
            total.hits += fields["hits"]
            total.of += fields["of"]
            total.cases += fields["cases"]
    return list(sums.values())


def play_others(player: Player, rows: Sequence[JsonObject], observations: Observations) -> None:
    """Collect what is observed in conversations that are judged by nothing else."""
    for row in rows:
        turns = [index + 1 for index, each in enumerate(row["messages"]) if each["role"] == "user"]
        for forwarded in player.play(row, turns).values():
            observations.read("others", row, forwarded)


def check_mark(row: JsonObject, mark: JsonObject) -> None:
    """Raise if a mark does not fit its conversation.

    Raises:
        ValueError: Its request, its cut or its outcome is not there.
    """
    messages = row["messages"]
    asked, later = messages[mark["message"]], messages[mark["message"] + 1 : mark["cut"]]
    replies = "\n".join(f"{each.get('content')}{json.dumps(each.get('tool_calls'))}" for each in later)
    is_right = (
        asked["role"] == "user"
        and mark["asked"] in asked["content"]
        and messages[mark["cut"] - 1]["role"] in {"user", "tool"}
        and all(each in replies for each in mark["outcome"])
        and bool(mark["outcome"]) == (mark["state"] == "answered")
    )
    if not is_right:
        raise ValueError(f"a mark does not fit: {mark}")


def measure(options: argparse.Namespace, summary: str) -> dict[str, Any]:
    """All figures with one way to write summaries."""
    rows = read_rows(options.folder)
    marks = json.loads(MARKS.read_text("utf-8"))["marks"]
    marked = {mark["conversation"] for mark in marks}
    desk = [row for row in rows if row["id"].startswith("tau-") and "gold_actions" in row]
    coding = [row for row in rows if row["id"] in marked]
    if options.sample and options.sample < len(desk):
        desk = random.Random(options.seed).sample(desk, options.sample)
    observations, figures = Observations(), []

    def play_part(
        part: str, play: Callable[[Player, Sequence[JsonObject]], list[Figure]], rows: Sequence[JsonObject]
    ) -> list[Figure]:
        if part not in options.parts or not rows:
            return []
        with open_player(summary, options.window, options.reader) as player:
            if options.resume:
                return play_rows(
                    lambda some: play(player, some), player.count_summaries, part, rows, options.resume
                )
            return play(player, rows)

    figures += play_part("desk", lambda player, some: play_desk(player, some, observations), desk)
    figures += play_part("coding", lambda player, some: play_marks(player, some, marks, observations), coding)
    others = [row for row in rows if row["id"].startswith("bfcl-multi")]
    if "others" in options.parts and others:
        with open_player(summary, options.window, options.reader) as player:
            play_others(player, others, observations)
    if not options.resume:
        figures += observations.draw(options.seed, VALUES)
    counter = TiktokenCounter(lambda _: None)
    sizes = {
        f"{what}, {kind}": mean(counter.count_each(texts, MODEL))
        for what, kinds in (("ledger", observations.ledgers), ("all stand-ins", observations.stand_ins))
        for kind, texts in kinds.items()
    }
    return {
        "summary": summary,
        "conversations": [len(desk), len(coding), len(others)],
        "values": len(observations.values),
        "figures": [asdict(each) | {"share": each.share, "is_met": each.is_met} for each in figures],
        "sizes": sizes,
    }


def _print(measured: Mapping[str, Any], show: int) -> None:
    print(f"| summary: {measured['summary']} | share | of | goal | met |\n| --- | --- | --- | --- | --- |")
    for each in measured["figures"]:
        share = "-" if each["share"] is None else f"{each['share']:.3f}"
        goal = "" if each["goal"] is None else f"{'≤' if each['at_most'] else '≥'} {each['goal']}"
        met = {True: "yes", False: "no", None: ""}[each["is_met"]]
        print(f"| {each['name']} | {share} | {each['hits']} of {each['of']} | {goal} | {met} |")
    for name, size in measured["sizes"].items():
        print(f"| mean tokens: {name} | {size:.0f} |  |  |  |")
    print()
    for each in measured["figures"] if show else ():
        for case in each["cases"][:show]:
            print(f"{each['name']}: {case}")
    print(flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure, print tables, and write the figures with their cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    parser.add_argument("--summary", default="none", help="none, poor, wrong, reader, or several")
    parser.add_argument("--reader", default="", help="base URL of the reader, ending in /v1")
    parser.add_argument("--parts", default="desk,coding,others")
    parser.add_argument("--window", type=int, default=6_000, help="of the model, in tokens")
    parser.add_argument("--sample", type=int, default=0, help="so many conversations of the desk; 0: all")
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--show", type=int, default=0, help="print so many cases of each figure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", type=Path, help="keep the figures of each conversation in this file")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if not options.folder.is_dir():
        print(f"skipped: there is no {options.folder}")
        return
    print(f"seed {options.seed}, window {options.window}\n")
    found = []
    for summary in options.summary.split(","):
        if summary == "reader" and not options.reader:
            print("reader: skipped, no --reader\n")
            continue
        found.append(measure(options, summary))
        _print(found[-1], options.show)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
