"""A rule-based summary model: extracts, never invents, and works on any transcript.

What a user demanded or stated comes first, because nothing else can bring it back; then names and numbers,
findings, work done and errors, newest first. Each kind has its share of the size.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from compaction_proxy.replay.prompt_size import JsonObject, text_of
from compaction_proxy.replay.transcript import MARK, PATH, Entry, Material, aligned, conversation, read, runs

TARGET_TOKENS = 700
FRAME_TOKENS = 90  # headings, table head and labels
CLIP_CHARACTERS = 240
CELL_CHARACTERS = 110
CALL_CHARACTERS = 60
PENDING_ENTRIES = 12  # how far back an announced piece of work counts as pending

RULE = "Rule: "
STATED = "Stated by the user: "
NAMES = "Identifiers: "
TABLE_HEAD = "| File/Component | Action | Description |\n|----------------|--------|-------------|"

# Where the parts of a summary stand if the seven sections of `full` are asked for.
FULL_HEADINGS = {
    "### Completed Work": "2. Conversation Timeline and Progress",
    "### Key Technical Decisions": "3. Technical Context and Decisions",
    "### Current State": "5. Active Work and Last Actions (CRITICAL)",
    "### Pending Work": "6. Unresolved Issues and Pending Tasks",
}

_RULES = re.compile(
    r"\b(?:never|always|must(?: not|n't)|(?:you|we|it|this|that|everything) must|"
    r"from now on|under no circumstances|no matter what|make sure|"
    r"I (?:want|prefer|insist)|rule)\b|(?:^|[,;:] |\bplease )do(?:n't| not)\b",
    re.IGNORECASE,
)
_FINDINGS = re.compile(
    r"\b(?:root cause|because|decid\w+|instead of|the fix|turns? out|confirm\w*|explains?|we'll|so that|"
    r"agreed|chos\w+|which means)\b",
    re.IGNORECASE,
)
_PENDING = re.compile(
    r"\b(?:next|to ?do|still (?:need|have|open)|remain\w*|later|afterwards|tomorrow|follow[- ]up|"
    r"not yet|left to do|we need|pending|outstanding)\b",
    re.IGNORECASE,
)
_ERROR = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)|FAILED|ERROR|FATAL|Traceback|error:|mismatch)\b")
_ACTIONS = (
    (
        "Changed",
        re.compile(
            r"\b(?:fix|chang|edit|add|wrote|written|updat|patch|creat|remov|replac)\w*", re.IGNORECASE
        ),
    ),
    ("Ran", re.compile(r"\b(?:ran|run|test|execut|pass|fail)\w*", re.IGNORECASE)),
    ("Read", re.compile(r"\b(?:read|look|open|check|inspect|show|list|say|defin)\w*", re.IGNORECASE)),
)

Count = Callable[[str], int]


def _clip(text: str, characters: int = CLIP_CHARACTERS) -> str:
    if len(text) <= characters:
        return text
    return text[:characters].rsplit(" ", 1)[0] + " …"


def _within(items: Iterable[str], tokens: float, count: Count) -> list[str]:
    """The items that fit, taken in their order; one that is too large for what is left is passed over."""
    kept = []
    for item in items:
        cost = count(item) + 2
        if cost <= tokens:
            kept.append(item)
            tokens -= cost
    return kept


def _both_ends(items: Iterable[str], tokens: float, count: Count) -> list[str]:
    """The oldest in half of the room, so that what came first stays; the newest in what is left."""
    unique = list(dict.fromkeys(items))
    first = _within(unique, tokens / 2, count)
    left = tokens - sum(count(item) + 2 for item in first)
    last = _within((item for item in reversed(unique) if item not in first), left, count)
    chosen = {*first, *last}
    return [item for item in unique if item in chosen]


def _newest(items: Iterable[str], tokens: float, count: Count) -> list[str]:
    unique = list(dict.fromkeys(reversed(list(items))))
    return _within(unique, tokens, count)[::-1]


def _labelled(items: Sequence[str], label: str) -> list[str]:
    return [item.removeprefix(label) for item in items if item.startswith(label)]


def _sentences(entries: Iterable[Entry], *roles: str) -> list[str]:
    return [sentence for entry in entries if entry.role in roles for sentence in entry.sentences()]


def _statements(entries: Iterable[Entry]) -> tuple[list[str], list[str]]:
    """What users demanded, and what they stated with a name or number in it."""
    said = [_clip(sentence) for sentence in _sentences(entries, "user") if not sentence.endswith("?")]
    rules = [sentence for sentence in said if _RULES.search(sentence)]
    return rules, [sentence for sentence in said if MARK.search(sentence) and sentence not in rules]


def _names(entries: Iterable[Entry]) -> list[str]:
    """Paths, ids and amounts in prose: users' first, then the assistant's."""
    prose = [*_sentences(entries, "user"), *_sentences(entries, "assistant")]
    return [mark.rstrip(".,:") for sentence in prose for mark in MARK.findall(sentence)]


def _action(sentence: str) -> str:
    return next((name for name, pattern in _ACTIONS if pattern.search(sentence)), "Discussed")


def _cell(text: str, characters: int = CELL_CHARACTERS) -> str:
    return _clip(" ".join(text.split()), characters).replace("|", "/")


def _rows(entries: Sequence[Entry]) -> list[str]:
    """Table rows: files that the assistant spoke of, and calls with what was said about their results."""
    rows, called = [], ""
    for entry in entries:
        said = entry.sentences() if entry.role == "assistant" else []
        if said and called:
            rows.append(f"| {_cell(called, CALL_CHARACTERS)} | Called | {_cell(said[0])} |")
            called = ""
        for sentence in said:
            found = PATH.search(sentence)
            if found:
                rows.append(f"| {found[0].rstrip('.')} | {_action(sentence)} | {_cell(sentence)} |")
        called = next(iter(entry.calls()), called) if entry.role == "assistant" else called
    return rows


def _errors(entries: Sequence[Entry]) -> list[str]:
    """Lines that report an error, each with what was said about it next."""
    found = []
    for at, entry in enumerate(entries):
        line = next((line for line in entry.text.splitlines() if _ERROR.search(line)), None)
        if entry.role == "tool" and line:
            after = _sentences(entries[at + 1 : at + 2], "assistant")
            found.append(f"{_cell(line)} → {_cell(after[0]) if after else 'open'}")
    return found


def _current(entries: Sequence[Entry]) -> list[str]:
    asked, said = _sentences(entries, "user"), _sentences(entries, "assistant")
    return [
        f"Working on: {_clip(asked[-1]) if asked else 'the original task'}",
        f"Last completed: {_clip(said[-1]) if said else 'nothing yet'}",
    ]


def _constraints(material: Material, tokens: float, count: Count) -> list[str]:
    """The part of the decisions that survives every round: rules, statements, names."""
    earlier = material.section("key technical decisions")
    rules, stated = _statements(material.entries)
    listed = [name for line in _labelled(earlier, NAMES) for name in line.split(", ")]
    kept_rules = _both_ends([*_labelled(earlier, RULE), *rules], tokens * 0.40, count)
    kept_stated = _both_ends([*_labelled(earlier, STATED), *stated], tokens * 0.36, count)
    kept_names = _both_ends([*listed, *_names(material.entries)], tokens * 0.24, count)
    lines = [RULE + rule for rule in kept_rules] + [STATED + line for line in kept_stated]
    return lines + ([NAMES + ", ".join(kept_names)] if kept_names else [])


def _decisions(material: Material, tokens: float, count: Count) -> list[str]:
    earlier = [
        item
        for item in material.section("key technical decisions")
        if not item.startswith((RULE, STATED, NAMES))
    ]
    found = [_clip(text) for text in _sentences(material.entries, "assistant") if _FINDINGS.search(text)]
    return _newest([*earlier, *found], tokens, count)


def _pending(material: Material, tokens: float, count: Count) -> list[str]:
    recent = _sentences(material.entries[-PENDING_ENTRIES:], "user", "assistant")
    found = [_clip(sentence) for sentence in recent if _PENDING.search(sentence)]
    return _newest(found, tokens, count) or ["Go on with the latest request"]


def _completed(material: Material, tokens: float, count: Count) -> list[str]:
    earlier = [row for row in material.section("completed work") if "File/Component" not in row]
    return _newest([*earlier, *_rows(material.entries)], tokens, count)


def summarise(messages: Sequence[JsonObject], tokens: int, count: Count) -> str:
    """A summary of what the user messages hold, in at most about `tokens` tokens.

    It has the sections Completed Work, Key Technical Decisions, Current State, Pending Work and, where there
    were errors, Errors & Resolutions; or four sections of `full`, where those are asked for. Several runs get
    a text each, behind their marks; a conversation whose last message asks for its summary is summarised
    itself.
    """
    for_full = any(all(each in text_of(told) for each in FULL_HEADINGS.values()) for told in messages)
    if aligned(messages):
        text = _written(conversation(messages[:-1]), tokens, count)
        return _replace_headings(text, FULL_HEADINGS) if for_full else text
    given = "\n\n".join(text_of(message) for message in messages if message["role"] == "user")
    found = runs(given)
    if not found and for_full:
        earlier = _replace_headings(given, {full: own for own, full in FULL_HEADINGS.items()})
        return _replace_headings(_written(read(earlier), tokens, count), FULL_HEADINGS)
    if not found:
        return _written(read(given), tokens, count)
    texts = [_written(read(run), tokens // len(found), count) for run in found]
    return "\n\n".join(f"=== RUN {number} ===\n{text}" for number, text in enumerate(texts, 1))


def _replace_headings(text: str, headings: Mapping[str, str]) -> str:
    """Returns the text with lines that are headings replaced."""
    return "\n".join(headings.get(line, line) for line in text.split("\n"))


def _written(material: Material, tokens: int, count: Count) -> str:
    room = max(tokens - FRAME_TOKENS, tokens // 2)
    errors = [*material.section("errors"), *_errors(material.entries)]
    decisions = _constraints(material, room * 0.48, count) + _decisions(material, room * 0.12, count)
    parts = [
        ("Completed Work", [TABLE_HEAD, *_completed(material, room * 0.18, count)]),
        ("Key Technical Decisions", [f"- {line}" for line in decisions]),
        ("Current State", [f"- {line}" for line in _within(_current(material.entries), room * 0.08, count)]),
        ("Pending Work", [f"- [ ] {line}" for line in _pending(material, room * 0.06, count)]),
        ("Errors & Resolutions", [f"- {line}" for line in _newest(errors, room * 0.12, count)]),
    ]
    return "\n\n".join(
        f"### {title}\n" + "\n".join(lines) for title, lines in parts if lines or "Err" not in title
    )
