"""Defines protocols for objects that count tokens, find context windows and prices, and request summaries."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall


class TokenCounter(Protocol):
    """Counts the tokens of texts.

    Never fails. If it cannot count a text, it estimates the number of tokens from the text's length.
    """

    def count(self, text: str, model: str) -> int:
        """Returns the uncalibrated number of tokens of `text` for `model`.

        Thread-safe. Takes up to a second per megabyte.
        """
        ...

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Returns the uncalibrated number of tokens of each text, in order, with the same results as `count`.

        One call may acquire the interpreter lock less often than several calls of `count`, and so wait less
        often for other threads.
        """
        ...


class SummaryModel(Protocol):
    """A model that writes summaries."""

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """Requests one summary. The caller enforces the deadline.

        If the provider refuses an optional member of the request, may send the request again without this
        member. Never sends the same request twice.

        Raises:
            SummaryError: If the model cannot be reached or sends no usable response. The `reason` is one of
                `http-NNN`, `overflow`, `unknown-model`, `unreachable`, `garbage`. With `http-NNN`, the error
                may say after how many seconds to try again (`retry_after_s`).
        """
        ...


class WindowDiscovery(Protocol):
    """Asks an upstream for the context windows of its models."""

    async def discover_window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """Returns a model's context window, in tokens.

        Returns None if the upstream does not give it within the time limit of the implementation.
        """
        ...


class PriceSource(Protocol):
    """Looks up the prices of models."""

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        """Returns the price of a model at an upstream; None if it is unknown."""
        ...
