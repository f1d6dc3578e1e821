"""Shows the figures of `coverage.py` and `probes.py` as Markdown, on a terminal and in docs/quality.md.

.ci/docs_pages.py writes the page from docs/quality.json, with what `list_coverage` and `list_probes` yield.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]
COVERAGE_GOALS = {"forwarded": 0.80, "forwarded + search": 0.95}
# Of the answers from the full history, after this number of compactions.
PROBE_GOALS, GOAL_ROUND = {"forwarded": 0.85, "forwarded + search": 0.95}, 5


def format_share(figure: Figures) -> str:
    """A share with its interval, or a dash if there are no cases."""
    if figure["share"] is None:
        return "-"
    low, high = figure["interval"]
    return f"{figure['share']:.3f} ({low:.3f} to {high:.3f})"


def _format_number(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _list_rows(head: list[str], left: int, rows: list[list[object]]) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [head, rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _list_goals(goals: Mapping[str, float], shares: Mapping[str, float | None], what: str) -> Iterator[str]:
    for way, goal in goals.items():
        share = shares.get(way)
        verdict = "not measured" if share is None else "met" if share >= goal else "missed"
        yield f"Goal: {way} at least {goal:.2f}{what}: {verdict}."


def list_coverage(measured: Figures) -> Iterator[str]:
    """Yields the paragraphs of a run of `coverage.py`."""
    for run in measured["runs"]:
        yield (
            f"Summary model: {run['summary']}. {run['conversations']} conversations, seed {measured['seed']}."
        )
        rows: list[list[object]] = []
        for each in run["figures"]:
            needed, removed = each["needed"], each["removed"]
            size = "" if each["size"] is None else f"{each['size']:.0%}"
            cells = [format_share(needed), needed["of"], format_share(removed), removed["of"], size]
            rows.append([each["kind"], each["way"], *cells])
        yield _list_rows(["kind", "way", "needed", "of", "removed", "of", "characters"], 2, rows)
        shares = {each["way"]: each["needed"]["share"] for each in run["figures"] if each["kind"] == "all"}
        yield from _list_goals(COVERAGE_GOALS, shares, "")


def list_probes(measured: Figures) -> Iterator[str]:
    """Yields the paragraphs of a run of `probes.py`."""
    size = "" if measured["size"] is None else f", {measured['size']:.0%} of the characters forwarded"
    yield (
        f"{measured['questions']} questions, {measured['conversations']} conversations{size}. "
        f"Full histories have at most {measured['full_tokens']:,} tokens. "
        f"Summary model: {measured['summary']}. Seed {measured['seed']}."
    )
    rows: list[list[object]] = []
    for each in measured["figures"]:
        present, removed, right = each["present"], each["present_removed"], each["right"]
        loss = [_format_number(each["write_loss"]), _format_number(each["read_loss"])]
        shares = [format_share(present), present["of"], format_share(removed), removed["of"]]
        rows.append(
            [each["after"], each["way"], *shares, format_share(right), format_share(each["of_full"]), *loss]
        )
    head = ["after", "text", "present", "of", "present, removed", "of", "right", "right of full"]
    yield _list_rows([*head, "write loss", "read loss"], 2, rows)
    ways = [way for way in measured["kinds"][0] if way != "kind"] if measured["kinds"] else []
    name = "right" if measured["answered"] else "present"
    kinds = [
        [each["kind"], each["oracle"]["of"], *(_format_number(each[way][name]) for way in ways)]
        for each in measured["kinds"]
    ]
    yield f"The same by the kind of the question, over all cuts ({name}):"
    yield _list_rows(["question", "of", *ways], 1, kinds)
    of_full = {
        each["way"]: each["of_full"]["share"] for each in measured["figures"] if each["after"] == GOAL_ROUND
    }
    yield from _list_goals(PROBE_GOALS, of_full, f" of the full history after {GOAL_ROUND} compactions")
    if not measured["answered"]:
        yield "No reader answered: the answers are not measured, only whether they are present."


def print_coverage(measured: Figures) -> None:
    """Prints the figures of `coverage.py`."""
    print("\n\n".join(list_coverage(measured)), flush=True)


def print_probes(measured: Figures) -> None:
    """Prints the figures of `probes.py`."""
    print("\n\n".join(list_probes(measured)), flush=True)


def write_figures(path: Path, name: str, measured: Figures) -> None:
    """Puts the figures of a program into a file of JSON, under its name; those of the other one stay."""
    held = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(held | {name: measured}, indent=1) + "\n", "utf-8")
