"""What the charts draw: series as JSON, in an attribute that `static/pages.js` reads.

Each chart stands beside a table with the same figures, for whoever cannot see or draw it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from proxy.admin.ui.shown import Counters, Outcome, Round
from proxy.core.exchange import Exchange

# More columns than this are no picture; the newest are drawn.
MAX_COLUMNS = 500


def period(rows: Sequence[Counters]) -> str:
    """Tokens that clients sent and that were forwarded over time, with rounds and the cached share."""
    dated = [(_seconds(row.of), row) for row in rows]
    drawn = [(at, row) for at, row in dated if at is not None][-MAX_COLUMNS:]
    return _json(
        {
            "kind": "period",
            "x": [at for at, _ in drawn],
            "sent": [row.tokens_before for _, row in drawn],
            "forwarded": [row.tokens_after for _, row in drawn],
            "cached": [min(row.cached_tokens, row.tokens_after) for _, row in drawn],
            "rounds": [row.rounds for _, row in drawn],
        }
    )


def requests(exchanges: Sequence[Exchange], rounds: Sequence[Round]) -> str:
    """What each request of a conversation was and became."""
    drawn = exchanges[-MAX_COLUMNS:]
    first = len(exchanges) - len(drawn)
    made = {each.event.request: each.event.round for each in rounds if each.event.request}
    return _json(
        {
            "kind": "requests",
            "x": list(range(first + 1, first + len(drawn) + 1)),
            "sent": [each.tokens_before for each in drawn],
            "forwarded": [_forwarded(each) for each in drawn],
            "cached": [each.cached_tokens for each in drawn],
            "trigger": [each.trigger for each in drawn],
            "rounds": [made.get(each.request) if each.request else None for each in drawn],
        }
    )


def strategies(outcomes: Sequence[Outcome]) -> str:
    """What each strategy would forward, request by request."""
    sent = [before for before, _ in max((each.points for each in outcomes), key=len, default=())]
    return _json(
        {
            "kind": "strategies",
            "x": list(range(1, len(sent) + 1)),
            "sent": sent,
            "names": [each.strategy for each in outcomes],
            "forwarded": [[after for _, after in each.points] for each in outcomes],
        }
    )


def _forwarded(exchange: Exchange) -> int | None:
    """As the upstream counted it, where it did."""
    return exchange.tokens_after if exchange.prompt_tokens is None else exchange.prompt_tokens


def _seconds(of: str) -> float | None:
    """The beginning of an hour or a day, in seconds since the epoch."""
    try:
        at = datetime.fromisoformat(of)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _json(told: Mapping[str, Any]) -> str:
    return json.dumps(told, allow_nan=False, separators=(",", ":"))
