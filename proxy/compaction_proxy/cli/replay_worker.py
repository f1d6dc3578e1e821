"""The stage of rehearsals: the proxy's parts over a memory of their own; no model writes summaries.

`main` is what plays for a proxy that serves, in a process of its own: it is told what on its standard input,
a line of JSON and then the conversation, and answers with a JSON object (`replay.jobs`).
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, product
from typing import Any

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings, for_model
from compaction_proxy.config.sections import ServerSection, StoreSection
from compaction_proxy.core.cost.price import Price
from compaction_proxy.core.errors import RequestRefused
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.identity import origin
from compaction_proxy.gateway.summary_routes import summary_routes
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.pricing import Pricing
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import Provider
from compaction_proxy.replay.recordings import Recording, recorded
from compaction_proxy.replay.result import to_fields
from compaction_proxy.replay.runner import Stage, Wanted, play
from compaction_proxy.replay.writer import Writer
from compaction_proxy.runtime import Parts
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry import logs

# Whatever is kept of one conversation at a time, its archive included.
STORE_BYTES = 128 * 1024 * 1024
# Whenever the time is asked for, so much of it has gone by: people take minutes where a rehearsal takes none.
PAUSE_S = 60.0
# The relay comes first.
NICENESS = 10
# A client's request, as far as it says whom to ask for a summary.
_SCOPE: dict[str, Any] = {"raw_path": b"/v1/chat/completions", "query_string": b"", "headers": []}


def _aside(config: Config) -> Config:
    """The configuration with nothing kept and nothing secret, so that every rehearsal goes alike."""
    server = ServerSection.model_validate({**dict(config.server), "secret": "rehearsal"})
    return config.model_copy(update={"server": server, "store": StoreSection(url="memory://")})


def _routes(
    config: Config, upstream: Upstream, settings: ModelSettings, policy: Policy, model: str
) -> tuple[SummaryRoute, ...]:
    return summary_routes(config, settings, policy, upstream, _SCOPE, model)


def _price(pricing: Pricing, target: str, model: str) -> Price | None:
    """What a model costs; of one that the upstream does not have, what it costs by its name alone."""
    return pricing.of(model, target) or pricing.of(model, "")


async def _priced(pricing: Pricing, target: str, models: Iterable[str]) -> None:
    await pricing.ready(product(models, (target, "")))


@asynccontextmanager
async def staged(config: Config) -> AsyncIterator[Stage]:
    """A stage for rehearsals under a configuration."""
    config = _aside(config)
    counter = TiktokenCounter(lambda _: None)
    writer = Writer(Provider(counter))
    moments = count()
    parts = Parts(
        config,
        MemoryStore(max_bytes=STORE_BYTES),
        writer,
        clock=lambda: PAUSE_S * next(moments),
    )
    upstream = Upstream(
        base_url=config.upstream.base_url,
        api_key="",
        hop="",
        engine=parts.engine,
        connect_timeout_s=0,
        read_timeout_s=0,
    )
    target = origin(config.upstream.base_url)
    async with parts.running(None):
        yield Stage(
            compactor=parts.compactor(config),
            observing=parts.observing(),
            writer=writer,
            counter=parts.counter,
            settings=partial(for_model, config),
            routes=partial(_routes, config, upstream),
            price=partial(_price, parts.pricing, target),
            priced=partial(_priced, parts.pricing, target),
            origin=target,
        )


async def _results(config: Config, recording: Recording, strategies: list[str], wanted: Wanted) -> list[Any]:
    async with staged(config) as stage:
        return [to_fields(await play(stage, recording, name, wanted)) for name in strategies]


def answered(told: bytes) -> dict[str, Any]:
    """What is played, as results or as an error."""
    line, _, body = told.partition(b"\n")
    about = json.loads(line)
    try:
        recording = recorded(json.loads(body), about["name"])
    except (RequestRefused, ValueError, RecursionError) as error:
        return {"error": str(error)}
    config = Config.model_validate_json(json.dumps(about["config"]))
    strategies = list(dict.fromkeys(about["strategies"]))
    return {"results": asyncio.run(_results(config, recording, strategies, Wanted(**about["wanted"])))}


def main() -> None:
    """Play what standard input tells, after everything else that the machine has to do."""
    os.nice(NICENESS)
    logs.configure("console", logging.CRITICAL)
    print(json.dumps(answered(sys.stdin.buffer.read())))
