"""Writes summaries by rules, without a model: copies sentences from a transcript, and adds no statements.

The summary's tokens are divided between kinds of content. Demands and statements of users get the largest
share, because they cannot be recovered if they are lost. Names and numbers, findings, finished work and
errors have shares of their own.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from compaction_proxy.replay.prompt_size import JsonObject, extract_text
from compaction_proxy.replay.transcript import (
    IDENTIFIER_PATTERN,
    PATH_PATTERN,
    SummaryMaterial,
    TranscriptEntry,
    build_material,
    extract_runs,
    is_summary_request,
    parse_transcript,
)

TARGET_TOKENS = 700  # largest size of a summary
FRAME_TOKENS = 90  # assumed tokens of headings, table head and labels
CLIP_CHARACTERS = 240  # longest copied sentence
CELL_CHARACTERS = 110  # longest text in a table cell
CALL_CHARACTERS = 60  # longest tool call in a table cell
PENDING_ENTRIES = 12  # this many of the last messages are searched for pending work

RULE = "Rule: "
STATED = "Stated by the user: "
NAMES = "Identifiers: "
TABLE_HEAD = "| File/Component | Action | Description |\n|----------------|--------|-------------|"

# Maps the headings of this module to the headings of the summary format `full`, for which a prompt may ask.
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

CountTokens = Callable[[str], int]


def _clip_text(text: str, characters: int = CLIP_CHARACTERS) -> str:
    if len(text) <= characters:
        return text
    return text[:characters].rsplit(" ", 1)[0] + " …"


def _select_fitting(items: Iterable[str], tokens: float, count: CountTokens) -> list[str]:
    """Returns the items that fit into `tokens`, in order. An item that does not fit is skipped."""
    selected = []
    for item in items:
        cost = count(item) + 2
        if cost <= tokens:
            selected.append(item)
            tokens -= cost
    return selected


def _select_both_ends(items: Iterable[str], tokens: float, count: CountTokens) -> list[str]:
    """Returns the oldest items that fit into half of `tokens`, and the newest that fit into the rest.

    Repeated items are returned only once.
    """
    unique = list(dict.fromkeys(items))
    first = _select_fitting(unique, tokens / 2, count)
    left = tokens - sum(count(item) + 2 for item in first)
    last = _select_fitting((item for item in reversed(unique) if item not in first), left, count)
    chosen = {*first, *last}
    return [item for item in unique if item in chosen]


def _select_newest(items: Iterable[str], tokens: float, count: CountTokens) -> list[str]:
    unique = list(dict.fromkeys(reversed(list(items))))
    return _select_fitting(unique, tokens, count)[::-1]


def _strip_labels(items: Sequence[str], label: str) -> list[str]:
    return [item.removeprefix(label) for item in items if item.startswith(label)]


def _list_sentences(entries: Iterable[TranscriptEntry], *roles: str) -> list[str]:
    return [sentence for entry in entries if entry.role in roles for sentence in entry.list_sentences()]


def _extract_statements(entries: Iterable[TranscriptEntry]) -> tuple[list[str], list[str]]:
    """Returns the users' demands, and their other statements that contain a name or number."""
    statements = [
        _clip_text(sentence) for sentence in _list_sentences(entries, "user") if not sentence.endswith("?")
    ]
    rules = [sentence for sentence in statements if _RULES.search(sentence)]
    return rules, [
        sentence for sentence in statements if IDENTIFIER_PATTERN.search(sentence) and sentence not in rules
    ]


def _extract_identifiers(entries: Iterable[TranscriptEntry]) -> list[str]:
    """Returns the addresses, paths, ids and amounts in user messages, then those in assistant messages."""
    prose = [*_list_sentences(entries, "user"), *_list_sentences(entries, "assistant")]
    return [mark.rstrip(".,:") for sentence in prose for mark in IDENTIFIER_PATTERN.findall(sentence)]


def _classify_action(sentence: str) -> str:
    return next((name for name, pattern in _ACTIONS if pattern.search(sentence)), "Discussed")


def _format_cell(text: str, characters: int = CELL_CHARACTERS) -> str:
    return _clip_text(" ".join(text.split()), characters).replace("|", "/")


def _build_rows(entries: Sequence[TranscriptEntry]) -> list[str]:
    """Builds table rows for the files that the assistant mentions, and for tool calls.

    The description of a tool call is the first sentence of the next assistant message with text.
    """
    rows, call = [], ""
    for entry in entries:
        sentences = entry.list_sentences() if entry.role == "assistant" else []
        if sentences and call:
            rows.append(f"| {_format_cell(call, CALL_CHARACTERS)} | Called | {_format_cell(sentences[0])} |")
            call = ""
        for sentence in sentences:
            path = PATH_PATTERN.search(sentence)
            if path:
                rows.append(
                    f"| {path[0].rstrip('.')} | {_classify_action(sentence)} | {_format_cell(sentence)} |"
                )
        call = next(iter(entry.list_calls()), call) if entry.role == "assistant" else call
    return rows


def _extract_errors(entries: Sequence[TranscriptEntry]) -> list[str]:
    """Returns the first error line of each tool result, with the first sentence of the answer to it."""
    errors = []
    for index, entry in enumerate(entries):
        line = next((line for line in entry.text.splitlines() if _ERROR.search(line)), None)
        if entry.role == "tool" and line:
            after = _list_sentences(entries[index + 1 : index + 2], "assistant")
            errors.append(f"{_format_cell(line)} → {_format_cell(after[0]) if after else 'open'}")
    return errors


def _describe_current_state(entries: Sequence[TranscriptEntry]) -> list[str]:
    asked, said = _list_sentences(entries, "user"), _list_sentences(entries, "assistant")
    return [
        f"Working on: {_clip_text(asked[-1]) if asked else 'the original task'}",
        f"Last completed: {_clip_text(said[-1]) if said else 'nothing yet'}",
    ]


def _collect_constraints(material: SummaryMaterial, tokens: float, count: CountTokens) -> list[str]:
    """Returns lines with rules, statements and names, from an earlier summary and from the messages.

    Each line begins with a label, by which the next summary finds these lines in this one.
    """
    earlier = material.get_section("key technical decisions")
    rules, statements = _extract_statements(material.entries)
    names = [name for line in _strip_labels(earlier, NAMES) for name in line.split(", ")]
    kept_rules = _select_both_ends([*_strip_labels(earlier, RULE), *rules], tokens * 0.40, count)
    kept_stated = _select_both_ends([*_strip_labels(earlier, STATED), *statements], tokens * 0.36, count)
    kept_names = _select_both_ends([*names, *_extract_identifiers(material.entries)], tokens * 0.24, count)
    lines = [RULE + rule for rule in kept_rules] + [STATED + line for line in kept_stated]
    return lines + ([NAMES + ", ".join(kept_names)] if kept_names else [])


def _collect_decisions(material: SummaryMaterial, tokens: float, count: CountTokens) -> list[str]:
    earlier = [
        item
        for item in material.get_section("key technical decisions")
        if not item.startswith((RULE, STATED, NAMES))
    ]
    findings = [
        _clip_text(text) for text in _list_sentences(material.entries, "assistant") if _FINDINGS.search(text)
    ]
    return _select_newest([*earlier, *findings], tokens, count)


def _collect_pending(material: SummaryMaterial, tokens: float, count: CountTokens) -> list[str]:
    recent = _list_sentences(material.entries[-PENDING_ENTRIES:], "user", "assistant")
    pending = [_clip_text(sentence) for sentence in recent if _PENDING.search(sentence)]
    return _select_newest(pending, tokens, count) or ["Go on with the latest request"]


def _collect_completed(material: SummaryMaterial, tokens: float, count: CountTokens) -> list[str]:
    earlier = [row for row in material.get_section("completed work") if "File/Component" not in row]
    return _select_newest([*earlier, *_build_rows(material.entries)], tokens, count)


def summarize_messages(messages: Sequence[JsonObject], tokens: int, count: CountTokens) -> str:
    """Writes the summary for which a summary call asks, in about `tokens` tokens at most.

    In an aligned call, the last message is the prompt, and the messages before it are summarised. In any
    other call, the user messages are the prompt, and the transcript in it is summarised. A prompt may contain
    the transcripts of several runs of messages. Then each run gets its own summary, after a line with its
    number.

    A summary has the sections Completed Work, Key Technical Decisions, Current State, Pending Work and, if
    there were errors, Errors & Resolutions. If the prompt asks for the format `full`, the first four sections
    have the headings of that format.

    Args:
        messages: The messages of the summary call.
        tokens: Size of the summary.
        count: Counts the tokens of a text.
    """
    for_full = any(all(each in extract_text(told) for each in FULL_HEADINGS.values()) for told in messages)
    if is_summary_request(messages):
        text = _write_summary(build_material(messages[:-1]), tokens, count)
        return _replace_headings(text, FULL_HEADINGS) if for_full else text
    prompt = "\n\n".join(extract_text(message) for message in messages if message["role"] == "user")
    runs = extract_runs(prompt)
    if not runs and for_full:
        earlier = _replace_headings(prompt, {full: own for own, full in FULL_HEADINGS.items()})
        return _replace_headings(_write_summary(parse_transcript(earlier), tokens, count), FULL_HEADINGS)
    if not runs:
        return _write_summary(parse_transcript(prompt), tokens, count)
    texts = [_write_summary(parse_transcript(run), tokens // len(runs), count) for run in runs]
    return "\n\n".join(f"=== RUN {number} ===\n{text}" for number, text in enumerate(texts, 1))


def _replace_headings(text: str, headings: Mapping[str, str]) -> str:
    """Replaces each line that is a key of `headings` by its value."""
    return "\n".join(headings.get(line, line) for line in text.split("\n"))


def _write_summary(material: SummaryMaterial, tokens: int, count: CountTokens) -> str:
    room = max(tokens - FRAME_TOKENS, tokens // 2)
    errors = [*material.get_section("errors"), *_extract_errors(material.entries)]
    decisions = _collect_constraints(material, room * 0.48, count) + _collect_decisions(
        material, room * 0.12, count
    )
    parts = [
        ("Completed Work", [TABLE_HEAD, *_collect_completed(material, room * 0.18, count)]),
        ("Key Technical Decisions", [f"- {line}" for line in decisions]),
        (
            "Current State",
            [
                f"- {line}"
                for line in _select_fitting(_describe_current_state(material.entries), room * 0.08, count)
            ],
        ),
        ("Pending Work", [f"- [ ] {line}" for line in _collect_pending(material, room * 0.06, count)]),
        ("Errors & Resolutions", [f"- {line}" for line in _select_newest(errors, room * 0.12, count)]),
    ]
    return "\n\n".join(
        f"### {title}\n" + "\n".join(lines) for title, lines in parts if lines or "Err" not in title
    )
