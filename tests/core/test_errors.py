"""Our own errors: what they say, which of them a client sees, and in which form."""

import json
from typing import Any

import pytest

from compaction_proxy.core.errors import (
    ClientFacingError,
    CompactionError,
    ConfigError,
    InternalError,
    OverloadedError,
    ProxyError,
    ReplayFailedError,
    RequestRefusedError,
    SearchUnavailableError,
    StoreUnavailableError,
    SummaryError,
    UnreadableBodyError,
    UpstreamError,
    format_openai_error,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestRefusedError(404, "no", "not_found"), 404, "invalid_request_error", "not_found"),
        (OverloadedError(7, "no"), 503, "overloaded_error", "overloaded"),
        (UpstreamError(504, "no", "upstream_timeout"), 504, "upstream_error", "upstream_timeout"),
        (InternalError(), 500, "server_error", "internal_error"),
        (ReplayFailedError("no"), 500, "server_error", "rehearsal_failed"),
    ],
)
def test_an_error_that_a_client_sees_has_a_status_and_the_form_of_openai(
    error: ClientFacingError, status: int, kind: str, code: str
) -> None:
    assert error.status == status
    assert json.loads(format_openai_error(error)) == {
        "error": {"message": str(error), "type": kind, "param": None, "code": code}
    }


def test_a_message_may_hold_any_text() -> None:
    text = 'a "quoted" \ud800 line\n'
    assert json.loads(format_openai_error(ReplayFailedError(text)))["error"]["message"] == text


@pytest.mark.parametrize(
    "kind",
    [CompactionError, UnreadableBodyError, SummaryError, StoreUnavailableError, SearchUnavailableError],
)
def test_a_failed_compaction_has_a_reason_and_its_message_is_the_reason_where_there_is_no_other(
    kind: type[CompactionError],
) -> None:
    plain, told = kind("too-deep"), kind("too-deep", "nested 1,000 times")
    assert (plain.reason, str(plain)) == ("too-deep", "too-deep")
    assert (told.reason, str(told)) == ("too-deep", "nested 1,000 times")


def test_a_failed_summary_may_say_what_the_model_takes_and_when_to_try_again() -> None:
    told: Any = SummaryError("overflow", limit=4_096, retry_after_s=2.5)
    assert (told.limit, told.retry_after_s) == (4_096, 2.5)
    assert (SummaryError("garbage").limit, SummaryError("garbage").retry_after_s) == (None, 0.0)


def test_a_failed_compaction_is_never_an_error_that_a_client_sees() -> None:
    seen = (RequestRefusedError, OverloadedError, UpstreamError, InternalError, ReplayFailedError)
    assert not any(issubclass(each, CompactionError) for each in (*seen, ConfigError))
    assert all(issubclass(each, ProxyError) for each in (*seen, ConfigError, CompactionError))


def test_a_client_that_is_refused_for_want_of_room_is_told_when_to_come_back() -> None:
    error = OverloadedError(7)
    assert (error.retry_after_s, "Try again" in str(error)) == (7, True)
