from pathlib import Path

from compaction_proxy.cli.demo.readme import find_demo_block, replace_demo_block

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_what_the_demo_prints(demo_text: str) -> None:
    assert find_demo_block(README.read_text("utf-8")) == demo_text, (
        "run `python -m compaction_proxy.cli.demo.readme README.md`"
    )


def test_only_the_block_is_replaced() -> None:
    before = "a\n<!-- demo:start -->\n```text\nold\n```\n<!-- demo:end -->\nb\n"
    after = replace_demo_block(before, "new \\1\n")
    assert after == before.replace("old", "new \\1")
    assert find_demo_block(after) == "new \\1\n"


def test_a_readme_without_the_marks_has_no_block() -> None:
    assert find_demo_block("# Title\n```text\nold\n```\n") is None
