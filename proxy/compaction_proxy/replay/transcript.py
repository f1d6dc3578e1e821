"""Reading what a summary model is given: the sections of an earlier summary, and a numbered transcript.

Nothing here knows a particular conversation. A transcript's messages begin with lines such as
`[3] ASSISTANT:`, numbered without gaps; all before the first is preamble.
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
# Runs that get a text each, and the end of a conversation that is itself to be summarised.
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
MARK = re.compile(f"{_ADDRESS}|{_PATH}|{_AMOUNT}|{_CODE}")
PATH = re.compile(_PATH)


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One message of a transcript; `role` is in lower case."""

    role: str
    text: str

    def list_sentences(self) -> list[str]:
        """Its prose, without the lines that show tool calls."""
        return split_sentences(_CALL.sub("", self.text))

    def list_calls(self) -> list[str]:
        """Its tool calls as shown."""
        return [found["call"] for found in _CALL.finditer(self.text)]


@dataclass(frozen=True, slots=True)
class SummaryMaterial:
    """What is to be summarised: items of an earlier summary by section title in lower case, then messages."""

    earlier: dict[str, list[str]]
    entries: list[TranscriptEntry]

    def get_section(self, title: str) -> list[str]:
        """The items of the earlier summary under a title that contains the given words."""
        return [item for name, items in self.earlier.items() if title in name for item in items]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, white space joined; of lists without their bullets, of tables nothing."""
    found = (_BULLET.sub("", " ".join(piece.split())) for piece in _SENTENCE.split(text))
    return [piece for piece in found if piece and not piece.startswith(("#", "|"))]


def _find_entry_starts(text: str) -> Iterator[re.Match[str]]:
    """The lines that open a message: a number that does not follow the last one is part of a text."""
    expected: int | None = None
    for found in _ENTRY.finditer(text):
        number = int(found["number"])
        if expected is None or number == expected:
            expected = number + 1
            yield found


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
    """The transcripts of the runs that are to be summarised one by one; empty if there is one transcript."""
    return [found["text"] for found in _RUN.finditer(text)]


def is_summary_request(messages: Sequence[JsonObject]) -> bool:
    """Whether the last message asks for a summary of all the others."""
    return messages[-1]["role"] == "user" and _ALIGNED.search(extract_text(messages[-1])) is not None


def build_material(messages: Sequence[JsonObject]) -> SummaryMaterial:
    """The messages themselves, but for those that instruct."""
    said = [each for each in messages if each["role"] not in {"system", "developer"}]
    return SummaryMaterial({}, [TranscriptEntry(each["role"], extract_text(each)) for each in said])


def parse_transcript(text: str) -> SummaryMaterial:
    """Take apart what the summary model was sent. Text without any numbered message is one user message."""
    starts = list(_find_entry_starts(text))
    if not starts:
        return SummaryMaterial({}, [TranscriptEntry("user", text)])
    stops = [start.start() for start in starts[1:]] + [len(text)]
    entries = [
        TranscriptEntry(start["role"].lower(), _FENCE.sub("", text[start.end() : stop]).strip())
        for start, stop in zip(starts, stops, strict=True)
    ]
    return SummaryMaterial(_parse_sections(text[: starts[0].start()]), entries)
