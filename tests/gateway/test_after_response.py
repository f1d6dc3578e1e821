"""Requests that did not go as they should are told of, once a minute for the same trouble."""

import itertools

import pytest

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus
from compaction_proxy.core.event import FAILED_OPEN, OVER_LIMIT, RECOVERED, Event
from compaction_proxy.gateway.after_response import MAX_INCIDENTS, IncidentReporter
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.storage.resilient import REPEAT_AFTER_S
from compaction_proxy.telemetry.event_history import EventBus, EventHistory

TOLD = ("r_1", "m")


class Scene:
    """Trouble with a clock of its own, and what was heard of it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.heard: list[tuple[str, Event]] = []
        self.history = EventHistory(RecordStore(MemoryStore(), lambda _: None), 1_000.0)
        announce = EventBus(lambda tenant, event: self.heard.append((tenant, event)))
        self.trouble = IncidentReporter(announce, self.history, clock=lambda: self.seconds, now=lambda: 5.0)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for _, event in self.heard]


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    "status",
    [CompactionStatus.NONE, CompactionStatus.REUSED, CompactionStatus.APPLIED, CompactionStatus.BYPASSED],
)
async def test_a_request_that_went_well_is_not_told_of(scene: Scene, status: CompactionStatus) -> None:
    await scene.trouble("t", CompactionReport(status, "c_1"), *TOLD)
    assert scene.kinds == []


async def test_what_failed_is_told_with_its_request_and_kept_with_its_conversation(scene: Scene) -> None:
    report = CompactionReport(
        CompactionStatus.FAILED_OPEN, "c_1", reason="internal", tokens_before=9, window=10
    )
    await scene.trouble("t", report, *TOLD)
    [(tenant, event)] = scene.heard
    assert (tenant, event.kind, event.request, event.reason) == ("t", FAILED_OPEN, "r_1", "internal")
    assert (event.asked, event.tokens_before, event.window, event.at) == ("m", 9, 10, 5.0)
    assert await scene.history.list_events("t", "c_1") == [event]


async def test_the_same_trouble_is_told_once_a_minute_and_another_at_once(scene: Scene) -> None:
    report = CompactionReport(CompactionStatus.FAILED_OPEN, "c_1", reason="timeout")
    for seconds in (0.0, 1.0, REPEAT_AFTER_S - 1, REPEAT_AFTER_S, REPEAT_AFTER_S + 1):
        scene.seconds = seconds
        await scene.trouble("t", report, *TOLD)
    assert scene.kinds == [FAILED_OPEN] * 2
    await scene.trouble("t", report._replace(reason="garbage"), *TOLD)
    await scene.trouble("t", report._replace(conversation="c_2"), *TOLD)
    await scene.trouble("u", report, *TOLD)
    assert len(scene.heard) == 5


async def test_a_shorter_request_that_was_taken_is_told_of(scene: Scene) -> None:
    await scene.trouble("t", CompactionReport(CompactionStatus.APPLIED, "c_1"), *TOLD, was_recovered=True)
    await scene.trouble("t", CompactionReport(CompactionStatus.OVER_LIMIT, None), *TOLD)
    assert scene.kinds == [RECOVERED, OVER_LIMIT]


async def test_what_is_known_of_trouble_is_bounded(scene: Scene) -> None:
    for number in itertools.islice(itertools.count(), MAX_INCIDENTS + 1):
        await scene.trouble("t", CompactionReport(CompactionStatus.OVER_LIMIT, reason=str(number)), *TOLD)
    await scene.trouble("t", CompactionReport(CompactionStatus.OVER_LIMIT, reason="0"), *TOLD)
    assert len(scene.heard) == MAX_INCIDENTS + 2  # the first was let go of
