"""Serves the demo provider on a socket: `compaction-proxy demo-provider --host 0.0.0.0 --port 4140`.

It is meant for containers and for experiments. At its start it prints that its answers are scripted.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from compaction_proxy.cli.demo.provider import DemoProviderSettings, create_provider
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.telemetry import logs

RULE = "*" * 72


def format_banner(url: str, models: Sequence[str]) -> str:
    """Formats the text printed at the start: the address, and a warning that this is no real model."""
    lines = (
        RULE,
        "* DEMO PROVIDER: its answers are scripted, there is no model behind it.",
        "* Whatever key a client sends is accepted. Not for production.",
        RULE,
        f"demo provider listens on {url}/v1, models {', '.join(models)}",
    )
    return "\n".join(lines)


async def serve_provider(host: str, port: int, window: int) -> None:
    """Serves the demo provider until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: TCP port. 0 takes a free one.
        window: Largest sum of prompt and requested output, in tokens.

    Raises:
        ConfigError: The provider cannot listen on the address.
    """
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    settings = DemoProviderSettings(TiktokenCounter(lambda line: print(line, file=sys.stderr)), window=window)
    async with serve_embedded(create_provider(settings), host, port) as url:
        print(format_banner(url, settings.models), flush=True)
        await stopping.wait()


def run_provider(host: str, port: int, window: int) -> None:
    """Serves the demo provider until SIGINT or SIGTERM. Arguments and errors are as in `serve_provider`."""
    logs.configure_logging("console", logging.WARNING)
    asyncio.run(serve_provider(host, port, window))
