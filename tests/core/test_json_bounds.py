"""What is too crowded to be built into values."""

import pytest

from compaction_proxy.core.digest import canonicalize_arguments
from compaction_proxy.core.json_bounds import MAX_BRACKETS, has_too_many_brackets
from compaction_proxy.core.token_rules import minify_json


@pytest.mark.parametrize("bracket", ["[", "{"])
def test_so_many_brackets_are_no_crowd_and_one_more_is(bracket: str) -> None:
    assert not has_too_many_brackets(bracket * MAX_BRACKETS)
    assert has_too_many_brackets(bracket * (MAX_BRACKETS + 1))


def test_crowded_json_stays_as_it_is_written() -> None:
    few, many = (f"[{'[], ' * number}1 ]" for number in (MAX_BRACKETS - 1, MAX_BRACKETS))
    for written in (canonicalize_arguments, minify_json):
        assert (written(few), written(many)) == (few.replace(" ", ""), many)
