"""Formats the demo's output: a line for each turn and a line for each check."""

from collections.abc import Iterable
from dataclasses import dataclass

from compaction_proxy.cli.demo.agent import AgentExchange

HEAD = f"{'turn':>4}  {'client sent':>11}  {'sent on':>7}  {'saved':>5}  what happened"


@dataclass(frozen=True, slots=True)
class TurnRow:
    """The table row for a turn through the proxy.

    The token numbers are those of the turn's last request, as the provider counts them: what the client sent,
    and what the proxy forwarded.
    """

    turn: int
    client_tokens: int
    sent_tokens: int
    remark: str

    def format_line(self) -> str:
        """Formats the row as a line."""
        saved_share = 1 - self.sent_tokens / self.client_tokens
        sizes = f"{self.turn:>4}  {self.client_tokens:>11,}  {self.sent_tokens:>7,}  {saved_share:>4.0%}"
        return f"{sizes}   {self.remark}".rstrip()


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """The result of one of the checks at the end of the demo."""

    is_ok: bool
    text: str

    def format_line(self) -> str:
        """Formats the check as a line."""
        return f"{'ok  ' if self.is_ok else 'FAIL'}  {self.text}"


def _describe_exchange(exchange: AgentExchange) -> str:
    headers = exchange.headers
    status = headers.get("x-compaction-status", "")
    number = headers.get("x-compaction-round", "?")
    if exchange.status != 200:
        return f"refused: {exchange.status} {exchange.code}"
    if status == "applied":
        before, after = (headers.get(f"x-compaction-messages-{when}", "?") for when in ("before", "after"))
        return f"compacted, round {number}: {before} messages became {after}"
    if status == "reused":
        return f"summary of round {number} reused"
    if status == "scheduled":
        return "the next round is prepared behind the answer"
    return "" if status == "none" else status


def describe_turn(exchanges: Iterable[AgentExchange]) -> str:
    """Describes the last refusal or compaction of a turn if there was one, else its last request."""
    notes = [_describe_exchange(exchange) for exchange in exchanges]
    important = [text for text in notes if text.startswith(("refused", "compacted"))]
    return (important or notes)[-1]
