"""What the demo prints: one line a turn, and one line for each thing that had to hold."""

from collections.abc import Iterable
from dataclasses import dataclass

from compaction_proxy.cli.demo.agent import AgentExchange

HEAD = f"{'turn':>4}  {'client sent':>11}  {'sent on':>7}  {'saved':>5}  what happened"


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn through the proxy. Tokens are of the turn's last request, as the provider counts them."""

    turn: int
    client_tokens: int
    sent_tokens: int
    remark: str

    def format_line(self) -> str:
        """The row as a line."""
        saved = 1 - self.sent_tokens / self.client_tokens
        sizes = f"{self.turn:>4}  {self.client_tokens:>11,}  {self.sent_tokens:>7,}  {saved:>4.0%}"
        return f"{sizes}   {self.remark}".rstrip()


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """Something that had to hold."""

    is_ok: bool
    text: str

    def format_line(self) -> str:
        """The check as a line."""
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
    """What happened in a turn: a refusal or a compaction if there was one, else its last request's note."""
    notes = [_describe_exchange(exchange) for exchange in exchanges]
    telling = [text for text in notes if text.startswith(("refused", "compacted"))]
    return (telling or notes)[-1]
