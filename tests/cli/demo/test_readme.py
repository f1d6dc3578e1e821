from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_shows_what_the_demo_prints(demo_text: str) -> None:
    block = f"<!-- demo:start -->\n```text\n{demo_text}```\n<!-- demo:end -->"
    assert block in README.read_text("utf-8"), "run `python .ci/docs_pages.py`"
