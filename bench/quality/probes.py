"""What a model still answers after compactions: questions with one exact answer from real conversations.

    uv run python bench/quality/probes.py [FOLDER] [--tasks FILE] [--json FILE]
    uv run python bench/quality/probes.py FOLDER --reader URL --answers FILE [--minutes N] [--tasks FILE]

FOLDER holds conversations, one a line, `{id, messages, …}`; by default the small ones of `tests/fixtures`.
Each is played as it grew through the installed command, as a process, with a small window. After compactions
1, 3 and 5 it is cut, and code makes questions about what it holds so far (`questions.py`). The reader gets
each question with one of these texts:

- `full history`: all messages, if they have at most 6,000 tokens (`--full-tokens`).
- `forwarded`: what reached the provider.
- `forwarded + search`: and what one call of the tool `memory_search` returns for the words of the question,
  without its quotation marks, which would ask for a phrase.
- `cut off`: the last characters of the conversation, as many as were forwarded.
- `oracle`: only the passage with the answer. What the reader misses here it cannot read.

The system prompt belongs to none of them, and no answer occurs there. An answer is right if it is the exact
value or contains it, and names no value that was replaced.

`--reader URL` is an OpenAI-compatible endpoint, ending in /v1. `--answers FILE` keeps each answer by the
digest of its request, one a line; the figures are made from that file, so a run can go on in another session.
`--tasks FILE` keeps the texts and questions. Without a reader, only `present` is measured: in how many texts
the answer occurs at all, which is the most that any reader can reach.

`write loss` is what the forwarded text no longer holds; `read loss` is what it holds and the reader misses.
"""

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import httpx
from frontier_lists import Forwarded
from player import FIXTURES, MODEL, Player, open_player, read_rows
from quality.coverage import list_cuts
from quality.judge import JsonObject, find_interval, find_share, keep_end, read_contents
from quality.questions import Question, find_passage, has_plain_value, make_questions
from quality.tables import print_probes, write_figures

from compaction_proxy.providers.tokenizers import TiktokenCounter

ROUNDS = (1, 3, 5)
FULL_TOKENS = 6_000
WINDOW = 6_000
# A shorter conversation is not compacted in that window.
LEAST_CHARACTERS = 3 * WINDOW
ANSWER_TOKENS = 48
WAYS = ("full history", "forwarded", "forwarded + search", "cut off", "oracle")
READER_LIMIT_S = 1_800.0
ORDER = "Answer with the exact value only, as the text writes it."


def is_right(said: str, question: Mapping[str, Any]) -> bool:
    """Whether an answer is the value or contains it, and none that it replaced."""
    return has_plain_value(said, question["answer"]) and not any(
        has_plain_value(said, old) for old in question["stale"]
    )


def make_task(
    player: Player, row: JsonObject, forwarded: Forwarded, questions: Sequence[Question], full_tokens: int
) -> JsonObject:
    """The texts of a cut, and its questions with what belongs to one of them."""
    texts = read_contents(forwarded.client)
    ours = "\n".join(read_contents(forwarded.messages))
    contexts = {"forwarded": ours, "cut off": keep_end(texts, len(ours))}
    if sum(TiktokenCounter(lambda _: None).count_each(texts, MODEL)) <= full_tokens:
        contexts["full history"] = "\n".join(texts)
    asked = []
    for question in questions:
        is_removed = not any(forwarded.holds(forwarded.client[index]) for index in question.sources)
        asked.append(
            asdict(question)
            | {"removed": is_removed, "oracle": find_passage(forwarded.client, question)}
            | {"found": player.search(row, " ".join(re.findall(r"[\w./@-]*\w", question.text)))}
        )
    return {
        "conversation": row["id"],
        "cut": len(forwarded.client),
        "round": forwarded.round,
        "size": len(ours) / max(1, sum(map(len, texts))),
        "contexts": contexts,
        "questions": asked,
    }


def play_row(player: Player, row: JsonObject, options: argparse.Namespace) -> list[JsonObject]:
    """The tasks of a conversation: one where each of `ROUNDS` is first in force."""
    messages, tasks, left = row["messages"], [], list(ROUNDS)

    def ask(cut: int, forwarded: Forwarded) -> None:
        if not left or forwarded.round < left[0] or not forwarded.is_compacted:
            return
        while left and left[0] <= forwarded.round:
            rounds = left.pop(0)
        seed = f"{options.seed} {row['id']} {cut}"
        questions = make_questions(messages[:cut], row.get("qa", ()), options.most, seed)
        if questions:
            task = make_task(player, row, forwarded, questions, options.full_tokens)
            tasks.append(task | {"after": rounds})

    for cut in list_cuts(messages, len(messages)):
        if left:
            player.play(row, [cut], ask)
    return tasks


def read_lines(path: Path | None) -> list[JsonObject]:
    """The objects of a file of JSON lines; none if there is no file."""
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path and path.exists() else []
    )


def append_line(path: Path | None, line: JsonObject) -> None:
    """Adds an object to a file of JSON lines."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def play_rows(rows: Sequence[JsonObject], options: argparse.Namespace) -> list[JsonObject]:
    """The tasks of all conversations; those in the file of `--tasks` are not made again."""
    kept = read_lines(options.tasks)
    done = {each["conversation"] for each in kept}
    left = [row for row in rows if row["id"] not in done]
    if left:
        with open_player(options.summary, WINDOW, "") as player:
            for row in left:
                kept.append({"conversation": row["id"], "tasks": play_row(player, row, options)})
                append_line(options.tasks, kept[-1])
                print(f"{row['id']}: {len(kept[-1]['tasks'])} cuts", file=sys.stderr)
    return [task for each in kept for task in each["tasks"]]


def write_context(way: str, task: Mapping[str, Any], question: Mapping[str, Any]) -> str | None:
    """The text that a way gives the reader; None: it has none for this cut."""
    if way == "oracle":
        return str(question["oracle"])
    if way == "forwarded + search":
        return f"{task['contexts']['forwarded']}\n\nA search returned:\n{question['found']}"
    contexts: Mapping[str, str] = task["contexts"]
    return contexts.get(way)


def make_request(context: str, question: Mapping[str, Any]) -> JsonObject:
    """The request for an answer. The text comes first, so that a reader caches it for several questions."""
    content = f"{context}\n\n---\nQuestion about the text above: {question['text']}\n{ORDER}"
    return {
        "model": "reader",
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }


def compute_digest(request: JsonObject) -> str:
    """The name of a request in the file of answers."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def list_requests(tasks: Sequence[JsonObject]) -> Iterator[tuple[JsonObject, str, JsonObject, JsonObject]]:
    """Task, way, question and request of all that is to be asked, those with the same text together."""
    for task in tasks:
        for way in WAYS:
            for question in task["questions"]:
                context = write_context(way, task, question)
                if context is not None:
                    yield task, way, question, make_request(context, question)


def ask_reader(
    tasks: Sequence[JsonObject], url: str, answers: dict[str, str], options: argparse.Namespace
) -> None:
    """Asks what has no answer yet, until it is done or the time is over."""
    until = time.monotonic() + 60 * options.minutes
    with httpx.Client(timeout=READER_LIMIT_S) as client:
        for _, _, _, request in list_requests(tasks):
            digest = compute_digest(request)
            if digest in answers:
                continue
            if time.monotonic() > until:
                return
            reply = client.post(f"{url}/chat/completions", json=request)
            reply.raise_for_status()
            answers[digest] = reply.json()["choices"][0]["message"]["content"] or ""
            append_line(options.answers, {"digest": digest, "answer": answers[digest]})


def judge_answers(tasks: Sequence[JsonObject], answers: Mapping[str, str]) -> list[JsonObject]:
    """Of each question and way: whether its text holds the answer, and whether the reader gave it."""
    judged = []
    for task, way, question, request in list_requests(tasks):
        said = answers.get(compute_digest(request))
        judged.append(
            {
                "conversation": task["conversation"],
                "after": task["after"],
                "way": way,
                "question": f"{task['conversation']} {task['cut']} {question['text']}",
                "kind": question["kind"],
                "removed": question["removed"],
                "present": has_plain_value(write_context(way, task, question) or "", question["answer"]),
                "right": None if said is None else is_right(said, question),
            }
        )
    return judged


def _measure_share(judged: Sequence[JsonObject], name: str, seed: int) -> JsonObject:
    groups: dict[str, list[tuple[float, float]]] = {}
    for each in judged:
        if each[name] is not None:
            groups.setdefault(each["conversation"], []).append((each[name], 1))
    flat = [count for each in groups.values() for count in each]
    return {"share": find_share(flat), "of": len(flat), "interval": find_interval(groups, seed)}


def _compare_with_full(
    judged: Sequence[JsonObject], full: Mapping[str, JsonObject], name: str, seed: int
) -> JsonObject:
    """The hits of a way for each hit of the full history, over the questions that have both."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for each in judged:
        other = full.get(each["question"])
        if other and each[name] is not None and other[name] is not None:
            groups.setdefault(each["conversation"], []).append((each[name], other[name]))
    flat = [count for each in groups.values() for count in each]
    return {"share": find_share(flat), "of": len(flat), "interval": find_interval(groups, seed)}


def make_figures(judged: Sequence[JsonObject], seed: int) -> list[JsonObject]:
    """The figures of each way, over all cuts and after each number of compactions."""
    full = {each["question"]: each for each in judged if each["way"] == "full history"}
    found = []
    for after in ("all", *ROUNDS):
        for way in WAYS:
            of_way = [each for each in judged if each["way"] == way and after in {"all", each["after"]}]
            if not of_way:
                continue
            read = [each for each in of_way if each["right"] is not None]
            found.append(
                {
                    "after": after,
                    "way": way,
                    "present": _measure_share(of_way, "present", seed),
                    "present_removed": _measure_share([e for e in of_way if e["removed"]], "present", seed),
                    "right": _measure_share(read, "right", seed),
                    "of_full": _compare_with_full(read, full, "right", seed),
                    "write_loss": find_share([(not each["present"], 1) for each in of_way]),
                    "read_loss": find_share([(each["present"] and not each["right"], 1) for each in read]),
                }
            )
    return found


def make_kinds(judged: Sequence[JsonObject]) -> list[JsonObject]:
    """The shares of each way by the kind of the question, over all cuts."""
    found = []
    for kind in sorted({each["kind"] for each in judged}):
        figure: JsonObject = {"kind": kind}
        for way in WAYS:
            own = [each for each in judged if (each["kind"], each["way"]) == (kind, way)]
            read = [each for each in own if each["right"] is not None]
            figure[way] = {
                "of": len(own),
                "present": find_share([(each["present"], 1) for each in own]),
                "right": find_share([(each["right"], 1) for each in read]),
            }
        found.append(figure)
    return found


def choose_rows(rows: Sequence[JsonObject], number: int, seed: int) -> list[JsonObject]:
    """So many conversations that may be compacted, of each kind in turn."""
    kinds: dict[str, list[JsonObject]] = {}
    compacted = [
        row for row in rows if len(json.dumps([row["messages"], row.get("tools")])) >= LEAST_CHARACTERS
    ]
    for row in compacted:
        kinds.setdefault(row["id"].partition("-")[0], []).append(row)
    rng = random.Random(seed)
    for of_kind in kinds.values():
        rng.shuffle(of_kind)
    chosen = [(place, kind, row) for kind, each in kinds.items() for place, row in enumerate(each)]
    return [row for _, _, row in sorted(chosen, key=lambda each: each[:2])[:number]]


def main(arguments: Sequence[str]) -> None:
    """Make the tasks, ask the reader if there is one, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    parser.add_argument("--summary", default="none", help="none or poor")
    parser.add_argument("--rows", type=int, default=48, help="most conversations, of each kind in turn")
    parser.add_argument("--most", type=int, default=6, help="most questions of a cut")
    parser.add_argument("--full-tokens", type=int, default=FULL_TOKENS, help="most of a full history")
    parser.add_argument("--quick", action="store_true", help="eight conversations")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--tasks", type=Path, help="keep texts and questions in this file")
    parser.add_argument("--reader", default="", help="base URL of the reader, ending in /v1")
    parser.add_argument("--answers", type=Path, help="keep answers in this file")
    parser.add_argument("--minutes", type=float, default=720, help="stop asking after so long")
    parser.add_argument("--json", type=Path, help="put the figures into this file")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"skipped: there is no {options.folder}")
        return
    rows = choose_rows(read_rows(options.folder), 8 if options.quick else options.rows, options.seed)
    tasks = play_rows(rows, options)
    answers = {each["digest"]: each["answer"] for each in read_lines(options.answers)}
    if options.reader:
        ask_reader(tasks, options.reader.rstrip("/"), answers, options)
    judged = judge_answers(tasks, answers)
    measured = {
        "seed": options.seed,
        "summary": options.summary,
        "full_tokens": options.full_tokens,
        "conversations": len({each["conversation"] for each in tasks}),
        "questions": sum(len(each["questions"]) for each in tasks),
        "size": find_share([(each["size"], 1) for each in tasks]),
        "answered": sum(each["right"] is not None for each in judged),
        "figures": make_figures(judged, options.seed),
        "kinds": make_kinds(judged),
    }
    print_probes(measured)
    if options.json:
        write_figures(options.json, "probes", measured)


if __name__ == "__main__":
    main(sys.argv[1:])
