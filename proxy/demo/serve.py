"""The demo provider on a socket of its own: `python -m proxy.demo.serve --host 0.0.0.0 --port 4140`.

For containers and for trying things out; it says at its start that no model is behind it.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from proxy import logs
from proxy.adapters.tiktoken_counter import TiktokenCounter
from proxy.demo.provider import Settings, create_provider
from proxy.errors import ConfigError
from proxy.serving import served

PORT = 4140
WINDOW_TOKENS = 8192
RULE = "*" * 72


def banner(url: str, models: Sequence[str]) -> str:
    """What is printed at the start: where it listens, and what it is not."""
    lines = (
        RULE,
        "* DEMO PROVIDER: its answers are scripted, there is no model behind it.",
        "* Whatever key a client sends is accepted. Not for production.",
        RULE,
        f"demo provider listens on {url}/v1, models {', '.join(models)}",
    )
    return "\n".join(lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proxy.demo.serve", description="The demo provider.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on; 0 takes a free one")
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, help="prompt plus output, in tokens")
    return parser.parse_args(arguments)


async def serve(host: str, port: int, window: int) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: TCP port; 0 takes a free one.
        window: Largest prompt plus output, in tokens.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    settings = Settings(TiktokenCounter(lambda line: print(line, file=sys.stderr)), window=window)
    async with served(create_provider(settings), host, port) as url:
        print(banner(url, settings.models), flush=True)
        await told.wait()


def main(arguments: Sequence[str]) -> int:
    """Run as a command; 0, or 1 if the address cannot be listened on."""
    options = _options(arguments)
    logs.configure("console", logging.WARNING)
    try:
        asyncio.run(serve(options.host, options.port, options.window))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
