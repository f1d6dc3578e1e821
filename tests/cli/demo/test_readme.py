import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "docs_pages.py"))


def show_block(text: str) -> str:
    """Returns the block of a page that shows an output of the demo."""
    return f"<!-- demo:start -->\n```text\n{text}```\n<!-- demo:end -->"


def test_a_page_shows_what_the_demo_prints(demo_text: str) -> None:
    page = (ROOT / "docs" / "demo.md").read_text("utf-8")

    assert show_block(demo_text) in page, "run `python .ci/docs_pages.py`"


def test_the_readme_shows_a_part_of_what_the_demo_prints(demo_text: str) -> None:
    shown = SCRIPT["shorten_demo"](demo_text)

    assert show_block(shown) in (ROOT / "README.md").read_text("utf-8"), "run `python .ci/docs_pages.py`"
    assert [line for line in shown.splitlines() if line not in demo_text.splitlines()] == ["   …"] * 3
