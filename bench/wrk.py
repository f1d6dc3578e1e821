"""wrk as load generator, where it is installed: many times cheaper than one in Python.

It takes requests from `wrk.lua`, which puts them together from the pieces of conversations.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from conversations import Conversation
from load import PATIENCE_S, LoadError, Measured
from processes import Program

_SCRIPT = Path(__file__).with_suffix(".lua")
_MEASURED = re.compile(r"^measured (\{.*\})$", re.MULTILINE)
# Requests of one session that two runs may need before their numbers meet.
NUMBERS = 1_000_000
# More sessions than this share a thread; fewer get one each.
THREADS = 4


def installed() -> bool:
    """Whether there is a wrk on the path."""
    return shutil.which("wrk") is not None


def _sized(piece: bytes) -> bytes:
    return b"%d\n%s" % (len(piece), piece)


def written(folder: Path, conversations: Sequence[Conversation]) -> None:
    """Write the pieces of each conversation where `wrk.lua` reads them."""
    folder.mkdir()
    for number, held in enumerate(conversations):
        pieces = b"".join(map(_sized, (held.head, held.start, held.end)))
        turns = b"".join(map(_sized, held.turns))
        (folder / str(number)).write_bytes(pieces + b"%d\n" % len(held.turns) + turns)


def run(program: Program, folder: Path, connections: int, *, number: int, seconds: int) -> Measured:
    """Load a program for a while over so many connections; each run needs another `number`.

    There may be no answer at all, if it takes longer.

    Requests that are under way at the end are cut off, as a client cuts them that leaves.

    Raises:
        LoadError: An answer had another status than 200, or did not come.
    """
    threads = connections if connections <= THREADS else 1
    before_s = program.cpu_s()
    ended = subprocess.run(
        [
            *("wrk", f"-t{threads}", f"-c{connections}", f"-d{seconds}s", f"--timeout={PATIENCE_S:.0f}s"),
            *("-s", str(_SCRIPT), program.url, "--"),
            *(str(folder), str(connections // threads), str(number * NUMBERS)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 2 * PATIENCE_S,
    )
    found = _MEASURED.search(ended.stdout)
    if not found:
        raise LoadError(f"wrk failed: {(ended.stderr or ended.stdout)[-300:]}")
    said = json.loads(found[1])
    if said["failed"]:
        raise LoadError(f"{said['failed']} of {said['answers']} answers were errors or did not come")
    return Measured(
        answers=said["answers"],
        elapsed_s=said["elapsed_s"],
        p50_s=said["p50_s"],
        p99_s=said["p99_s"],
        cpu_s=program.cpu_s() - before_s,
    )
