"""README, docs/performance.md and the chart show the stored run."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def test_what_is_shown_is_what_the_stored_run_renders() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "bench/report.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == "", "run `python bench/report.py`"
    assert ended.returncode == 0


def test_the_readme_has_a_table() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    headline = readme.partition("<!-- performance:headline:start -->\n")[2]
    assert headline.startswith("|  | small c=1 p50 ms |")
    assert "| proxy, gated |" in headline


def test_the_page_has_every_table_and_the_chart() -> None:
    page = (ROOT / "docs/performance.md").read_text("utf-8")
    summary = page.partition("<!-- performance:summary:start -->\n")[2]
    assert summary.startswith("**Reference load**")
    assert "|  | small c=1 p50 ms |" in summary
    assert "(performance.svg)" in page


def test_the_chart_reads_without_colour_and_on_dark_pages() -> None:
    text = (ROOT / "docs/performance.svg").read_text("utf-8")
    drawn = ET.fromstring(text)
    bars, words = drawn.findall(f"{SVG}rect"), [each.text for each in drawn.findall(f"{SVG}text")]
    panels = drawn.findall(f"{SVG}text[@class='title']")
    assert len(words) == 2 * len(bars) + len(panels), "a name and a figure stand beside every bar"
    assert words.count("proxy, gated") == len(panels) >= 2
    assert "prefers-color-scheme: dark" in text
