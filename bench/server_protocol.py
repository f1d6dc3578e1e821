"""CPU of a small gated request with the proxy's own server connection, and with uvicorn's httptools protocol.

    uv run python bench/server_protocol.py [--rounds N] [--seconds N]

Both proxies run the same code but for the class that reads requests and writes answers. wrk loads them in
turns with 32 connections. Prints the smallest and the median CPU time a request, in microseconds.

uvicorn's class reports a client that leaves only to somebody who reads from it, so a task reads from it while
a request is relayed. Without this task, an upstream would go on answering clients that have left. With
uvicorn's class, the proxy closes no slow connections and waits for no answers at its end.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import wrk
from conversations import small
from loads import PATIENCE_S
from processes import Program, allow_sockets, cores, started

BENCH = Path(__file__).parent
CONNECTIONS = 32
START = """
import asyncio
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from compaction_proxy.cli.main import app
from compaction_proxy.gateway.client_stream import DEPARTURE, NOTICE
from compaction_proxy.gateway.server import run, shutdown

async def watch(receive, callback):
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()

class Protocol(HttpToolsProtocol):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        relay = self.app
        async def call(scope, receive, send):
            watcher = None
            def notice(callback):
                nonlocal watcher
                if watcher is not None:
                    watcher.cancel()
                watcher = asyncio.create_task(watch(receive, callback)) if callback else None
            scope["extensions"] = {DEPARTURE: {NOTICE: notice}}
            await relay(scope, receive, send)
        if WATCHES:
            self.app = call

run.ServerConnection = shutdown.ServerConnection = Protocol
run.close_overdue_connections = shutdown.close_overdue_connections = lambda *_: None
shutdown.GracefulServer._list_connections = lambda _: []
app(["serve"])
"""
COMMANDS = {
    "own": [sys.executable, "-m", "compaction_proxy", "serve"],
    "uvicorn": [sys.executable, "-c", f"WATCHES = True\n{START}"],
    "uvicorn, departures not noticed": [sys.executable, "-c", f"WATCHES = False\n{START}"],
}


def measure(programs: dict[str, Program], folder: Path, rounds: int, seconds: int) -> dict[str, list[float]]:
    """Returns the CPU time a request of each program in each round, in microseconds."""
    wrk.written(folder, [small(f"session {index}", ()) for index in range(CONNECTIONS)])
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, program in programs.items():
            program.resume()
            found = wrk.run(program, folder, CONNECTIONS, number=number, seconds=seconds)
            program.settle(PATIENCE_S)
            program.pause()
            if number:  # the first round warms up
                times[name].append(found.cpu_s / found.answers * 1e6)
    return times


def main() -> None:
    """Measures both and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    if not wrk.installed():
        sys.exit("wrk is not installed")
    allow_sockets()
    tested, rest = cores() or (None, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started([sys.executable, str(BENCH / "upstream.py")], folder / "upstream", rest, {}) as upstream:
            settings = {
                "COMPACTION_PROXY__UPSTREAM__BASE_URL": upstream.url + "/v1",
                "COMPACTION_PROXY__SERVER__PORT": "0",
                "COMPACTION_PROXY__STORE__URL": "memory://",
                "COMPACTION_PROXY__MODELS": '{"bench-*": {"window": 128000}}',
            }
            with ExitStack() as stack:
                programs: dict[str, Program] = {}
                for label, command in COMMANDS.items():
                    program = stack.enter_context(started(command, folder / label, tested, settings))
                    stack.callback(program.resume)
                    program.pause()
                    programs[label] = program
                times = measure(programs, folder / "requests", options.rounds, options.seconds)
    print("| connection | smallest µs | median µs |\n| --- | ---: | ---: |")
    for label, found in times.items():
        print(f"| {label} | {min(found):.0f} | {median(found):.0f} |")


if __name__ == "__main__":
    main()
