"""Edits that models write as text: SEARCH/REPLACE blocks and patches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.edits import (
    MAX_CHARACTERS,
    MAX_EDITS,
    FileEdit,
    find_edit_blocks,
    find_patches,
)

BLOCK = "<<<<<<< SEARCH\na = 1\n=======\na = 2\n>>>>>>> REPLACE"


@pytest.mark.parametrize(
    "head",
    [
        "src/app.py\n```python\n",
        "**src/app.py**\n```\n",
        "### `src/app.py`\n\n```python\n",
        "```python\nsrc/app.py\n",
        "I change the number in these lines:\n\nsrc/app.py:\n",
    ],
)
def test_a_block_belongs_to_the_file_that_the_last_line_before_it_names(head: str) -> None:
    assert find_edit_blocks(f"{head}{BLOCK}\n```\n") == [FileEdit("src/app.py", "a = 1", "a = 2")]


def test_several_blocks_of_one_file_need_its_name_only_once() -> None:
    other = BLOCK.replace("a", "b")

    assert [each.path for each in find_edit_blocks(f"x.py\n{BLOCK}\n{other}\n")] == ["x.py", "x.py"]


def test_a_file_that_is_new_has_no_old_lines() -> None:
    text = "x.py\n<<<<<<< SEARCH\n=======\nimport os\n\nprint(os)\n>>>>>>> REPLACE"

    assert find_edit_blocks(text) == [FileEdit("x.py", "", "import os\n\nprint(os)")]


@pytest.mark.parametrize(
    "text", ["", "no block", BLOCK[:-10], "<<<<<<< SEARCH\na\n>>>>>>> REPLACE", "+++ b/x.py\n+a"]
)
def test_a_reply_without_a_complete_block_edits_nothing(text: str) -> None:
    assert find_edit_blocks(text) == []


def test_a_patch_holds_the_edits_of_several_files() -> None:
    patch = (
        "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-x = 1\n+x = 2\n same\n"
        "*** Add File: docs/b.md\n+# B\n*** Delete File: c.py\n*** End Patch"
    )

    assert find_patches(patch) == [
        FileEdit("a.py", "x = 1", "x = 2"),
        FileEdit("docs/b.md", "", "# B"),
        FileEdit("c.py", "", ""),
    ]


def test_a_unified_diff_is_a_patch() -> None:
    diff = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"

    assert find_patches(diff) == [FileEdit("a.py", "x = 1", "x = 2")]
    assert find_patches("x = 1\n+ y") == []


@given(
    st.lists(
        st.sampled_from(
            [
                "<<<<<<< SEARCH",
                "=======",
                ">>>>>>> REPLACE",
                "a.py",
                "*** Add File: x",
                "+++ b/y",
                "-a",
                "+b",
                "```",
            ]
        )
        | st.text(max_size=9),
        max_size=200,
    )
)
def test_whatever_is_read_the_edits_are_few_and_short(lines: list[str]) -> None:
    text = "\n".join(lines)

    for found in (find_edit_blocks(text), find_patches(text)):
        assert len(found) <= MAX_EDITS
        assert all(len(field) <= MAX_CHARACTERS for each in found for field in each)
