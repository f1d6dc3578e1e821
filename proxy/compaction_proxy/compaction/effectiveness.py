"""Judges by the provider's counts whether compactions save tokens, and pauses those that do not.

A tokenizer only estimates, and the removable part of a request may be small. A loop of compactions that save
nothing costs a summary call each time, and breaks the provider's prompt cache every time. After two
ineffective compactions, the conversation is left alone. A compaction that fails because of its messages would
cost its processor time again with every further message.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# A compaction is ineffective if it saves less than this share of the removable tokens, by the provider's
# count.
LEAST_SAVING = 0.15
INEFFECTIVE_ROUNDS = 2
# A paused conversation is tried again once it has grown by this share, or after so many seconds.
RETRY_GROWTH = 0.20
PAUSE_S = 600.0
# A failed compaction is tried again after less growth, and after still less if the request no longer fits
# otherwise.
FAILURE_GROWTH = 0.05
URGENT_GROWTH = 0.02
MAX_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _RoundEffect:
    """The ineffective compactions in a row of one conversation, and when the last one was judged."""

    baseline_key: bytes = b""
    ineffective: int = 0
    tokens: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _RoundFailure:
    """A compaction that failed because of its messages.

    Attributes:
        length: Number of the messages.
        prefix: Prefix digest of the last message.
        window: Context window of the model, in tokens. It limits the size of a compaction.
        tokens: Counted tokens of the request.
        at: When the compaction failed, in monotonic seconds.
    """

    length: int
    prefix: bytes
    window: int
    tokens: int
    at: float


class RoundEffectiveness:
    """Judges the effect of compactions, on one event loop.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _RoundEffect] = OrderedDict()
        self._failures: OrderedDict[str, _RoundFailure] = OrderedDict()

    def record_round(
        self, thread: str, baseline_key: bytes, *, before: int, after: int, fixed: int = 0
    ) -> None:
        """Records the effect of a compaction, once the compacted request has been answered.

        Args:
            thread: Key of the conversation (`request_view.format_strategy_thread`).
            baseline_key: Tells this compaction apart from others; each is judged once.
            before: Tokens that the request would have had without the compaction.
            after: Tokens that the provider counted.
            fixed: Tokens of the request that no compaction removes.
        """
        effect = self._known.pop(thread, _RoundEffect())
        if effect.baseline_key != baseline_key:
            is_ineffective = before - after < LEAST_SAVING * max(0, before - fixed)
            effect = replace(
                effect,
                baseline_key=baseline_key,
                ineffective=effect.ineffective + 1 if is_ineffective else 0,
                tokens=after,
                at=self._clock(),
            )
        self._known[thread] = effect
        if len(self._known) > MAX_CONVERSATIONS:
            self._known.popitem(last=False)

    def is_paused(self, thread: str, tokens: int) -> bool:
        """Returns whether compactions of this conversation are paused at this request size."""
        effect = self._known.get(thread)
        return (
            effect is not None
            and effect.ineffective >= INEFFECTIVE_ROUNDS
            and self._is_resting(effect, tokens)
        )

    def record_failure(self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int) -> None:
        """Records a compaction that failed because of its messages.

        Args:
            thread: Key of the conversation (`request_view.format_strategy_thread`).
            prefixes: Prefix digests of its messages.
            window: Context window of the model, in tokens.
            tokens: Counted tokens of the request. They are not calibrated, as a new calibration must not look
                like growth.
        """
        self._failures.pop(thread, None)
        self._failures[thread] = _RoundFailure(len(prefixes), prefixes[-1], window, tokens, self._clock())
        if len(self._failures) > MAX_CONVERSATIONS:
            self._failures.popitem(last=False)

    def is_failing(
        self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int, urgent: bool
    ) -> bool:
        """Returns whether a compaction of this request would fail as the last one did.

        The arguments are those of `record_failure`. The result is True if the request begins with the
        messages of a failed compaction, until it has grown by `FAILURE_GROWTH`, by `URGENT_GROWTH` if it is
        `urgent`, or `PAUSE_S` have passed. Another conversation of the same thread is not held back.
        """
        failure = self._failures.get(thread)
        if failure is None or failure.window != window or len(prefixes) < failure.length:
            return False
        growth = URGENT_GROWTH if urgent else FAILURE_GROWTH
        return prefixes[failure.length - 1] == failure.prefix and self._is_resting(failure, tokens, growth)

    def _is_resting(
        self, known: _RoundEffect | _RoundFailure, tokens: int, growth: float = RETRY_GROWTH
    ) -> bool:
        return tokens < (1 + growth) * known.tokens and self._clock() - known.at < PAUSE_S
