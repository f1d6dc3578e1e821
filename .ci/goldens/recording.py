"""What is kept of a run: cases with named parts, made free of chance, as digests and in full."""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Part name -> anything that JSON can hold.
Case = dict[str, Any]

DIGEST_DIGITS = 12
SHOWN_CHARACTERS = 160
SHOWN_DIFFERENCES = 6
# The last digits of a sum of fractions depend on the order of its parts: answers that arrive at the same time.
FRACTION_DIGITS = 9

# Fields of JSON whose number is a time, a duration or a size of the machine; their type is kept.
_CHANCE = re.compile(
    r"(^|_)(at|since|until|time|times|timestamp|created|created_at|started|ended|expires|seconds|s|ms|hour|day|now)$"
    r"|duration|uptime|memory|pid|time_to_first|(^|\.)overhead$|(^|-)overhead-ms$"
)
_SUBSTITUTIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\b[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", "<date>"),
        (r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00| UTC)?", "<date>"),
        (r"(?<=>)20\d\d-\d\d-\d\d(T\d\d)?(?=<)", "<day or hour>"),
        (r"\bhttp://127\.0\.0\.1:\d{5}\b", "<proxy>"),
        (r"\b00-[0-9a-f]{32}-[0-9a-f]{16}-0\d\b", "<traceparent>"),
        (r"compaction-proxy:1:[A-Za-z0-9_=+/-]+", "<sealed item>"),
        (r"\b0x[0-9a-f]{8,}\b", "<address>"),
        (r"\brun-[0-9a-f]{16}\b", "<run>"),
        (r"\b[\d.,]+ [KMGT]?i?B free\b", "<size> free"),
        (r"\b[\d,]+(?= bytes of request bodies at once\b)", "<size>"),
        (r"(?m)\b\d{1,3},\d{3}(?= at most$)", "<number>"),
        (r"\bin \d+ ms\b|\bby \d+ s\b", "<duration>"),
        (r'(?<="created_at": )\d{10}\b|(?<="created_at":)\d{10}\b|(?<="completed_at": )\d{10}\b', "<time>"),
    )
)
# Random ids, numbered by their first appearance in a case.
_IDS = re.compile(
    r"\b(?:c|e|r|resp|cmp|msg|req)_[0-9a-f]{16,}\b|\b01[0-9a-f]{24,30}\b|\b[0-9a-f]{32}\b"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)


def is_chance(name: str) -> bool:
    """Whether the number of a field of this name is a time, a duration or a size of the machine."""
    return bool(_CHANCE.search(name))


class Normalizer:
    """Takes chance out of a case: times, ports, folders and random ids.

    Equal ids stay equal within a case: each is replaced by its number of appearance.

    Args:
        texts: Text that stands for chance, such as the address of a port, and what replaces it.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = sorted(texts.items(), key=lambda pair: -len(pair[0]))
        self._ids: dict[str, str] = {}

    def _number(self, found: re.Match[str]) -> str:
        kind = found[0].partition("_")[0] + " " if "_" in found[0] else "id "
        return self._ids.setdefault(found[0], f"<{kind}{len(self._ids) + 1}>")

    def clean_text(self, text: str) -> str:
        """Returns the text without chance."""
        for old, new in self._texts:
            text = text.replace(old, new)
        for pattern, new in _SUBSTITUTIONS:
            text = pattern.sub(new, text)
        return _IDS.sub(self._number, text)

    def clean(self, value: Any, name: str = "") -> Any:
        """Returns a value of JSON without chance.

        Args:
            value: The value.
            name: The field that it stands in. A number of a field that holds a time becomes its type.
        """
        if isinstance(value, dict):
            value = _drop_descriptions(value) if "openapi" in value else value
            return {self.clean_text(str(key)): self.clean(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(each, name) for each in value]
        if isinstance(value, bytes):
            return self.clean_body(value)
        if isinstance(value, str):
            return self._clean_string(value, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and is_chance(name):
            return f"<{type(value).__name__}>"
        return _round_fraction(value) if isinstance(value, float) else value

    def _clean_string(self, value: str, name: str) -> str:
        if re.fullmatch(r"-?\d+(\.\d+)?", value) and is_chance(name):
            return "<number>"
        if name == "of" and re.fullmatch(r"20\d\d-\d\d-\d\d(T\d\d)?", value):
            return "<day or hour>"
        if re.fullmatch(r"-?\d+\.\d{10,}", value):
            return str(_round_fraction(float(value)))
        return self.clean_text(value)

    def clean_body(self, body: bytes) -> Any:
        """Returns a body without chance.

        It stays text, so that no byte of what is relayed is lost; what is no text becomes a digest.
        """
        try:
            text = body.decode()
        except UnicodeDecodeError:
            return f"<{len(body)} bytes, sha256 {hashlib.sha256(body).hexdigest()[:40]}>"
        return self.clean_text(text)


def _drop_descriptions(value: Any) -> Any:
    """Returns an OpenAPI document without its descriptions: they are prose, and no client depends on them."""
    if isinstance(value, dict):
        return {
            name: _drop_descriptions(each)
            for name, each in value.items()
            if not (name in {"description", "summary"} and isinstance(each, str))
        }
    return [_drop_descriptions(each) for each in value] if isinstance(value, list) else value


def _round_fraction(value: float) -> float:
    return float(f"{round(value, FRACTION_DIGITS):.{FRACTION_DIGITS}g}")


def digest(value: Any) -> str:
    """Returns a short digest of a value of JSON; the order of members counts."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:DIGEST_DIGITS]


class Recording:
    """All cases of a run.

    Attributes:
        cases: Name of a case -> its parts, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def add(self, name: str, case: Case) -> None:
        """Add a case; its name stands once."""
        if name in self.cases:
            raise ValueError(f"{name} is recorded already")
        self.cases[name] = case

    def digests(self) -> dict[str, dict[str, str]]:
        """Returns the digest of each part of each case."""
        return {
            name: {part: digest(value) for part, value in case.items()}
            for name, case in sorted(self.cases.items())
        }

    def write(self, folder: Path) -> None:
        """Write everything into a folder, a file for each group of cases."""
        groups: dict[str, dict[str, Case]] = {}
        for name, case in self.cases.items():
            groups.setdefault(name.rpartition("/")[0] or name, {})[name] = case
        for group, cases in groups.items():
            path = folder / f"{group.replace('/', '.')}.json.gz"
            with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
                json.dump(cases, file)

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        """Returns what `write` has written."""
        recording = cls()
        for path in sorted(folder.glob("*.json.gz")):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                recording.cases |= json.load(file)
        return recording


def _cut(text: str, at: int) -> str:
    start = max(0, at - SHOWN_CHARACTERS // 3)
    piece = text[start : start + SHOWN_CHARACTERS]
    return ("…" if start else "") + piece + ("…" if start + SHOWN_CHARACTERS < len(text) else "")


def _show(one: Any, other: Any) -> tuple[str, str]:
    """Two values as short texts, cut around the first character that differs."""
    texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in (one, other)]
    at = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return _cut(texts[0], at), _cut(texts[1], at)


def find_differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yields a description of each place in which two values of JSON differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{place}.{key}" if place else str(key)
            if key not in other:
                yield f"{inner}: is missing, was {_show(one[key], '')[0]}"
            elif key not in one:
                yield f"{inner}: is new: {_show('', other[key])[1]}"
            else:
                yield from find_differences(one[key], other[key], inner)
        if list(one) != list(other) and set(one) == set(other):
            yield f"{place}: the order of members differs"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from find_differences(*pair, f"{place}[{number}]")
    elif one != other or type(one) is not type(other):
        if isinstance(one, list) and isinstance(other, list):
            yield f"{place}: {len(one)} entries became {len(other)}"
            for number, pair in enumerate(zip(one, other, strict=False)):
                found = next(find_differences(*pair, f"{place}[{number}]"), None)
                if found:
                    yield found
                    break
            return
        was, is_now = _show(one, other)
        yield f"{place}:\n      was {was}\n      is  {is_now}"


def compare_recordings(one: Recording, other: Recording) -> list[str]:
    """Returns what differs between two recordings, a line or three for each place; empty where they are equal."""
    lines: list[str] = []
    for name in sorted({*one.cases, *other.cases}):
        if name not in other.cases or name not in one.cases:
            lines.append(f"{name}: only in the {'first' if name in one.cases else 'second'} recording")
            continue
        found = list(find_differences(one.cases[name], other.cases[name]))
        if found:
            lines.append(name)
            lines += [f"    {each}" for each in found[:SHOWN_DIFFERENCES]]
            lines += (
                [f"    … and {len(found) - SHOWN_DIFFERENCES} more"] if len(found) > SHOWN_DIFFERENCES else []
            )
    return lines


def compare_digests(
    known: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]], *, whole: bool
) -> list[str]:
    """Returns the cases and parts whose digests differ, a line each.

    Args:
        known: Digests that are kept.
        found: Digests of this run.
        whole: Whether this run has all cases, so that a case that it lacks is a difference.
    """
    lines = []
    for name in sorted({*known, *found} if whole else set(found)):
        if name not in known:
            lines.append(f"{name}: is new")
        elif name not in found:
            lines.append(f"{name}: is missing")
        else:
            parts = [
                part
                for part in {**known[name], **found[name]}
                if known[name].get(part) != found[name].get(part)
            ]
            lines += [f"{name}: {', '.join(parts)}"] if parts else []
    return lines
