"""Builds the parts of the proxy that a rehearsal needs, and runs the rehearsals that a running proxy starts.

The parts work as in a running proxy, except that the store is in memory and code writes the summaries.

A running proxy starts `main` in a child process (see `replay.jobs`). `main` reads a line of JSON and then a
conversation from standard input, replays the conversation, and prints the results as a JSON object.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings
from compaction_proxy.config.sections import ServerSection, StoreSection
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.identity import format_origin
from compaction_proxy.gateway.summary_routes import build_summary_routes
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import ExtractiveSummaryModel, SimulatedProvider
from compaction_proxy.replay.recordings import Recording, parse_recording
from compaction_proxy.replay.runner import ReplayComponents, ReplayOptions, replay_recording
from compaction_proxy.runtime import Components
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry import logs

# Maximum bytes of the store of a rehearsal. It needs room for one conversation with its archive. A full store
# deletes its oldest values.
STORE_BYTES = 128 * 1024 * 1024
# Seconds by which the simulated clock advances each time it is read. Real users take minutes between
# requests, but a rehearsal replays requests without a pause.
CLOCK_STEP_S = 60.0
# A rehearsal adds this value to the niceness of its process, so that the rehearsal does not slow down the
# proxy.
NICENESS = 10
# Takes the place of the ASGI scope of a client's request, because a rehearsal has no such request. In a
# running proxy, the path and the headers of the request determine the URL and the credential of summary
# calls.
_REQUEST_SCOPE: dict[str, Any] = {"raw_path": b"/v1/chat/completions", "query_string": b"", "headers": []}


def _isolate_config(config: Config) -> Config:
    """Returns the configuration with a store in memory. A fixed secret makes the results reproducible."""
    server = ServerSection.model_validate({**dict(config.server), "secret": "rehearsal"})
    return config.model_copy(update={"server": server, "store": StoreSection(url="memory://")})


def _get_summary_routes(
    config: Config, upstream: Upstream, settings: ModelSettings, policy: Policy, model: str
) -> tuple[SummaryRoute, ...]:
    return build_summary_routes(config, settings, policy, upstream, _REQUEST_SCOPE, model)


@asynccontextmanager
async def open_components(config: Config) -> AsyncIterator[ReplayComponents]:
    """Yields the components for rehearsals with the configuration `config`.

    Closes the components when the caller's `async with` block ends.
    """
    config = _isolate_config(config)
    counter = TiktokenCounter(lambda _: None)
    writer = ExtractiveSummaryModel(SimulatedProvider(counter))
    moments = count()
    parts = Components(
        config,
        MemoryStore(max_bytes=STORE_BYTES),
        writer,
        clock=lambda: CLOCK_STEP_S * next(moments),
    )
    upstream = Upstream(
        base_url=config.upstream.base_url,
        api_key="",
        hop_mark="",
        engine=parts.engine,
        connect_timeout_s=0,
        read_timeout_s=0,
    )
    target = format_origin(config.upstream.base_url)
    async with parts.run_lifespan(None):
        yield ReplayComponents(
            compactor=parts.create_compactor(config),
            usage_feedback=parts.create_usage_feedback(),
            summary_model=writer,
            counter=parts.counter,
            config=config,
            resolve_summary_routes=partial(_get_summary_routes, config, upstream),
            get_price=partial(parts.pricing.get_price, origin=target),
            origin=target,
        )


async def _play_strategies(
    config: Config, recording: Recording, strategies: list[str], options: ReplayOptions
) -> list[Any]:
    async with open_components(config) as stage:
        return [(await replay_recording(stage, recording, name, options)).to_fields() for name in strategies]


def run_job(job: bytes) -> dict[str, Any]:
    """Replays the conversation of a job.

    Args:
        job: A line of JSON with `name`, `config`, `strategies` and `wanted` (the options), followed by the
            conversation.

    Returns:
        A dict with a list under the key `results`, one result for each strategy. If the job contains no valid
        conversation, a dict with a message under the key `error`.
    """
    line, _, body = job.partition(b"\n")
    job_fields = json.loads(line)
    try:
        recording = parse_recording(json.loads(body), job_fields["name"])
    except (RequestRefusedError, ValueError, RecursionError) as error:
        return {"error": str(error)}
    config = Config.model_validate_json(json.dumps(job_fields["config"]))
    strategies = list(dict.fromkeys(job_fields["strategies"]))
    return {
        "results": asyncio.run(
            _play_strategies(config, recording, strategies, ReplayOptions(**job_fields["wanted"]))
        )
    }


def main() -> None:
    """Reads a job from standard input, replays it at low priority and prints the results as JSON."""
    os.nice(NICENESS)
    logs.configure_logging("console", logging.CRITICAL)
    print(json.dumps(run_job(sys.stdin.buffer.read())))
