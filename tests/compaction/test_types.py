"""What a request and a result say of themselves."""

from dataclasses import replace

import pytest

from compaction_proxy.compaction.message_reader import CountingOptions
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.compaction.types import CompactedMessages, CompactionReport, CompactionStatus, FitResult
from compaction_proxy.core.checkpoint import Checkpoint
from tests.helpers.compaction_bench import ROUTE, ask, user

MASKS = Checkpoint("anchored", "c_1", 0, 0, b"", (), (), (), "", 0, 0)


@pytest.mark.parametrize(
    ("given", "found", "expected"),
    [("c_1", None, "c_1"), (None, "c_2", "c_2"), ("c_1", "c_2", "c_1"), (None, None, None)],
)
def test_the_id_of_the_client_goes_before_the_one_that_was_found(
    given: str | None, found: str | None, expected: str | None
) -> None:
    made = replace(ask([user("x")]), conversation=given, continued_conversation=found)
    assert made.known_conversation == expected


def test_routes_of_summaries_are_looked_up_when_they_are_needed() -> None:
    asked: list[int] = []

    def resolve() -> tuple[SummaryRoute, ...]:
        asked.append(1)
        return (ROUTE,)

    made = replace(ask([user("x")]), resolve_summary_routes=resolve)
    assert asked == []
    assert (made.summary_routes, asked) == ((ROUTE,), [1])


def test_tokens_are_counted_as_the_model_the_configuration_and_the_wire_say() -> None:
    made = ask([user("x")], model={"compaction": {"counter": "characters"}})
    assert made.counting_options == CountingOptions("gpt-x", "characters", made.body.wire)


def test_a_checkpoint_that_only_masks_results_counts_as_a_compaction_without_a_number() -> None:
    plain = FitResult(b"", 0, CompactionReport(CompactionStatus.NONE))
    assert not plain.is_compacted
    assert replace(plain, report=plain.report._replace(round=1)).is_compacted
    assert replace(plain, compacted_messages=CompactedMessages((), (), MASKS)).is_compacted
