"""The admin API of the proxy as a whole: statistics, failures of upstreams, models, configuration."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from fastapi import Response

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import Set, Settings, Time, Watches, answer, moment, routes
from compaction_proxy.config.config import Config
from compaction_proxy.config.keys import dotted, keys, plain
from compaction_proxy.telemetry.statistics import By

# Where a value is from, where nobody has read any file.
UNKNOWN = "unknown"

router = routes()


@dataclass(frozen=True, slots=True)
class Value:
    """A key of the configuration, its value, and where that is from."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration that is in force; secrets are masked.

    Attributes:
        path: The file that was read; null for none.
        values: Every key, in order.
        warnings: What works but is probably not meant.
    """

    path: str | None
    values: tuple[Value, ...]
    warnings: tuple[str, ...]


@router.get("/stats", response_model=schemas.Stats)
async def _stats(watching: Watches, since: Time = "7d", until: Time = "0m", by: By = "total") -> Response:
    """What all exchanges come to, in the hours that begin or end between `since` and `until`."""
    now = watching.now()
    start, stop = moment(since, now), moment(until, now)
    return answer(schemas.stats(start, stop, by, await watching.summed(start, stop, by)))


@router.get("/upstream-failures", response_model=schemas.UpstreamFailureList)
async def _upstream_failures(watching: Watches, since: Time = "24h", until: Time = "0m") -> Response:
    """Failures of upstreams by target and cause, in the hours as `stats` takes them."""
    now = watching.now()
    start, stop = moment(since, now), moment(until, now)
    found, complete = await watching.upstream_failures(start, stop)
    rows = tuple(schemas.UpstreamFailureRow(**asdict(each)) for each in found)
    return answer(asdict(schemas.UpstreamFailureList(start, stop, complete, rows)))


@router.get("/models", response_model=schemas.Models)
async def _models(watching: Watches) -> Response:
    """Windows and prices of models."""
    found = await watching.models()
    return answer({"models": [asdict(schemas.model(each)) for each in found]})


@router.get("/config", response_model=Configuration)
async def _config(settings: Set) -> Response:
    """The configuration that is in force, and where each value is from."""
    return answer(asdict(configuration(settings)))


def configuration(settings: Settings) -> Configuration:
    """The configuration, as it may be shown."""
    return Configuration(settings.path or None, tuple(_values(settings)), settings.warnings)


def _values(settings: Settings) -> Iterator[Value]:
    for key in keys():
        name = dotted(key.place)
        yield Value(name, plain(_at(settings.config, key.place)), settings.origins.get(name, UNKNOWN))


def _at(config: Config, place: tuple[str | int, ...]) -> object:
    found: object = reduce(getattr, map(str, place), config)
    return found
