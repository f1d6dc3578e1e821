"""What is asked of models, and about them: counts of tokens, summaries, windows, prices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall


class TokenCounter(Protocol):
    """Counts the tokens of a text. Never fails: what cannot be counted is estimated from its length."""

    def count(self, text: str, model: str) -> int:
        """Tokens of `text` for `model`, before calibration. Thread-safe; about one second per megabyte."""
        ...

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Tokens of each text, exactly as `count` gives them, at a lower price beside busy threads."""
        ...


class SummaryModel(Protocol):
    """A model that writes summaries."""

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """One answer, without retries beyond those for refused parameters. The deadline is the caller's.

        Raises:
            SummaryFailed: The model could not be asked, or what came back is no answer. Its
                `reason` is one of `http-NNN`, `overflow`, `unknown-model`, `unreachable`, `garbage`; with
                `http-429` and `http-503` it may say when to ask again.
        """
        ...


class WindowDiscovery(Protocol):
    """Asks an upstream what it says of itself."""

    async def discover_window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """The largest input of a model, in tokens; None if the upstream does not say, or not in time."""
        ...


class PriceSource(Protocol):
    """Knows what models cost."""

    def get_price(self, model: str, origin: str) -> ModelPrice | None:
        """The price of a model at an upstream; None where it is not known, or not yet."""
        ...

    def is_resolved(self, model: str, origin: str) -> bool:
        """Whether `get_price` tells all that will be known for now."""
        ...

    async def wait_for_prices(self, names: Iterable[tuple[str, str]]) -> None:
        """Come back when the prices of models at upstreams are known, or cannot be."""
        ...
