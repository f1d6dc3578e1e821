"""How much of what the next turns use is at hand after compaction. No model is needed.

    uv run python bench/quality/coverage.py [FOLDER] [--summary none] [--keep FILE] [--json FILE] [--show N]

FOLDER holds conversations, one a line, `{id, messages, …}`; by default the small ones of `tests/fixtures`.
Each is played as it grew through the installed command, as a process: a request for each user turn and for
each cut. A cut is a place before an assistant message; cuts are spread evenly, and count if the proxy had
removed something. The window is the smallest of `WINDOWS` that has room for a quarter of the conversation, or
the largest.

**Needed** are the values (`judge.py`) in the next five assistant messages, their texts and the arguments of
their calls, that the conversation had shown before the cut. Values in the system prompt, in the tools and in
the names of arguments are always there and do not count. Nor does a value that a user or a tool shows again
before its use. **Removed** are those of the needed values that no message shows that was forwarded as the
client sent it.

The ways, for the same cuts:

- `forwarded`: what reached the provider.
- `forwarded + search`: the value is forwarded, or one call of the tool `memory_search` returns it. The query
  has the words of the line of the use without values that are not forwarded, and of the user's latest message
  if these are fewer than three.
- `cut off`: the last characters of the conversation, as many as were forwarded.
- `sliding window`: the newest whole messages that fit the window, less a quarter for the answer.
- `own summary`: the summary that the client's own compaction wrote, and the messages after it. A row holds
  them in `compactions`, `{summary, first_kept}`, by the index of the first message that was kept.

`--keep FILE` keeps the judged cuts of each conversation, one a line, and leaves out conversations that are
there. Figures are made from all lines. Intervals are of 95 %, by the bootstrap over conversations.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from frontier_lists import Forwarded
from player import FIXTURES, MODEL, Player, open_player, read_rows
from quality.judge import (
    JsonObject,
    find_interval,
    find_share,
    find_values,
    has_value,
    is_fixed,
    keep_end,
    keep_newest,
    read_contents,
    read_keys,
    read_text,
)
from quality.tables import print_coverage, write_figures

from compaction_proxy.providers.tokenizers import TiktokenCounter

AHEAD = 5
WINDOWS = (8_000, 12_000, 24_000)
CONVERSATION_SHARE, ANSWER_SHARE = 0.25, 0.25
QUERY_WORDS, LEAST_QUERY_WORDS = 24, 3
WAYS = ("forwarded", "forwarded + search", "cut off", "sliding window", "own summary")


@dataclass(frozen=True, slots=True)
class Need:
    """A value that an assistant message uses.

    Attributes:
        value: The value.
        line: Where it is used.
    """

    value: str
    line: str


class Timeline:
    """What a conversation shows and uses, message by message.

    Attributes:
        known: Values that are always there: of privileged messages, names of tools and of their arguments.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._messages: Sequence[JsonObject] = row["messages"]
        self._values = [find_values(read_text(each)) for each in self._messages]
        fixed = [read_text(each) for each in self._messages if is_fixed(each)]
        calls = [call["function"] for each in self._messages for call in each.get("tool_calls") or ()]
        names = [f"{call['name']} {' '.join(read_keys(call['arguments']))}" for call in calls]
        known = "\n".join([*fixed, *names, json.dumps(row.get("tools", ""))])
        self.known = frozenset(find_values(known))
        self._first: dict[str, int] = {}
        for index, values in enumerate(self._values):
            for value in values:
                self._first.setdefault(value, index)

    def find_needs(self, cut: int) -> Iterator[Need]:
        """What the assistant messages after a cut use of what was shown before."""
        known, left = set(self.known), AHEAD
        for index in range(cut, len(self._messages)):
            is_use = self._messages[index]["role"] == "assistant"
            left -= is_use
            if left < 0:
                return
            for value in self._values[index]:
                if is_use and value not in known and self._first[value] < cut:
                    lines = read_text(self._messages[index]).splitlines()
                    yield Need(value, next((line for line in lines if has_value(line, value)), value))
            known.update(self._values[index])


def list_cuts(messages: Sequence[JsonObject], most: int) -> list[int]:
    """Places before assistant messages, spread evenly; the last ones have less ahead."""
    cuts = [
        index
        for index, each in enumerate(messages)
        if each["role"] == "assistant" and index and messages[index - 1]["role"] in {"user", "tool"}
    ]
    stride = -(-len(cuts) // most)
    return cuts[::-1][::stride][::-1] if cuts else []


def write_query(need: Need, said: str, is_at_hand: Callable[[str], bool]) -> str:
    """What to search for: the words of the use, without values that are not at hand.

    A use with few words is searched for with the words of the user, too.
    """
    words = _list_words(need.line, is_at_hand)
    if len(words) < LEAST_QUERY_WORDS:
        words = list(dict.fromkeys([*words, *_list_words(said, is_at_hand)]))
    return " ".join(words[:QUERY_WORDS]) or "value"


def _list_words(text: str, is_at_hand: Callable[[str], bool]) -> list[str]:
    hidden = sorted((each for each in find_values(text) if not is_at_hand(each)), key=len, reverse=True)
    shown = re.sub("|".join(map(re.escape, hidden)), " ", text) if hidden else text
    return list(dict.fromkeys(re.findall(r"[\w./-]*[^\W\d_]{3,}[\w./-]*", shown)))


def judge_cut(
    player: Player, row: JsonObject, timeline: Timeline, forwarded: Forwarded, texts: Mapping[str, str]
) -> JsonObject | None:
    """Which needed values stand in the text of each way; None: nothing is needed or nothing was removed."""
    needs = list(timeline.find_needs(len(forwarded.client)))
    if not needs or not forwarded.is_compacted:
        return None
    kept = "\n".join(read_contents([each for each in forwarded.client if forwarded.holds(each)]))
    removed = [not has_value(kept, need.value) for need in needs]
    hits = {way: [has_value(text, need.value) for need in needs] for way, text in texts.items()}
    ours = texts["forwarded"]
    said = next(read_text(each) for each in reversed(forwarded.client) if each["role"] == "user")
    hits["forwarded + search"] = list(hits["forwarded"])
    misses = []
    for place, need in enumerate(needs):
        if not hits["forwarded"][place]:
            query = write_query(need, said, lambda value: value in timeline.known or has_value(ours, value))
            is_found = hits["forwarded + search"][place] = has_value(player.search(row, query), need.value)
            misses.append(asdict(need) | {"query": query, "is_found": is_found})
    full = sum(map(len, read_contents(forwarded.client)))
    return {
        "cut": len(forwarded.client),
        "round": forwarded.round,
        "needed": len(needs),
        "removed": sum(removed),
        "hits": {way: sum(found) for way, found in hits.items()},
        "removed_hits": {
            way: sum(hit for hit, gone in zip(found, removed, strict=True) if gone)
            for way, found in hits.items()
        },
        "sizes": {way: len(text) / max(1, full) for way, text in texts.items()},
        "misses": misses,
    }


def write_contexts(row: JsonObject, forwarded: Forwarded, tokens: Sequence[int], budget: int) -> JsonObject:
    """The text of each way at a cut, without what is part of every context."""
    client = forwarded.client
    texts, cut = read_contents(client), len(client)
    ours = "\n".join(read_contents(forwarded.messages))
    found = {
        "forwarded": ours,
        "cut off": keep_end(texts, len(ours)),
        "sliding window": keep_newest(texts, tokens[: len(texts)], budget),
    }
    own = list(takewhile(lambda each: each["first_kept"] < cut, row.get("compactions") or ()))
    if own:
        found["own summary"] = "\n".join(
            [own[-1]["summary"], *read_contents(client[own[-1]["first_kept"] :])]
        )
    return found


def play_row(player: Player, row: JsonObject, window: int, most: int) -> list[JsonObject]:
    """The judged cuts of a conversation."""
    messages = row["messages"]
    timeline = Timeline(row)
    fixed, tokens = count_tokens(row)
    budget = find_budget(window, fixed)
    cuts = list_cuts(messages, most)
    turns = {index + 1 for index, each in enumerate(messages) if each["role"] == "user"}
    judged = []

    def judge(cut: int, forwarded: Forwarded) -> None:
        if cut in cuts:
            texts = write_contexts(row, forwarded, tokens, budget)
            judged.append(judge_cut(player, row, timeline, forwarded, texts))

    player.play(row, sorted({*turns, *cuts}), judge)
    return [each for each in judged if each]


def count_tokens(row: JsonObject) -> tuple[int, list[int]]:
    """The tokens of what is part of every request, and those of each other message."""
    counter = TiktokenCounter(lambda _: None)
    counts = counter.count_each([read_text(each) for each in row["messages"]], MODEL)
    fixed = counter.count_each([json.dumps(row.get("tools", ""))], MODEL)[0]
    fixed += sum(count for count, each in zip(counts, row["messages"], strict=True) if is_fixed(each))
    return fixed, [count for count, each in zip(counts, row["messages"], strict=True) if not is_fixed(each)]


def find_budget(window: int, fixed: int) -> int:
    """The tokens for a conversation in a window: less the answer and what is part of every request."""
    return int(window * (1 - ANSWER_SHARE)) - fixed


def choose_window(fixed: int, tokens: int) -> int:
    """The smallest window whose budget is a quarter of the conversation, or the largest."""
    fitting = [each for each in WINDOWS if find_budget(each, fixed) >= tokens * CONVERSATION_SHARE]
    return min(fitting or WINDOWS[-1:])


def play_rows(rows: Sequence[JsonObject], summary: str, keep: Path | None, most: int) -> list[JsonObject]:
    """The judged cuts of each conversation; `keep` keeps them."""
    kept = keep.read_text("utf-8").splitlines() if keep and keep.exists() else []
    lines = [each for each in map(json.loads, kept) if each["summary"] == summary]
    done = {each["conversation"] for each in lines}
    left = []
    for row in (each for each in rows if each["id"] not in done):
        fixed, tokens = count_tokens(row)
        left.append((choose_window(fixed, sum(tokens)), row))
    for window in sorted({window for window, _ in left}):
        with open_player(summary, window, "") as player:
            for row in (row for each, row in left if each == window):
                began = time.monotonic()
                cuts = play_row(player, row, window, most)
                lines.append({"conversation": row["id"], "summary": summary, "window": window, "cuts": cuts})
                print(f"{row['id']}: {len(cuts)} cuts, {time.monotonic() - began:.0f} s", file=sys.stderr)
                if keep:
                    with keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(lines[-1], ensure_ascii=False) + "\n")
    return lines


def make_figures(lines: Sequence[JsonObject], seed: int) -> list[JsonObject]:
    """The share of each way, for all conversations and for each kind."""
    kinds = sorted({each["conversation"].partition("-")[0] for each in lines})
    found = []
    for kind in ["all", *kinds]:
        of_kind = [each for each in lines if kind in {"all", each["conversation"].partition("-")[0]}]
        for way in WAYS:
            cuts = {
                each["conversation"]: [cut for cut in each["cuts"] if way in cut["hits"]] for each in of_kind
            }
            figure: JsonObject = {"kind": kind, "way": way, "cuts": sum(map(len, cuts.values()))}
            for name, hits in (("needed", "hits"), ("removed", "removed_hits")):
                counts = {
                    row: [(cut[hits][way], cut[name]) for cut in of_row] for row, of_row in cuts.items()
                }
                flat = [count for each in counts.values() for count in each]
                figure[name] = {
                    "share": find_share(flat),
                    "of": sum(cases for _, cases in flat),
                    "interval": find_interval(counts, seed),
                }
            sizes = [cut["sizes"].get(way) for of_row in cuts.values() for cut in of_row]
            figure["size"] = find_share([(size, 1) for size in sizes if size is not None])
            if figure["cuts"]:
                found.append(figure)
    return found


def _show_misses(lines: Sequence[JsonObject], number: int) -> None:
    """The values that are missed at most cuts."""
    counts: Counter[tuple[str, str]] = Counter()
    uses: dict[tuple[str, str], JsonObject] = {}
    for row in lines:
        for cut in row["cuts"]:
            for miss in cut["misses"]:
                if not miss["is_found"]:
                    key = row["conversation"], miss["value"]
                    counts[key] += 1
                    uses[key] = miss | {"cut": cut["cut"]}
    for (conversation, value), count in counts.most_common(number):
        use = uses[conversation, value]
        print(f"{count} times {conversation} before {use['cut']}: {value!r} in {use['line'][:160]!r}")
        print(f"      query: {use['query']}")


def main(arguments: Sequence[str]) -> None:
    """Measure, print tables, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    parser.add_argument("--summary", default="none", help="none, poor, or both")
    parser.add_argument("--kinds", default="", help="only conversations whose ids begin so")
    parser.add_argument("--cuts", type=int, default=24, help="most cuts of a conversation")
    parser.add_argument("--quick", action="store_true", help="six cuts of a conversation, four of a kind")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--keep", type=Path, help="keep the judged cuts of each conversation in this file")
    parser.add_argument("--json", type=Path, help="put the figures into this file")
    parser.add_argument("--show", type=int, default=0, help="print the values that are missed most often")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"skipped: there is no {options.folder}")
        return
    rows = [row for row in read_rows(options.folder) if "messages" in row]
    kinds: dict[str, list[JsonObject]] = {}
    for row in rows:
        kinds.setdefault(row["id"].partition("-")[0], []).append(row)
    chosen = [
        row
        for kind, of_kind in kinds.items()
        if not options.kinds or kind in options.kinds.split(",")
        for row in of_kind[: 4 if options.quick else None]
    ]
    measured: JsonObject = {"seed": options.seed, "ahead": AHEAD, "windows": WINDOWS, "runs": []}
    for summary in options.summary.split(","):
        lines = play_rows(chosen, summary, options.keep, 6 if options.quick else options.cuts)
        figures = make_figures(lines, options.seed)
        run = {
            "summary": summary,
            "conversations": sum(bool(each["cuts"]) for each in lines),
            "figures": figures,
        }
        measured["runs"].append(run)
        print_coverage(measured | {"runs": [run]})
        _show_misses(lines, options.show)
    if options.json:
        write_figures(options.json, "coverage", measured)


if __name__ == "__main__":
    main(sys.argv[1:])
