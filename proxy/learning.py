"""What an upstream teaches about its models: the true window from its errors, the true count from its usage.

One record per tenant, upstream origin and model, held in the process and kept in the store for a day, so that
a restart does not have to run into the same error again. Per tenant, because errors echo requests and counts
follow them: what one tenant's requests provoke must not shape another's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.core.calibration import Calibration
from proxy.core.keys import model_key
from proxy.records import Fields, Records

# Providers change what they serve behind a name; what was learned is believed this long, in seconds.
BELIEVED_S = 86_400.0
MAX_MODELS = 4_096
# A ratio that has moved by this much (in its logarithm) since it was last kept is kept again.
KEPT_STEP = 0.02


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of one model at one upstream.

    Attributes:
        calibration: How the upstream's count relates to ours.
        window: Largest input that an error named, in tokens; None if none did.
        until: When the window is no longer believed, in seconds since the epoch.
    """

    calibration: Calibration
    window: int | None = None
    until: float = 0.0


class Learning:
    """Remembers what was learned. `now` gives seconds since the epoch."""

    def __init__(self, records: Records, now: Callable[[], float] = time.time) -> None:
        self._records = records
        self._now = now
        self._known: dict[str, Learned] = {}
        self._kept: dict[str, float] = {}

    async def of(self, tenant: str, origin: str, model: str) -> Learned:
        """What is known of a model; asks the store once in the life of the process."""
        key = model_key(tenant, origin, model)
        if key not in self._known:
            [fields] = await self._records.find([key])
            if key not in self._known:  # nobody has learned anything while the store was asked
                self._remember(key, self._from(fields, model))
        return self._fresh(key)

    def window(self, tenant: str, origin: str, model: str) -> int | None:
        """The learned window, as far as this process knows it already."""
        key = model_key(tenant, origin, model)
        return self._fresh(key).window if key in self._known else None

    def calibration(self, tenant: str, origin: str, model: str) -> Calibration:
        """How the upstream counts, as far as this process knows it already."""
        known = self._known.get(model_key(tenant, origin, model))
        return known.calibration if known else Calibration.prior(model)

    async def overflowed(self, tenant: str, origin: str, model: str, window: int) -> None:
        """An error named the window. A smaller one replaces a larger one, until that is forgotten."""
        known = await self.of(tenant, origin, model)
        smaller = min(window, known.window or window)
        until = self._now() + BELIEVED_S
        await self._keep(model_key(tenant, origin, model), replace(known, window=smaller, until=until))

    async def observed(self, tenant: str, origin: str, model: str, estimate: int, actual: int) -> None:
        """An answer's usage said how many tokens a request really had."""
        key = model_key(tenant, origin, model)
        known = await self.of(tenant, origin, model)
        learned = replace(known, calibration=known.calibration.observe(estimate, actual))
        self._remember(key, learned)
        if abs(learned.calibration.mean - self._kept.get(key, float("inf"))) >= KEPT_STEP:
            await self._keep(key, learned)

    def _fresh(self, key: str) -> Learned:
        known = self._known[key]
        return replace(known, window=None) if known.window and known.until <= self._now() else known

    def _remember(self, key: str, learned: Learned) -> None:
        if key not in self._known and len(self._known) >= MAX_MODELS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._kept.pop(oldest, None)
        self._known[key] = learned

    async def _keep(self, key: str, learned: Learned) -> None:
        self._remember(key, learned)
        self._kept[key] = learned.calibration.mean
        calibration = learned.calibration.to_dict()
        fields = {"window": learned.window, "until": learned.until, "calibration": calibration}
        await self._records.keep(key, fields, ttl_s=BELIEVED_S)

    def _from(self, fields: Fields | None, model: str) -> Learned:
        if fields is not None:
            try:
                window = fields["window"]
                return Learned(
                    Calibration.from_dict(fields["calibration"]),
                    window if type(window) is int and window > 0 else None,
                    float(fields["until"]),
                )
            except (KeyError, ValueError, TypeError):
                pass
        return Learned(Calibration.prior(model))
