"""How well search finds what questions are about, and how fast.

    uv run python bench/retrieval.py FOLDER [--ablate]

FOLDER holds conversations, one a line, `{id, messages, qa}`: `memory_qa.jsonl`, whose `qa` lists `{question,
adversarial, evidence_msgs}`, and `coding_aider.jsonl` for its longest. A question counts if its evidence is
known, whether or not it can be answered ("answerable" leaves those out that are there to mislead); it is
found if any message of its evidence is among the first five hits by the words of the question. The parameters
are those that the first half of the conversations prefers; the second had no say. `--ablate` says what each
part of the ranking is worth, and what FTS5 alone reaches.
"""

import argparse
import json
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

from compaction_proxy.recall.fulltext import SqliteTextIndexBuilder
from compaction_proxy.recall.ranking import RankingParameters
from compaction_proxy.recall.stems import stem_word

JsonObject = dict[str, Any]
Search = Callable[[str], Sequence[int]]

HITS = 5
WARM_QUERIES = 1_000
PLANTED = 100
CHOSEN_BY = ("locomo-conv-26", "locomo-conv-41", "bfcl-memory-customer")
DEFAULT = RankingParameters()
ABLATIONS: Mapping[str, RankingParameters] = {
    "as it is": DEFAULT,
    "without neighbours": replace(DEFAULT, neighbour_weights=()),
    "one neighbour": replace(DEFAULT, neighbour_weights=(0.5,)),
    "two neighbours": replace(DEFAULT, neighbour_weights=(0.5, 0.25)),
    "without irregular forms": replace(DEFAULT, find_root=stem_word),
    "without stems": replace(DEFAULT, find_root=str),
    "without stop words": replace(DEFAULT, stop_words=frozenset()),
    "length 0.75": replace(DEFAULT, length_weight=0.75),
    "length 0.25": replace(DEFAULT, length_weight=0.25),
    "saturation 0.8": replace(DEFAULT, saturation=0.8),
    "saturation 2": replace(DEFAULT, saturation=2.0),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was asked.

    Attributes:
        kind: Which set it is of.
        chosen_by: Whether its conversation had a say when the ranking was chosen.
        answerable: Whether the conversation answers it.
        found: Whether any message of its evidence was among the first hits.
    """

    kind: str
    chosen_by: bool
    answerable: bool
    found: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """What an index of a long conversation costs, in seconds of CPU and bytes.

    Attributes:
        characters: Length of the conversation.
        build_s: Making the index.
        size_bytes: Memory it takes, with the texts.
        warm_s: Each of many searches.
    """

    characters: int
    build_s: float
    size_bytes: int
    warm_s: list[float]


class Passage(NamedTuple):
    """A message that an archive would hold.

    Attributes:
        position: Its index in the conversation.
        text: Its text.
    """

    position: int
    text: str


def rows(file: Path) -> list[JsonObject]:
    """The conversations of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def passages(row: JsonObject) -> list[Passage]:
    """The messages that an archive would hold."""
    return [
        Passage(index, message.get("content") or "")
        for index, message in enumerate(row["messages"])
        if message["role"] not in {"system", "developer"}
    ]


def ranked(ranking: RankingParameters) -> Callable[[Sequence[Passage]], Search]:
    """Our index with a ranking."""

    def build(held: Sequence[Passage]) -> Search:
        index = SqliteTextIndexBuilder(ranking).build([passage.text for passage in held])
        return lambda query: [found.document_index for found in index.search(query, HITS)]

    return build


def plain(reach: int) -> Callable[[Sequence[Passage]], Search]:
    """FTS5 with its own stems and its own BM25, each message with so many neighbours as one text."""

    def build(held: Sequence[Passage]) -> Search:
        database = sqlite3.connect(":memory:")
        database.execute("CREATE VIRTUAL TABLE told USING fts5(text, tokenize='porter unicode61')")
        for place in range(len(held)):
            around = held[max(0, place - reach) : place + reach + 1]
            text = " ".join(passage.text for passage in around)
            database.execute("INSERT INTO told (rowid, text) VALUES (?, ?)", (place, text))
        return lambda query: [place for (place,) in database.execute(_ANY, (_any(query), HITS))]

    return build


_ANY = "SELECT rowid FROM told WHERE told MATCH ? ORDER BY rank LIMIT ?"


def _any(query: str) -> str:
    return " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))


def questions(file: Path, build: Callable[[Sequence[Passage]], Search]) -> Iterator[Asked]:
    """Every question whose evidence is known, asked of the conversation that it is about."""
    for row in rows(file):
        held = passages(row)
        search = build(held)
        for each in row["qa"]:
            if each["evidence_msgs"]:
                hits = {held[place].position for place in search(each["question"])}
                yield Asked(
                    kind=row["id"].partition("-")[0],
                    chosen_by=row["id"] in CHOSEN_BY,
                    answerable=not each.get("adversarial", False),
                    found=not hits.isdisjoint(each["evidence_msgs"]),
                )


def recall(asked: Sequence[Asked], kind: str, **wanted: bool) -> float:
    """Share of the questions of a set that were found, of those with the wanted attributes."""
    of_kind = [each for each in asked if each.kind == kind]
    return mean(
        each.found for each in of_kind if all(getattr(each, key) == held for key, held in wanted.items())
    )


def longest(folder: Path) -> list[Passage]:
    """The longest conversation of a developer, of about 265,000 tokens in the file this was written for."""
    return max(
        (passages(row) for row in rows(folder / "coding_aider.jsonl")),
        key=lambda held: sum(len(passage.text) for passage in held),
    )


def speed(held: Sequence[Passage], queries: int = WARM_QUERIES) -> Speed:
    """What it costs to make an index and to search it, once for each query, by words of the texts."""
    began = time.process_time()
    index = SqliteTextIndexBuilder().build([passage.text for passage in held])
    built = time.process_time() - began
    words = re.findall(r"\S+", " ".join(passage.text for passage in held))
    rng = random.Random(1)
    warm = []
    for _ in range(queries):
        query = " ".join(rng.choices(words, k=rng.randint(1, 12))).replace('"', " ")
        began = time.process_time()
        index.search(query, HITS)
        warm.append(time.process_time() - began)
    return Speed(sum(len(passage.text) for passage in held), built, index.size_bytes, warm)


def planted(held: Sequence[Passage], number: int = PLANTED) -> Mapping[str, float]:
    """Share of names of each kind that are the first hit where they were put, one message each."""
    rng = random.Random(2)
    kinds: Mapping[str, Callable[[], str]] = {
        "ids": lambda: f"ORD-{rng.randrange(10**6):06d}",
        "uuids": lambda: "-".join(f"{rng.randrange(16**n):0{n}x}" for n in (8, 4, 4, 4, 12)),
        "paths": lambda: f"src/{rng.choice(('store', 'relay'))}/part_{rng.randrange(10**5)}.py",
        "amounts": lambda: f"${rng.randrange(1_000, 10**6):,}.{rng.randrange(100):02d}",
        "error codes": lambda: f"ERR_{rng.choice(('IO', 'NET'))}_{rng.randrange(10**5)}",
        "versions": lambda: f"v{rng.randrange(99)}.{rng.randrange(99)}.{rng.randrange(999)}",
    }
    texts = [passage.text.split(" ") for passage in held]
    names = {kind: {made(): rng.randrange(len(texts)) for _ in range(number)} for kind, made in kinds.items()}
    for name, place in (each for put in names.values() for each in put.items()):
        texts[place].insert(rng.randint(0, len(texts[place])), name)
    search = ranked(DEFAULT)([Passage(0, " ".join(words)) for words in texts])
    return {
        kind: mean(search(name)[:1] == [place] for name, place in put.items()) for kind, put in names.items()
    }


def _line(name: str, asked: Sequence[Asked]) -> str:
    shares = [
        recall(asked, kind, **wanted)
        for kind in sorted({each.kind for each in asked}, reverse=True)
        for wanted in ({}, {"answerable": True}, {"chosen_by": True}, {"chosen_by": False})
    ]
    return "| " + " | ".join([name, *(f"{share:.3f}" for share in shares)]) + " |"


def _tables(folder: Path, *, ablate: bool) -> Iterator[str]:
    file = folder / "memory_qa.jsonl"
    builds = {name: ranked(ranking) for name, ranking in ABLATIONS.items()}
    builds |= {"FTS5 alone": plain(0), "FTS5, one neighbour on each side": plain(1)}
    heads = [
        f"{kind}{what}"
        for kind in ("LoCoMo", "BFCL")
        for what in ("", ", answerable", ", first half", ", second half")
    ]
    yield "| recall@5 | " + " | ".join(heads) + " |"
    yield "| --- |" + " --- |" * len(heads)
    for name, build in list(builds.items())[: None if ablate else 1]:
        yield _line(name, list(questions(file, build)))
    yield ""
    held = longest(folder)
    cost = speed(held)
    percentiles = quantiles(cost.warm_s, n=100)
    yield "| characters | index made in s | MB | search p50 ms | p99 ms |"
    yield "| --- | --- | --- | --- | --- |"
    figures = [f"{cost.characters}", f"{cost.build_s:.2f}", f"{cost.size_bytes / 1e6:.1f}"]
    figures += [f"{1e3 * percentiles[at]:.1f}" for at in (49, 98)]
    yield "| " + " | ".join(figures) + " |"
    yield ""
    shares = planted(held)
    yield "| planted, first hit | " + " | ".join(shares) + " |"
    yield "| --- |" + " --- |" * len(shares)
    yield "|  | " + " | ".join(f"{share:.0%}" for share in shares.values()) + " |"


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Retrieval of evidence.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ablate", action="store_true", help="also without one part at a time")
    options = parser.parse_args(arguments)
    absent = [
        name for name in ("memory_qa.jsonl", "coding_aider.jsonl") if not (options.folder / name).is_file()
    ]
    if absent:
        print(f"skipped: {options.folder} has no {' and no '.join(absent)}")
        return
    for line in _tables(options.folder, ablate=options.ablate):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
