"""Whether rounds do any good, by what providers count: two that do not, and the conversation is left alone.

What a tokenizer says is an estimate, and what is compacted may be small beside what is not: a loop of rounds
that win nothing costs a summary call each, and breaks the provider's prompt cache every time. A round that
fails because of its messages would cost its processor time again with every further message.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# A round that saves less than this share of what rounds can remove has done no good. The provider counts.
LEAST_SAVING = 0.15
INEFFECTIVE_ROUNDS = 2
# A conversation is tried again once it has grown by this share, or after so many seconds.
RETRY_GROWTH = 0.20
PAUSE_S = 600.0
# After a round that could not be made less growth may make one possible; and less still where the request no
# longer fits otherwise.
FAILURE_GROWTH = 0.05
URGENT_GROWTH = 0.02
MAX_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _RoundEffect:
    """What is known of one conversation: ineffective rounds in a row, and when the last was."""

    baseline_key: bytes = b""
    ineffective: int = 0
    tokens: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _RoundFailure:
    """A round that could not be made of a conversation's messages.

    Attributes:
        length: Number of the messages.
        prefix: Prefix digest of the last of them.
        window: Of the model, in tokens; how large a round may be follows from it.
        tokens: Counted tokens of the request.
        at: When it failed.
    """

    length: int
    prefix: bytes
    window: int
    tokens: int
    at: float


class RoundEffectiveness:
    """Judges rounds, on one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _RoundEffect] = OrderedDict()
        self._failures: OrderedDict[str, _RoundFailure] = OrderedDict()

    def record_round(
        self, thread: str, baseline_key: bytes, *, before: int, after: int, fixed: int = 0
    ) -> None:
        """A request was answered for which a round had been made.

        Args:
            thread: The conversation (`view.thread`).
            baseline_key: What tells the round apart from others; each is judged once.
            before: Tokens that the request would have had.
            after: Tokens that the provider counted.
            fixed: Tokens of both that no round removes.
        """
        known = self._known.pop(thread, _RoundEffect())
        if known.baseline_key != baseline_key:
            useless = before - after < LEAST_SAVING * max(0, before - fixed)
            known = replace(
                known,
                baseline_key=baseline_key,
                ineffective=known.ineffective + 1 if useless else 0,
                tokens=after,
                at=self._clock(),
            )
        self._known[thread] = known
        if len(self._known) > MAX_CONVERSATIONS:
            self._known.popitem(last=False)

    def is_paused(self, thread: str, tokens: int) -> bool:
        """Whether another round of a request of this size would do no good either."""
        known = self._known.get(thread)
        return (
            known is not None and known.ineffective >= INEFFECTIVE_ROUNDS and self._is_resting(known, tokens)
        )

    def record_failure(self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int) -> None:
        """Takes note of a round that failed for a reason that follows from its messages.

        Args:
            thread: The conversation (`view.thread`).
            prefixes: Prefix digests of its messages.
            window: Of the model, in tokens.
            tokens: Counted tokens of the request: calibration must not look like growth.
        """
        self._failures.pop(thread, None)
        self._failures[thread] = _RoundFailure(len(prefixes), prefixes[-1], window, tokens, self._clock())
        if len(self._failures) > MAX_CONVERSATIONS:
            self._failures.popitem(last=False)

    def is_failing(
        self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int, urgent: bool
    ) -> bool:
        """Returns whether a round of this request would fail as the last one did; arguments as above.

        True where the request begins with the messages of a round that failed, until it has grown by
        `FAILURE_GROWTH`, by `URGENT_GROWTH` if it is `urgent`, or `PAUSE_S` have passed. Another
        conversation of the same thread is not held back.
        """
        known = self._failures.get(thread)
        if known is None or known.window != window or len(prefixes) < known.length:
            return False
        growth = URGENT_GROWTH if urgent else FAILURE_GROWTH
        return prefixes[known.length - 1] == known.prefix and self._is_resting(known, tokens, growth)

    def _is_resting(
        self, known: _RoundEffect | _RoundFailure, tokens: int, growth: float = RETRY_GROWTH
    ) -> bool:
        return tokens < (1 + growth) * known.tokens and self._clock() - known.at < PAUSE_S
