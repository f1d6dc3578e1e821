"""Parses the prompt of a summary call: the sections of an earlier summary, and a numbered transcript.

Each message of a transcript begins with a line such as `[3] ASSISTANT:`. The numbers are consecutive. The
text before the first such line may hold the earlier summary.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compaction_proxy.replay.prompt_size import JsonObject, extract_text

_ENTRY = re.compile(
    r"^\[(?P<number>\d+)\] (?P<role>USER|ASSISTANT|TOOL|FUNCTION|SYSTEM|DEVELOPER)(?: \([^)\n]*\))?: ?",
    re.MULTILINE,
)
_FENCE = re.compile(r"^\s*(?:</?[\w-]+>|-{3,}|={3,}|`{3,}.*)\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)\s*$")
_ITEM = re.compile(r"^\s*(?:[-*] (?:\[.\] )?(?P<bullet>.+)|(?P<row>\|.+\|))\s*$")
_RULER = re.compile(r"^\|[\s|:-]+\|$")
_BULLET = re.compile(r"^- (?:\[.\] )?")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(`€$£])|\n+")
# `_RUN` matches the transcript of a run of messages that gets its own summary. `_ALIGNED` recognises the
# prompt of an aligned call, which follows the conversation.
_RUN = re.compile(
    r"^<run-(?P<number>\d+)-(?P<mark>\w+)>\n(?P<text>.*?)\n</run-(?P=number)-(?P=mark)>$",
    re.MULTILINE | re.DOTALL,
)
_ALIGNED = re.compile(r"^The conversation is everything above this message\.", re.MULTILINE)
_CALL = re.compile(r"^\[(?:Tool|Call)\w*: ?(?P<call>\w+\(.*)\]$", re.MULTILINE | re.IGNORECASE)

_PATH = r"(?<![\w/.-])(?:~?/[\w.-]+(?:/[\w.-]+)+|(?:[\w.-]+/)+[\w-]+\.[A-Za-z]\w{0,7})"
_CODE = r"\b[A-Z][A-Z0-9]*(?:-[A-Z0-9]+)*-?\d[A-Z0-9-]*\b|\b[a-z]{2,}_[A-Za-z0-9]*\d\w*\b"
_AMOUNT = r"[€$£] ?\d[\d.,]*\d|\b\d[\d.,]*\d ?(?:EUR|USD|GBP)\b"
_ADDRESS = r"\bhttps?://[^\s)>\"']+|\b[\w.+-]+@[\w-]+\.[\w.]+\b"
IDENTIFIER_PATTERN = re.compile(f"{_ADDRESS}|{_PATH}|{_AMOUNT}|{_CODE}")
PATH_PATTERN = re.compile(_PATH)


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One message of a transcript: its role in lower case, and its text."""

    role: str
    text: str

    def list_sentences(self) -> list[str]:
        """Returns the sentences of the message, without the lines that show tool calls."""
        return split_sentences(_CALL.sub("", self.text))

    def list_calls(self) -> list[str]:
        """Returns the tool calls of the message as the transcript shows them."""
        return [found["call"] for found in _CALL.finditer(self.text)]


@dataclass(frozen=True, slots=True)
class SummaryMaterial:
    """The material for a summary.

    Attributes:
        earlier: The items of an earlier summary, by the title of their section in lower case.
        entries: The messages to summarise.
    """

    earlier: dict[str, list[str]]
    entries: list[TranscriptEntry]

    def get_section(self, title: str) -> list[str]:
        """Returns the items of all sections of the earlier summary whose title contains `title`."""
        return [item for name, items in self.earlier.items() if title in name for item in items]


def split_sentences(text: str) -> list[str]:
    """Splits a text into sentences with single spaces. Leaves out headings, tables and bullet marks."""
    pieces = (_BULLET.sub("", " ".join(piece.split())) for piece in _SENTENCE.split(text))
    return [piece for piece in pieces if piece and not piece.startswith(("#", "|"))]


def _find_entry_starts(text: str) -> Iterator[re.Match[str]]:
    """Yields the matches of the lines with which messages begin.

    The numbers of these lines are consecutive. A line with any other number is part of a message's text.
    """
    expected: int | None = None
    for match in _ENTRY.finditer(text):
        number = int(match["number"])
        if expected is None or number == expected:
            expected = number + 1
            yield match


def _parse_sections(text: str) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        heading, item = _HEADING.match(line), _ITEM.match(line)
        if heading:
            title = heading["title"].lower()
        elif item and not _RULER.match(line.strip()):
            sections.setdefault(title, []).append(item["bullet"] or item["row"])
    return sections


def extract_runs(text: str) -> list[str]:
    """Returns the transcripts of the runs that get separate summaries; empty if the prompt marks no runs."""
    return [found["text"] for found in _RUN.finditer(text)]


def is_summary_request(messages: Sequence[JsonObject]) -> bool:
    """Returns whether the last message asks for a summary of all the others."""
    return messages[-1]["role"] == "user" and _ALIGNED.search(extract_text(messages[-1])) is not None


def build_material(messages: Sequence[JsonObject]) -> SummaryMaterial:
    """Converts messages to summary material, without system and developer messages."""
    spoken = [each for each in messages if each["role"] not in {"system", "developer"}]
    return SummaryMaterial({}, [TranscriptEntry(each["role"], extract_text(each)) for each in spoken])


def parse_transcript(text: str) -> SummaryMaterial:
    """Parses the prompt of a summary call. A text without numbered messages counts as one user message."""
    starts = list(_find_entry_starts(text))
    if not starts:
        return SummaryMaterial({}, [TranscriptEntry("user", text)])
    stops = [start.start() for start in starts[1:]] + [len(text)]
    entries = [
        TranscriptEntry(start["role"].lower(), _FENCE.sub("", text[start.end() : stop]).strip())
        for start, stop in zip(starts, stops, strict=True)
    ]
    return SummaryMaterial(_parse_sections(text[: starts[0].start()]), entries)
