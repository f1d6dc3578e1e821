"""The list of reasons is that of the code: nothing is raised with another word, and none stands idle."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import compaction_proxy
from compaction_proxy.compaction.round_coordinator import FORCED_REASONS, QUIET_REASONS
from compaction_proxy.compaction.round_job import AHEAD_REASON
from compaction_proxy.core import event
from compaction_proxy.core.event import (
    DUE_REASONS,
    NO_BENEFIT_REASONS,
    REASON_PREFIXES,
    REASONS,
)
from compaction_proxy.core.trigger import TRIGGER_FIELDS
from compaction_proxy.support import formatting
from tests.helpers.source import parse_source

PACKAGE = Path(compaction_proxy.__file__).parent
RAISED = {"CompactionError", "SummaryError", "UnreadableBodyError", "StoreUnavailableError"}
LISTS = {"reasons.py", "formatting.py"}
# No event carries them: of a secret, at a start; of a record that is not written; of `POST /v1/compact`.
OF_NO_EVENT = {"secret-unavailable", "record-unfit", "unreadable"}


@cache
def trees() -> list[ast.Module]:
    files = (path for path in PACKAGE.rglob("*.py") if path.name not in LISTS)
    return [parse_source(path) for path in files]


def texts(node: ast.AST) -> Iterator[str]:
    """Every text in a piece of code; of one that is filled in, what stands in front."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def constants(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def raised() -> Iterator[str]:
    """What our errors are made with, as far as it stands there."""
    for tree in trees():
        named = constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                yield from texts(node.args[0])
                yield from (
                    named[each.id]
                    for each in ast.walk(node.args[0])
                    if isinstance(each, ast.Name)
                    if each.id in named
                )


def test_whatever_is_raised_is_a_reason_that_is_known() -> None:
    found = set(raised()) - OF_NO_EVENT
    assert {word for word in found if not (word in REASONS or word.startswith(REASON_PREFIXES))} == set()
    assert len(found) > 30


def test_every_reason_that_is_known_occurs() -> None:
    said = {text for tree in trees() for text in texts(tree)}
    assert (REASONS | DUE_REASONS) - said == set()
    assert [each for each in REASON_PREFIXES if not any(text.startswith(each) for text in said)] == []


def test_whatever_makes_a_round_due_is_known() -> None:
    assert {*TRIGGER_FIELDS, *FORCED_REASONS, AHEAD_REASON} <= DUE_REASONS
    assert QUIET_REASONS == NO_BENEFIT_REASONS


@pytest.mark.parametrize(
    ("told", "list_"),
    [
        (formatting.REASON_TEXTS, REASONS),
        (formatting.DUE_REASON_TEXTS, DUE_REASONS),
        (formatting.EVENT_KIND_TEXTS, event.EVENT_KINDS),
    ],
    ids=["reasons", "causes", "kinds"],
)
def test_the_pages_have_words_for_each_and_for_nothing_else(
    told: dict[str, str], list_: frozenset[str]
) -> None:
    assert told.keys() == set(list_)
