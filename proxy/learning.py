"""What an upstream teaches about its models: the true window from its errors, the true count from its usage.

One record per tenant, upstream origin and model, held in the process and kept in the store for a day, so that
a restart does not have to run into the same error again. Per tenant, because errors echo requests and counts
follow them: what one tenant's requests provoke must not shape another's.

Replicas learn from each other: behind a request now and then, which does not wait for it, the record is read
again. What counts is the ratio of whoever has seen most answers, and the smallest window.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.core.calibration import Calibration
from proxy.core.keys import model_key
from proxy.storage.records import Fields, Records

# Providers change what they serve behind a name; what was learned is believed this long, in seconds.
BELIEVED_S = 86_400.0
MAX_MODELS = 4_096
# A ratio that has moved by this much (in its logarithm) since it was last kept is kept again.
KEPT_STEP = 0.02
# What other replicas have learned is asked for this often, in seconds, and of so many models at once.
LOOK_EVERY_S = 10.0
LOOKS_AT_ONCE = 4


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


def _merged(ours: Learned, theirs: Learned, now: float) -> Learned:
    """What two replicas know: the ratio of the one that saw more, and the smaller window that is believed."""
    calibration = max(ours.calibration, theirs.calibration, key=lambda each: each.observations)
    believed = [each for each in (ours, theirs) if each.window and each.until > now]
    narrower = min(believed, key=lambda each: (each.window or 0, -each.until), default=ours)
    return Learned(calibration, narrower.window, narrower.until)


class Learning:
    """Remembers what was learned, on one event loop.

    Args:
        records: Where it is kept.
        now: Seconds since the epoch.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        records: Records,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._now = now
        self._clock = clock
        self._known: dict[str, Learned] = {}
        self._kept: dict[str, float] = {}  # the ratio's logarithm as the store has it
        self._looked: dict[str, float] = {}
        self._looking: set[asyncio.Task[None]] = set()

    async def of(self, tenant: str, origin: str, model: str) -> Learned:
        """What is known of a model. The store is waited for once in the life of the process."""
        key = model_key(tenant, origin, model)
        if key in self._known:
            self._look_behind(key, model)
        else:
            await self._look(key, model)
        return self._fresh(key)

    def window(self, tenant: str, origin: str, model: str) -> int | None:
        """The learned window, as far as this process knows it already."""
        key = model_key(tenant, origin, model)
        self._look_behind(key, model)
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
        key = model_key(tenant, origin, model)
        self._remember(key, replace(known, window=smaller, until=until))
        await self._keep(key, model)

    async def observed(self, tenant: str, origin: str, model: str, estimate: int, actual: int) -> None:
        """An answer's usage said how many tokens a request really had."""
        key = model_key(tenant, origin, model)
        known = await self.of(tenant, origin, model)
        learned = replace(known, calibration=known.calibration.observe(estimate, actual))
        self._remember(key, learned)
        if abs(learned.calibration.mean - self._kept.get(key, math.inf)) >= KEPT_STEP:
            await self._keep(key, model)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    def _look_behind(self, key: str, model: str) -> None:
        """Look if it is time, behind whoever asks."""
        due = self._clock() - self._looked.get(key, -math.inf) >= LOOK_EVERY_S
        if due and len(self._looking) < LOOKS_AT_ONCE:
            self._looked[key] = self._clock()
            task = asyncio.create_task(self._look(key, model))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, key: str, model: str) -> None:
        """Take over what the store knows. Where it fails, what this process has kept stands in."""
        [fields] = await self._records.find([key], fresh=True)
        theirs = self._from(fields, model)
        ours = self._known.get(key)  # as it is now: something may have been learned meanwhile
        self._remember(key, _merged(ours, theirs, self._now()) if ours else theirs)
        self._looked[key] = self._clock()
        if fields is None:
            self._kept.pop(key, None)
        else:
            self._kept[key] = theirs.calibration.mean

    def _fresh(self, key: str) -> Learned:
        known = self._known[key]
        return replace(known, window=None) if known.window and known.until <= self._now() else known

    def _remember(self, key: str, learned: Learned) -> None:
        if key not in self._known and len(self._known) >= MAX_MODELS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._kept.pop(oldest, None)
            self._looked.pop(oldest, None)
        self._known[key] = learned

    async def _keep(self, key: str, model: str) -> None:
        """Keep what is known, and what another replica has kept since."""
        await self._look(key, model)
        learned = self._known[key]
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
