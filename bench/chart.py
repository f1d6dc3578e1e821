"""The chart of a run: bars of requests and streams a second, as SVG, for light and dark pages.

Names and figures stand beside the bars, and ours are outlined, so that it reads without colour. A page
shows it as an image, where a media query is what tells light from dark.
"""

import itertools
from collections.abc import Sequence
from xml.sax.saxutils import escape

from loads import REFERENCE, SMALL_MANY, STREAMED, STRICT
from results import Results
from targets import DIRECT, OURS

WIDTH = 860
_LEFT, _BAR_WIDTH = 200, 540
_ROW, _BAR, _TITLE = 26, 16, 40
_PANELS = (
    (SMALL_MANY, "small requests a second, 32 connections"),
    (STREAMED, "streams of 200 events a second, 32 connections"),
)
_KINDS = {REFERENCE: "reference load", STRICT: "wrk"}
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.ours { fill: #0969da; stroke: #1f2328; stroke-width: 1.5; }
.other { fill: #8c959f; }
.bold { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .ours { fill: #4493f8; stroke: #e6edf3; }
  .other { fill: #6e7681; }
}"""


def _rates(results: Results, by: str, load: str) -> list[tuple[str, float]]:
    found = ((target, results.median(by, target, load, lambda cell: cell.rate)) for target in results.targets)
    known = [(target, rate) for target, rate in found if rate is not None and target != DIRECT]
    return sorted(known, key=lambda row: -row[1])


def _row(top: int, target: str, rate: float, most: float) -> list[str]:
    length = max(1.0, _BAR_WIDTH * rate / most)
    kind, weight = ("ours", ' class="bold"') if target in OURS else ("other", "")
    base = top + _BAR - 3
    return [
        f'<text x="{_LEFT - 8}" y="{base}" text-anchor="end"{weight}>{escape(target)}</text>',
        f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR}"/>',
        f'<text x="{_LEFT + length + 8:.1f}" y="{base}"{weight}>{rate:,.0f}</text>',
    ]


def _panel(top: int, title: str, rows: Sequence[tuple[str, float]]) -> list[str]:
    most = max((rate for _, rate in rows), default=1.0)
    lines = [f'<text class="title" x="{_LEFT}" y="{top + 20}">{escape(title)}</text>']
    for number, (target, rate) in enumerate(rows):
        lines += _row(top + _TITLE - 8 + number * _ROW, target, rate, most)
    return lines


def chart(results: Results) -> str:
    """The chart as the text of an SVG file; bars are longest first, from zero, on a linear scale."""
    drawn: list[str] = []
    top = 0
    for (load, title), by in itertools.product(_PANELS, results.generators):
        rows = _rates(results, by, load)
        drawn += _panel(top, f"{title}: {_KINDS[by]}", rows)
        top += _TITLE + len(rows) * _ROW + 8
    shown = "Requests and streams a second through each proxy"
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{shown}">',
            f"<style>\n{_STYLE}\n</style>",
            *drawn,
            "</svg>",
            "",
        ]
    )
