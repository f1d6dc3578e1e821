"""How long a rehearsal takes: CPU seconds of each strategy on a file of conversations, the largest of them.

    uv run python bench/rehearsal.py FILE.jsonl [--strategy NAME …] [--window TOKENS]

Goal: 10 s for a strategy on a conversation of 265,000 tokens. No summary model and no provider are asked.
"""

import argparse
import asyncio
import logging
import time
from pathlib import Path

from compaction_proxy.cli.replay_worker import open_components
from compaction_proxy.config.config import Config
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.replay.recordings import Recording, read_recordings
from compaction_proxy.replay.runner import ReplayOptions, replay_recording
from compaction_proxy.telemetry import logs

TITLES = ("CPU s", "requests", "rounds", "sent tokens", "forwarded", "failed")
HEAD = f"{'strategy':<12}" + "".join(f"{title:>13}" for title in TITLES)


def _size(recording: Recording) -> int:
    return sum(map(len, recording.messages))


async def measured(file: Path, names: list[str], wanted: ReplayOptions) -> None:
    """Print a line for each strategy."""
    largest = max(read_recordings(file), key=_size)
    print(f"{largest.name}: {len(largest.messages)} messages, {_size(largest):,} bytes\n{HEAD}")
    for name in names:
        async with open_components(Config()) as stage:
            before = time.process_time()
            told = await replay_recording(stage, largest, name, wanted)
            spent_s = time.process_time() - before
        figures = (told.requests, told.rounds, told.sent_tokens, told.forwarded_tokens, told.failed)
        print(f"{name:<12}{spent_s:>13.2f}" + "".join(f"{figure:>13,}" for figure in figures), flush=True)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--strategy", action="append", choices=list(STRATEGIES))
    parser.add_argument("--window", type=int)
    parser.add_argument("--trigger-tokens", type=int)
    asked = parser.parse_args()
    logs.configure_logging("console", logging.CRITICAL)
    wanted = ReplayOptions(window=asked.window, trigger_tokens=asked.trigger_tokens)
    asyncio.run(measured(asked.file, asked.strategy or list(STRATEGIES), wanted))


if __name__ == "__main__":
    main()
