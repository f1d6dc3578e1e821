"""Judges by the provider's token counts whether compactions save tokens, and pauses them where they do not.

Estimates may be wrong, and the removable part of a request may be small, so a compaction may save nothing.
Such a compaction still costs a summary call and breaks the provider's prompt cache. So after two ineffective
compactions in a row, the conversation is not compacted for a while. A compaction may also fail because of the
messages themselves. It would fail again with the next request and cost the same processor time, so it is not
tried again at once.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# A compaction is ineffective if it saves less than this share of the removable tokens, by the provider's
# count.
LEAST_SAVING = 0.15
# After this many ineffective compactions in a row, a conversation is paused.
INEFFECTIVE_ROUNDS = 2
# A paused conversation is compacted again once its request has grown by this share, or after this many
# seconds.
RETRY_GROWTH = 0.20
PAUSE_S = 600.0
# A failed compaction is tried again once the request has grown by the first share. The second share applies
# if the compaction is urgent, because the request would not fit without it.
FAILURE_GROWTH = 0.05
URGENT_GROWTH = 0.02
MAX_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _RoundEffect:
    """The effect of the latest compactions of one conversation.

    Attributes:
        baseline_key: Identifies the compaction that was judged last.
        ineffective: Number of ineffective compactions in a row.
        tokens: Tokens of the request that this compaction has shortened, as the provider counted them.
        recorded_at_s: When this compaction was judged, in monotonic seconds.
    """

    baseline_key: bytes = b""
    ineffective: int = 0
    tokens: int = 0
    recorded_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _RoundFailure:
    """A compaction that failed because of its messages.

    Attributes:
        message_count: Number of messages of the request that are not fixed.
        prefix: Prefix digest of the last of these messages.
        window: Context window of the model, in tokens. It limits the size of a compaction, so with another
            window the compaction may succeed.
        tokens: Counted tokens of the request.
        recorded_at_s: When the compaction failed, in monotonic seconds.
    """

    message_count: int
    prefix: bytes
    window: int
    tokens: int
    recorded_at_s: float


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
        self,
        thread: str,
        baseline_key: bytes,
        *,
        before_tokens: int,
        after_tokens: int,
        fixed_tokens: int = 0,
    ) -> None:
        """Records the effect of a compaction, once the compacted request has been answered.

        Args:
            thread: Key of the conversation (`request_view.format_strategy_thread`).
            baseline_key: Identifies the compaction. Each compaction is judged only once.
            before_tokens: Tokens that the request would have had without the compaction.
            after_tokens: Tokens of the compacted request, as the provider counted them.
            fixed_tokens: Tokens of the request that no compaction removes.
        """
        effect = self._known.pop(thread, _RoundEffect())
        if effect.baseline_key != baseline_key:
            is_ineffective = before_tokens - after_tokens < LEAST_SAVING * max(
                0, before_tokens - fixed_tokens
            )
            effect = replace(
                effect,
                baseline_key=baseline_key,
                ineffective=effect.ineffective + 1 if is_ineffective else 0,
                tokens=after_tokens,
                recorded_at_s=self._clock(),
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
            prefixes: Prefix digests of the messages of the request that are not fixed.
            window: Context window of the model, in tokens.
            tokens: Counted tokens of the request. They are not calibrated, because a change of the
                calibration must not look like growth of the request.
        """
        self._failures.pop(thread, None)
        self._failures[thread] = _RoundFailure(len(prefixes), prefixes[-1], window, tokens, self._clock())
        if len(self._failures) > MAX_CONVERSATIONS:
            self._failures.popitem(last=False)

    def is_failing(
        self, thread: str, prefixes: Sequence[bytes], *, window: int, tokens: int, is_urgent: bool
    ) -> bool:
        """Returns whether a compaction of this request would probably fail as the last one did.

        That is so for at most `PAUSE_S` seconds after the failure. The request must begin with the messages
        of the request whose compaction failed, have the same context window, and have grown by less than
        `FAILURE_GROWTH` (less than `URGENT_GROWTH` if `is_urgent`). The other arguments are those of
        `record_failure`.
        """
        failure = self._failures.get(thread)
        if failure is None or failure.window != window or len(prefixes) < failure.message_count:
            return False
        growth = URGENT_GROWTH if is_urgent else FAILURE_GROWTH
        return prefixes[failure.message_count - 1] == failure.prefix and self._is_resting(
            failure, tokens, growth
        )

    def _is_resting(
        self, entry: _RoundEffect | _RoundFailure, tokens: int, growth: float = RETRY_GROWTH
    ) -> bool:
        return tokens < (1 + growth) * entry.tokens and self._clock() - entry.recorded_at_s < PAUSE_S
