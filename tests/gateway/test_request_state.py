"""What is known of a request on its way, and its figures at the end."""

from dataclasses import replace

import pytest

from compaction_proxy.compaction.types import CompactionReport, CompactionStatus, FitResult
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.control_headers import ControlHeaders
from compaction_proxy.gateway.identity import Identity
from compaction_proxy.gateway.request_state import RequestState, choose_request_id
from compaction_proxy.wires.usage import TokenUsage


def passage() -> RequestState:
    scope = {"type": "http", "headers": []}
    return RequestState(
        Identity("t", "c_1"),
        b"{}",
        scope,
        ControlHeaders(),
        2,
        "r_1",
        BodyBudget().open_hold(),
        model="m",
        received_at=7.0,
    )


@pytest.mark.parametrize("given", [b"abc-1", b"!" * 128])
def test_a_client_s_request_id_is_taken(given: bytes) -> None:
    assert choose_request_id(given) == given.decode()


@pytest.mark.parametrize("given", [None, b"", b"a b", b"a\x00", b"x" * 129, "é".encode()])
def test_what_is_no_request_id_gets_a_new_one(given: bytes | None) -> None:
    first, second = choose_request_id(given), choose_request_id(given)
    assert first != second
    assert first.startswith("r_")


def test_a_request_that_was_not_read_has_its_size_and_times_only() -> None:
    ours = passage()
    ours.status = 200
    ours.record_upstream_wait(0.5)
    ours.record_overhead()
    told = ours.build_exchange()
    timed = (told.overhead_s, told.upstream_s)
    plain = Exchange(7.0, "m", "none", 200, "r_1", request_bytes=2, overhead_s=timed[0], first_byte_s=0.5)
    assert told == plain._replace(upstream_s=timed[1], reason="small")


def test_a_request_that_was_read_tells_what_became_of_it_and_what_was_counted() -> None:
    ours = passage()
    report = CompactionReport(
        CompactionStatus.REUSED, "c_2", "anchored", 3, messages_before=9, messages_after=4,
        tokens_before=900, tokens_after=400, window=1_000, trigger=800, reason="soft",
    )  # fmt: skip
    ours.fit_result = FitResult(b"{}", 400, report)
    ours.usage = TokenUsage(410, 20, 256)
    told = ours.build_exchange()
    assert told == Exchange(
        7.0, "m", "reused", 0, "r_1", "anchored", 3, "soft", 2, 9, 4, 900, 400, 1_000, 800, 410, 20, 256,
    )  # fmt: skip
    assert ours.conversation == "c_2"


def test_overhead_is_what_the_upstream_was_not_waited_for() -> None:
    ours = passage()
    ours.started -= 2.0  # it came two seconds ago, and the upstream took one and a half of them
    ours.record_upstream_wait(1.0)
    ours.record_upstream_wait(0.5)
    ours.record_overhead()
    assert ours.overhead_s == pytest.approx(0.5, abs=0.2)
    told = ours.build_exchange()
    assert told.first_byte_s == 0.5
    assert told.upstream_s == pytest.approx(0.5, abs=0.2)


def test_a_body_is_let_go_of_unless_something_is_learned_from_it() -> None:
    ours = passage()
    ours.fit_result = replace(ours.to_fit_result(), estimate=5)
    ours.release_bodies()
    assert (ours.raw, ours.fit_result.raw, ours.fit_result.estimate) == (b"", b"", 5)
