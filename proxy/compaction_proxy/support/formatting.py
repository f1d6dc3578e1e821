"""Formats numbers and codes as text for people. An unknown number (None) becomes "n/a"."""

import time
from urllib.parse import quote

UNKNOWN = "n/a"
MINUS = "\N{MINUS SIGN}"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400

# Texts for the reasons why the proxy forwarded a request unchanged or without a summary, by the codes of the
# reasons (`Event.reason`).
REASON_TEXTS = {
    "breaker-open": "the summary model failed repeatedly, so the proxy waits before the next call",
    "budget": "this client has reached its limit of summary calls per hour",
    "cancelled": "the compaction was cancelled: no request waited for it, or the proxy was stopping",
    "content-filter": "the provider's content filter blocked the summary",
    "deadline": "the summary was not ready before the request stopped waiting for it",
    "duplicate-keys": "the request body has duplicate keys",
    "empty": "the summary model returned an empty text",
    "encoded": "the compressed request body could not be decoded",
    "garbage": "the response of the summary model is invalid",
    "internal": "an internal error of the proxy during the compaction",
    "irreducible": "nothing can be removed, or not enough to help",
    "language": "summary rejected: it was in another language",
    "longer": "summary rejected: it was not shorter than the removed text",
    "no-array": "the messages of the request are not a list",
    "no-messages": "the request has no messages",
    "no-model": "no summary model is configured or known",
    "no-summary-model": "no summary model is configured or known",
    "not-json": "the request body could not be read",
    "nothing-to-take": "the request contains nothing that can be shortened",
    "out-of-resources": "the proxy had no memory, thread or descriptor left",
    "overflow": "the summary call exceeded the context window of the summary model",
    "paused": "recent compactions did not reduce the size; the proxy retries later",
    "provider-compacts": "the request asks the provider to compact the conversation",
    "reasoning": "the summary model used all its tokens for reasoning",
    "refused": "the summary model refused to write a summary",
    "rules-lost": "summary rejected: it omitted rules of the user",
    "small": "the request is too small to need a compaction, so it was not inspected",
    "stateful": "the provider stores a part of the conversation",
    "summary-window": "the text to summarise exceeds the context window of the summary model",
    "timeout": "the summary model took too long",
    "too-deep": "the request body is nested too deeply",
    "too-many": "the request body contains too many values",
    "too-short": "summary rejected: it was too short",
    "tool-calls": "the summary model called a tool instead of writing a summary",
    "truncated": "summary rejected: it was cut off",
    "unfaithful": "summary rejected: it contained statements that are not in the conversation",
    "unknown-model": "the provider does not know the summary model",
    "unreachable": "the summary model could not be reached",
}
_STATUSES = {
    "http-401": "the provider of the summary model rejected the API key",
    "http-403": "the provider of the summary model rejected the API key",
    "http-429": "the provider of the summary model limited the rate of requests",
}
# Texts for reasons, by the beginnings of their codes. `describe_reason` uses these texts for codes that are
# neither in `REASON_TEXTS` nor in `_STATUSES`.
_FAMILIES = {
    "http-": "the provider of the summary model returned an error",
    "store-": "the store could not be read or written",
}
# Texts for the reasons why a compaction was due, by the codes of the reasons.
DUE_REASON_TEXTS = {
    "cost_optimal": "lowest expected cost",
    "force": "requested",
    "huge": "huge tool result",
    "iterations": "iterations",
    "limit": "context window exceeded",
    "messages": "number of messages",
    "output": "not enough room for the answer",
    "overflow": "rejected by the provider as too long",
    "percent": "trigger reached",
    "percent_of_window": "trigger reached",
    "price_tier": "higher price per token",
    "soft": "prepared early",
    "tokens": "trigger reached",
    "turns": "number of turns",
}
# Texts for the causes of upstream failures, by the codes of the causes (`core.upstream_failure`).
UPSTREAM_CAUSE_TEXTS = {
    "connection-refused": "connection refused",
    "name-not-resolved": "the host name could not be resolved",
    "tls-failed": "TLS failed: the server has no TLS or an untrusted certificate",
    "connect-timeout": "connection timed out",
    "unreachable": "network unreachable",
    "proxy-failed": "the outgoing proxy refused the connection",
    "out-of-sockets": "this machine has no free file descriptor or port",
    "not-sendable": "the request is not valid HTTP",
    "connection-reset": "connection reset before an answer",
    "invalid-answer": "connection closed without a valid answer",
    "answer-timeout": "no answer in time",
    "answer-cut": "answer cut off",
    "answer-stalled": "answer stalled",
}
# Maps the code of each part that can fail (`core.event.find_failed_part`) to a text.
FAILED_PART_TEXTS = {
    "proxy": "the proxy itself",
    "request": "the request",
    "store": "the store",
    "summary-model": "the summary model",
}
# Texts for the states of a compaction (`admin.queries.RoundState`), by their codes.
ROUND_STATE_TEXTS = {
    "prepared": "prepared, not used yet",
    "unused": "prepared, part of the next one",
    "in-use": "in use",
    "followed": "replaced by a later compaction",
    "undone": "undone",
}
EVENT_KIND_TEXTS = {
    "compacted": "Compacted",
    "failed": "Compaction failed",
    "failed-open": "Sent without a due compaction",
    "over-limit": "Sent although too long",
    "recovered": "Recovered",
    "installed": "In use",
    "measured": "Measured",
    "undone": "Undone",
    "redone": "Redone",
    "marked": "Compact next",
    "pinned": "Pinned",
    "unpinned": "Unpinned",
    "instruction-removed": "Instructions removed",
    "instruction-restored": "Instructions restored",
    "bypassed": "Bypassed",
    "resumed": "Resumed",
}


# Hint for a search for conversations that finds nothing.
WHOLE_ID_HINT = (
    "Enter the client's own session id in full. A part of it is enough only if session.store_names is true."
)


def escape_unprintable(text: object) -> str:
    """Returns a text as a single line, in which every unprintable character is escaped.

    Unprintable characters are, for example, line endings, other control characters (which can control a
    terminal), characters that change the writing direction, and unpaired surrogates. A server may send any of
    these.
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)


def encode_path_segment(value: object) -> str:
    """Encodes a value as one path segment of a URL. Also escapes `/`."""
    return quote(str(value).encode("utf-8", "replace"), safe="")


def format_usd(value: float | None) -> str:
    """Formats an amount in dollars. None becomes `n/a`.

    The amount gets two decimals, such as `$1.23`. An amount below one cent gets four decimals, and an amount
    below $0.00005 becomes `<$0.0001`. Zero becomes `$0.00`. The sign does not count for these limits.
    """
    if value is None:
        return UNKNOWN
    sign = MINUS if value < 0 else ""
    size = abs(value)
    if 0 < size < 0.00005:
        return f"{sign}<$0.0001"
    return f"{sign}${size:,.4f}" if 0 < size < 0.01 else f"{sign}${size:,.2f}"


def format_price_per_million(value: float | None) -> str:
    """Formats a price, in dollars per million tokens, with two to six decimals. None becomes `n/a`."""
    if value is None:
        return UNKNOWN
    digits = f"{value:,.6f}".rstrip("0")
    return "$" + digits + "0" * (2 - len(digits.partition(".")[2]))


def format_count(value: float | None) -> str:
    """Rounds a number to a whole number, and formats it with thousands separators. None becomes `n/a`."""
    return UNKNOWN if value is None else f"{value:,.0f}".replace("-", MINUS)


def format_quantity(value: float | None, noun: str) -> str:
    """Formats a count with its noun, such as `1 record`, `12,345 records` or `n/a records`."""
    count = format_count(value)
    return f"{count} {noun}{'' if count == '1' else 's'}"


def format_short_number(value: float | None) -> str:
    """Formats a number briefly, such as 950, 4.1k (thousands), 1.6M (millions) or 2G (billions).

    None becomes `n/a`.
    """
    if value is None:
        return UNKNOWN
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        scaled = value / size
        if round(abs(scaled), 3) >= 1:  # 999,960 is 1M, not 1000k
            digits = f"{scaled:.1f}".removesuffix(".0") if abs(scaled) < 99.95 else f"{scaled:.0f}"
            return digits.replace("-", MINUS) + sign
    return f"{value:.0f}".replace("-", MINUS)


def format_percent(part: float | None, whole: float | None) -> str:
    """Formats `part` as a percentage of `whole`, without decimals.

    Returns `n/a` if `part` is None, or if `whole` is None or 0.
    """
    if part is None or not whole:
        return UNKNOWN
    return f"{100 * part / whole:.0f} %".replace("-", MINUS)


def format_milliseconds(seconds: float | None) -> str:
    """Formats a duration, given in seconds, as milliseconds. None becomes `n/a`."""
    if seconds is None:
        return UNKNOWN
    value = seconds * 1_000
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"


def format_duration(seconds: float | None) -> str:
    """Formats a number of seconds as a text such as `850 ms` or `1.5 s`. None becomes `n/a`.

    Durations below one second are formatted in milliseconds.
    """
    return format_milliseconds(seconds) if seconds is None or seconds < 1 else f"{seconds:.1f} s"


def format_iso_time(timestamp: float | None) -> str:
    """Formats a time, given in seconds since the epoch, as UTC in ISO 8601. None and 0 become `n/a`."""
    return UNKNOWN if not timestamp else time.strftime("%Y-%m-%dT%H:%M:%SZ", _to_utc(timestamp))


def format_display_time(timestamp: float | None) -> str:
    """Formats a time, given in seconds since the epoch, as UTC, such as `22 Nov 13:05:09`.

    None and 0 become `n/a`.
    """
    return UNKNOWN if not timestamp else time.strftime("%d %b %H:%M:%S", _to_utc(timestamp))


def _to_utc(timestamp: float) -> time.struct_time:
    return time.gmtime(min(max(timestamp, 0.0), 253_402_300_799.0))  # up to the last second of the year 9999


def format_age(timestamp: float | None, now: float) -> str:
    """Formats the time from `timestamp` to `now` in days, hours, minutes or seconds, such as `3 h ago`.

    Both arguments are in seconds since the epoch. The unit is the largest one of which at least one has
    passed. If `timestamp` is later than `now`, returns `0 s ago`. If it is None or 0, returns `n/a`.
    """
    if not timestamp:
        return UNKNOWN
    age_s = max(0.0, now - timestamp)
    for size, sign in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if age_s >= size:
            return f"{age_s / size:.0f} {sign} ago"
    return f"{age_s:.0f} s ago"


def format_setting(value: object) -> str:
    """Formats a configuration value, given as a JSON value: items with commas, mappings in braces."""
    match value:
        case None:
            return "unset"
        case bool():
            return "yes" if value else "no"
        case "":
            return "empty"
        case list():
            return ", ".join(map(format_setting, value)) or "none"
        case dict():
            items = ", ".join(f"{name}: {format_setting(each)}" for name, each in value.items())
            return f"{{{items}}}" if items else "none"
    return str(value)


def describe_reason(code: str) -> str:
    """Returns the text for the code of an event's reason, followed by the code in parentheses.

    If there is no text for the code, returns only the code, with spaces in place of hyphens.
    """
    text = REASON_TEXTS.get(code) or _STATUSES.get(code) or _FAMILIES.get(code.partition("-")[0] + "-")
    return f"{text} ({code})" if text else code.replace("-", " ")


def describe_due_reasons(codes: str) -> str:
    """Returns the texts for the reasons why a compaction was due, separated by commas.

    `codes` contains the codes of the reasons, separated by commas. If it is empty, returns `n/a`. A code
    without a text is returned with spaces in place of hyphens.
    """
    return (
        ", ".join(DUE_REASON_TEXTS.get(word) or word.replace("-", " ") for word in codes.split(","))
        or UNKNOWN
    )


def describe_upstream_cause(code: str) -> str:
    """Returns the text for the code of an upstream failure's cause.

    A code that contains an HTTP status, such as `http-503`, becomes `upstream answered 503`. Another code
    without a text is returned with spaces in place of hyphens; an empty code becomes `n/a`.
    """
    family, _, status = code.partition("-")
    if family == "http":
        return f"upstream answered {status}"
    return UPSTREAM_CAUSE_TEXTS.get(code) or code.replace("-", " ") or UNKNOWN


def describe_failed_requests(failed: int, requests: int, failure: str) -> str:
    """Returns a text such as `6 of 6 requests failed: 429 insufficient_quota`.

    `failure` is why the latest of them failed; empty if unknown.
    """
    reason = f": {failure}" if failure else ""
    return f"{format_count(failed)} of {format_quantity(requests, 'request')} failed{reason}"


def describe_status(status: str, reason: str, size_bytes: int | None, most_bytes: float | None = None) -> str:
    """Returns the text for what the proxy did with a request.

    This is the status, followed by the code of the reason if there is one. For a request that was not read
    because of its size, it is `not inspected (small)` and this size. `most_bytes` is the largest such size
    now. It is shown unless it is unknown or was larger when the request came.
    """
    if reason == "small":
        if size_bytes is None:
            return "not inspected (small)"
        limit = f"; up to {format_count(most_bytes)} need no compaction"
        limit = limit if most_bytes and most_bytes >= size_bytes else ""
        return f"not inspected (small), {format_quantity(size_bytes, 'byte')}{limit}"
    return f"{status} {reason}" if reason else status


def get_event_word(kind: str, outcome: object) -> str:
    """Returns the kind of an event, or `prepared` for a compaction that no request has used yet."""
    return "prepared" if kind == "compacted" and outcome == "scheduled" else kind


def describe_event_kind(code: str, outcome: str = "") -> str:
    """Returns the text for the kind of an event. A kind without a text is returned unchanged.

    `outcome` is the outcome of the event. It tells a prepared compaction from one that a request uses.
    """
    word = get_event_word(code, outcome)
    return "Prepared" if word == "prepared" else EVENT_KIND_TEXTS.get(word, word)


def describe_round_state(state: str, used_at: float | None) -> str:
    """Returns the text for the state of a compaction, such as `in use since 22 Nov 13:05:09`.

    `used_at` is when a request first used the compaction, in seconds since the epoch; None if unknown.
    """
    text = ROUND_STATE_TEXTS.get(state, state)
    return f"{text} since {format_display_time(used_at)}" if state == "in-use" and used_at else text


def describe_request_after_undo(remaining: int | None, hard_tokens: int | None, strategy: str = "") -> str:
    """Says how the next request is sent after an undo, and when a compaction is made nevertheless.

    Args:
        remaining: Number of the compaction that is in use; None if none is.
        hard_tokens: Request size, in tokens, from which compactions are made in spite of the undo; None if
            unknown.
        strategy: Strategy of the compaction that is in use; empty if unknown.
    """
    form = "in full" if remaining is None else "shortened"
    if remaining:
        form = f"with round {remaining}{f' of {strategy}' if strategy else ''}"
    size = f"about {format_count(hard_tokens)} tokens" if hard_tokens else "the hard mark (`hard_percent`)"
    return f"The next request is sent {form}. Compaction is paused, except when a request exceeds {size}."


def describe_missing_price(*, list_prices: bool) -> str:
    """Returns why no price is known. `list_prices` says whether the shipped list of prices is used."""
    if list_prices:
        return "the prices of all used models are unknown; set `models.*.prices` in config.yaml"
    return (
        "list prices do not apply to an upstream on this machine or network; set `upstream.prices: list` or "
        "`models.*.prices` in config.yaml"
    )


def describe_missing_dollars(
    requests: object, failed: object, prompt_tokens: object, *, list_prices: bool
) -> str:
    """Returns why no amount is known.

    Args:
        requests: Number of requests.
        failed: Number of requests that failed.
        prompt_tokens: The input tokens that the provider has counted.
        list_prices: Whether the shipped list of prices is used.
    """
    if failed and failed == requests:
        return "all requests failed"
    if prompt_tokens:
        return describe_missing_price(list_prices=list_prices)
    return "the provider has not reported token counts (usage)"
