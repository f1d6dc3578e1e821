"""Admin API endpoints for the whole proxy: statistics, upstream failures, models and configuration."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from fastapi import Response

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import (
    AdminSettings,
    QueriesDependency,
    SettingsDependency,
    TimeParameter,
    build_json_response,
    create_router,
    parse_time,
)
from compaction_proxy.config.config import Config
from compaction_proxy.config.keys import format_key_path, iter_keys, to_plain_value
from compaction_proxy.telemetry.statistics import Grouping

# Shown as the origin of a configuration value if the origin is not known.
UNKNOWN = "unknown"

router = create_router()


@dataclass(frozen=True, slots=True)
class Value:
    """A configuration key, its value, and the source of the value (such as a file or a default)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The current configuration. Secrets are masked.

    Attributes:
        path: Path of the configuration file; null if there is none.
        values: All keys with their values.
        warnings: Settings that are valid but probably not intended.
    """

    path: str | None
    values: tuple[Value, ...]
    warnings: tuple[str, ...]


@router.get("/stats", response_model=schemas.Stats)
async def _stats(
    queries: QueriesDependency,
    since: TimeParameter = "7d",
    until: TimeParameter = "0m",
    by: Grouping = "total",
) -> Response:
    """Get the sums of all exchanges, in the whole hours that overlap the time from `since` to `until`."""
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    return build_json_response(
        schemas.to_stats(start, stop, by, await queries.get_statistics(start, stop, by))
    )


@router.get("/upstream-failures", response_model=schemas.UpstreamFailureList)
async def _upstream_failures(
    queries: QueriesDependency, since: TimeParameter = "24h", until: TimeParameter = "0m"
) -> Response:
    """List the failures of upstreams by target and cause, in the hours from `since` to `until`."""
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    found, complete = await queries.list_upstream_failures(start, stop)
    rows = [asdict(each) for each in found]
    return build_json_response({"since": start, "until": stop, "complete": complete, "failures": rows})


@router.get("/models", response_model=schemas.Models)
async def _models(queries: QueriesDependency) -> Response:
    """List the context windows and prices of models."""
    return build_json_response({"models": [asdict(each) for each in await queries.list_models()]})


@router.get("/config", response_model=Configuration)
async def _config(settings: SettingsDependency) -> Response:
    """Get the current configuration, with the source of each value."""
    return build_json_response(asdict(build_configuration(settings)))


def build_configuration(settings: AdminSettings) -> Configuration:
    """Builds the response that shows the current configuration, with masked secrets."""
    return Configuration(settings.path or None, tuple(_list_values(settings)), settings.warnings)


def _list_values(settings: AdminSettings) -> Iterator[Value]:
    for key in iter_keys():
        name = format_key_path(key.path)
        yield Value(
            name, to_plain_value(_get_value(settings.config, key.path)), settings.origins.get(name, UNKNOWN)
        )


def _get_value(config: Config, place: tuple[str | int, ...]) -> object:
    found: object = reduce(getattr, map(str, place), config)
    return found
