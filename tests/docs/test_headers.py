"""docs/headers.md names every header that the code knows and every status, and nothing else."""

import re

from compaction_proxy.compaction.types import CompactionStatus
from compaction_proxy.core.event import REASON_PREFIXES, REASONS
from tests.docs.blocks import ROOT
from tests.docs.conftest import Machine
from tests.helpers.pages import cells, chapter, page

PAGE = page("headers.md")
GATEWAY = ROOT / "proxy" / "compaction_proxy" / "gateway"
OURS = re.compile(r"x-compaction[a-z-]*")
# What the demo's table says of a turn, beside what README shows of its headers.
TURN = re.compile(
    r"^  18 +([\d,]+) +([\d,]+) +\d+%   compacted, round (\d+): (\d+) messages became (\d+)", re.MULTILINE
)


def named(text: str) -> set[str]:
    return set(OURS.findall(text))


def test_every_header_of_the_code_is_described() -> None:
    source = "".join(path.read_text("utf-8") for path in sorted(GATEWAY.glob("*.py")))
    known = set(re.findall(rf'b"({OURS.pattern})"', source))

    assert {name for row in cells(PAGE) for name in named(row[0])} == known - {"x-compaction-hop"}
    assert "x-compaction-hop" in PAGE
    assert len(known) > 15


def test_every_status_is_described() -> None:
    rows = cells(chapter(PAGE, "## Response headers"))

    assert {row[0].strip("`") for row in rows if "x-compaction" not in row[0]} == {
        *map(str, CompactionStatus)
    }


def test_every_reason_is_described_and_nothing_else() -> None:
    named = {word for row in cells(chapter(PAGE, "## Reasons")) for word in re.findall(r"`([^`]+)`", row[0])}
    families = {word for word in named if word.startswith(REASON_PREFIXES)}

    assert named - families == REASONS
    assert {word.partition("-")[0] + "-" for word in families} == set(REASON_PREFIXES)


def test_an_answer_after_a_round_says_all_that_is_described(machine: Machine) -> None:
    described = named("".join(row[0] for row in cells(chapter(PAGE, "## Response headers"))))

    not_always = {"x-compaction-reason", "x-compaction-max-tokens"}
    assert described - {name for name in machine.headers if name.startswith("x-compaction")} == not_always


def test_readme_shows_the_headers_of_the_demo_s_turn() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    [turn] = TURN.findall(text)
    before, after, round_, messages, left = (int(figure.replace(",", "")) for figure in turn)

    assert dict(re.findall(r"^x-compaction-([a-z-]+): (\S+)$", text, re.MULTILINE)) == {
        "status": "applied",
        "round": str(round_),
        "messages-before": str(messages),
        "messages-after": str(left),
        "tokens-before": str(before),
        "tokens-after": str(after),
        "tokens-saved": str(before - after),
    }
