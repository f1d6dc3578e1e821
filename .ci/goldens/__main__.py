"""Records what the product does, as a black box, and says whether two versions do the same.

    python .ci/goldens check                             this version against the digests that are kept
    python .ci/goldens check --command /other/venv/bin/compaction-proxy
    python .ci/goldens compare --command A --against B   both versions in one go, with what differs
    python .ci/goldens replicas --command OLD --against NEW
                                                         both at the same time on one Redis server, and a rollback
    python .ci/goldens record                            keep the digests of this version
    python .ci/goldens write-stores NAME                 keep stores that this version has written
    python .ci/goldens read-stores NAME                  start this version on them: nothing is summarised again
    python .ci/goldens diff FOLDER FOLDER                two recordings that `--keep FOLDER` has kept

`--quick` runs a part (`record --quick` keeps its digests), `--only GROUP` one group and may be given again. Groups are
stores, relay, failures, errors, compact, recall, overflow, settings, sessions, admin, background, spans, help, config,
serve, cli, real, and each strategy for the conversations; those of `replicas` are alternating, rollback and stores.
The last line is "equal" and the exit code 0, or the differences are listed and the code is 1. Nothing here imports
the product. Only the command, HTTP, files and processes are looked at, so the script runs unchanged on versions whose
modules have other names.

The provider is a double whose answers, summaries too, follow from the request alone. Conversations are drawn by a
printed seed. Requests go one after another to one process. Times, durations, dates, ports, folders and random ids
are taken out; equal ids stay equal within a case.

Left out, because it depends on the machine or on chance:
- the chunks in which a stream arrives, and everything about clients that leave, slow clients and slow bodies;
- values of times, of durations and of memory, in metrics with their buckets (the families are compared), hours and
  days of statistics, free space and limits of the machine;
- whether a circuit breaker is open, which holds for 30 s;
- requests for models and windows that the proxy sends for itself, behind an answer;
- digits of a fraction after the ninth: a sum depends on the order of its parts;
- estimates of tokens that rest on an old store: what was learned from answers is forgotten after a day;
- what is sealed with a random nonce: compaction items (that they are opened again is recorded), sealed records;
- several workers, leases, TLS, Unix sockets, Redis sentinels and clusters; several replicas at once are for
  `replicas`;
- `watch`, the live feed and reloads, `--probe` of `doctor`;
- names of loggers and all of a traceback but its last line: they name modules.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIGESTS = HERE / "digests.json"
STORES = HERE / "stores"
REAL = ROOT.parent / "shared" / "data"
# Groups of cases. The lanes take about the same time.
LANES = (
    ("stores", "relay", "errors", "compact", "overflow", "full", "split", "iterations", "chained"),
    (
        *("help", "config", "serve", "failures", "recall", "settings", "sessions", "admin", "background"),
        *("spans", "cli", "anchored", "selective", "prune", "real"),
    ),
)
SLOW = {"overflow", "settings", "sessions", "serve", "failures", "cli"}


def record_lane(folder: Path, only: list[str], *, is_quick: bool, real: Path) -> None:
    """Run groups of cases, one after another, against the command that COMPACTION_PROXY names.

    Args:
        folder: Where everything that is recorded goes.
        only: The groups.
        is_quick: Whether each is cut short.
        real: Folder of real conversations.
    """
    import cases
    import commands
    import doubles
    import golden_conversations
    import stores
    from recording import Recording

    recording = Recording()
    provider = doubles.Provider(doubles.answer)
    run = cases.Run(recording, provider, is_quick)

    def read_kept_stores() -> None:
        for version in sorted(STORES.iterdir()) if STORES.exists() else []:
            for kind, parts in stores.read_stores(provider, version):
                recording.add(f"stores/{version.name}/{kind}", parts)

    groups: dict[str, Callable[[], None]] = {
        "relay": lambda: cases.record_relay(run),
        "failures": lambda: cases.record_failures(run),
        "errors": lambda: cases.record_errors(run),
        "compact": lambda: cases.record_compact(run),
        "recall": lambda: cases.record_recall(run),
        "overflow": lambda: cases.record_overflow(run),
        "settings": lambda: cases.record_settings(run),
        "sessions": lambda: cases.record_sessions(run),
        "admin": lambda: cases.record_admin(run),
        "background": lambda: cases.record_background(run),
        "spans": lambda: commands.record_spans(run),
        "stores": read_kept_stores,
        "help": lambda: commands.record_help(run),
        "config": lambda: commands.record_configs(run),
        "cli": lambda: commands.record_cli(run),
        "serve": lambda: commands.record_signals(run),
        **{name: partial(cases.record_conversations, run, name) for name in cases.STRATEGIES},
        "real": lambda: commands.record_shared(run, real),
    }
    print(f"seed {golden_conversations.SEED}, {os.environ['COMPACTION_PROXY']}", file=sys.stderr)
    try:
        for name in only:
            started, before = time.monotonic(), len(recording.cases)
            groups[name]()
            count = len(recording.cases) - before
            print(f"  {name}: {count} cases, {time.monotonic() - started:.0f} s", file=sys.stderr)
    finally:
        provider.close()
    recording.write(folder)


def record(command: str, folder: Path, only: list[str], *, is_quick: bool, real: Path) -> None:
    """Run groups of cases against a command: two lanes at a time, each in a process of its own.

    Args:
        command: The command.
        folder: Where everything that is recorded goes; what stands there goes.
        only: Names of groups; empty: all.
        is_quick: Whether each is cut short.
        real: Folder of real conversations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json.gz"):
        old.unlink()
    lanes = []
    for number, groups in enumerate(LANES):
        chosen = [name for name in groups if (name in only if only else not (is_quick and name in SLOW))]
        words = [word for name in chosen for word in ("--only", name)]
        words += ["--keep", str(folder), "--real", str(real), *(["--quick"] if is_quick else [])]
        if chosen:
            lanes.append(start_self(command, "lane", *words, lane=number))
    for lane in lanes:
        lane.wait()
    if any(lane.returncode for lane in lanes):
        sys.exit(3)


def report(lines: list[str], notes: list[str]) -> int:
    """Print what differs, or "equal"; returns the exit code."""
    for note in notes:
        print(f"left out: {note}")
    print("\n".join(lines) if lines else "equal")
    return 1 if lines else 0


def start_self(command: str, *arguments: str, lane: int = 0) -> subprocess.Popen[bytes]:
    """Start this script against a command, in a process of its own."""
    first = int(os.environ.get("GOLDENS_LANE", "0"))  # compare: another number keeps two runs apart
    environ = {**os.environ, "COMPACTION_PROXY": command, "GOLDENS_LANE": str(first + lane)}
    return subprocess.Popen([sys.executable, str(HERE), *arguments], env=environ)


def run_self(command: str, *arguments: str) -> None:
    """Run this script to its end; exit code 1 means that it has found something."""
    if start_self(command, *arguments).wait() not in {0, 1}:
        sys.exit(3)


def compare(given: argparse.Namespace, folder: Path) -> int:
    """Record two versions and compare them; each also reads the stores that the other has written."""
    from recording import Recording, compare_recordings
    from stores import find_waste

    for name, command in (("a", given.command), ("b", given.against)):
        record(command, folder / name, given.only, is_quick=given.quick, real=given.real)
    lines = compare_recordings(Recording.read(folder / "a"), Recording.read(folder / "b"))
    if not given.only or "stores" in given.only:
        for writer, command in (("a", given.command), ("b", given.against)):
            written = folder / f"stores-of-{writer}"
            run_self(command, "write-stores", str(written))
            for reader, other in (("a", given.command), ("b", given.against)):
                run_self(
                    other, "read-stores", str(written), "--keep", str(folder / f"{reader}-reads-{writer}")
                )
            one, two = (Recording.read(folder / f"{reader}-reads-{writer}") for reader in "ab")
            lines += [f"stores of {writer}: {each}" for each in compare_recordings(one, two)]
            for reader, each in (("a", one), ("b", two)):
                lines += [f"stores of {writer}, read by {reader}: {line}" for line in find_waste(each.cases)]
    print(f"recordings: {folder}", file=sys.stderr)
    return report(lines, [])


def parse() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(
        prog="goldens", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = ("check", "record", "compare", "replicas", "diff", "write-stores", "read-stores", "lane")
    parser.add_argument("action", choices=actions)
    parser.add_argument(
        "names", nargs="*", help="folders of diff and read-stores, name or folder of write-stores"
    )
    parser.add_argument(
        "--command", default=os.environ.get("COMPACTION_PROXY"), help="the command to observe"
    )
    parser.add_argument("--against", help="compare, replicas: the other command, the newer one")
    parser.add_argument("--keep", type=Path, help="folder for everything that was recorded, outside of git")
    parser.add_argument("--quick", action="store_true", help="a part, in less than 90 s")
    parser.add_argument("--only", action="append", default=[], help="a group of cases; may be given again")
    parser.add_argument("--real", type=Path, default=REAL, help="folder of real conversations")
    return parser.parse_args()


def use_stores(given: argparse.Namespace) -> int:
    """Write stores, or read those of a folder; returns the exit code."""
    import doubles
    import stores
    from recording import Recording

    provider = doubles.Provider(doubles.answer)
    folder = STORES / given.names[0]  # a whole path stays one
    if given.action == "write-stores":
        stores.write_stores(provider, folder)
        return 0
    found = Recording()
    for kind, parts in stores.read_stores(provider, folder):
        found.add(f"stores/{kind}", parts)
        print(f"{kind}: {len(parts['statuses'])} requests, {parts['summaries']} summaries", file=sys.stderr)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
        found.write(given.keep)
    if not found.cases:
        print(f"there are no stores in {folder}")
        return 1
    lines = stores.find_waste(found.cases)
    print("\n".join(lines) or "all reused")
    return 1 if lines else 0


def use_replicas(given: argparse.Namespace) -> int:
    """Run two versions as replicas on one store; returns the exit code."""
    from recording import Recording
    from replicas import compare_replicas

    if not given.against:
        print("replicas: --against names the newer command")
        return 2
    print(f"old: {given.command}\nnew: {given.against}", flush=True)
    kept = sorted(STORES.iterdir())
    commands = {"old": given.command, "new": given.against}
    made = compare_replicas(commands, kept, given.only, is_quick=given.quick)
    if given.keep:
        found = Recording()
        for name, case in made.cases().items():
            found.add(name, case)
        given.keep.mkdir(parents=True, exist_ok=True)
        found.write(given.keep)
    print("\n".join(made.faults) or "all reused")
    return 1 if made.faults else 0


def use_digests(given: argparse.Namespace) -> int:
    """Record a version, and keep its digests or compare them with those kept; returns the exit code."""
    from recording import Recording, compare_digests
    from stores import find_waste

    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        folder = given.keep or Path(made)
        record(given.command, folder, given.only, is_quick=given.quick, real=given.real)
        found = Recording.read(folder)
    digests, waste = found.digests(), find_waste(found.cases)
    if given.quick:
        digests = {f"quick {name}": parts for name, parts in digests.items()}
    known = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}
    ours = {name: parts for name, parts in known.items() if name.startswith("quick ") == given.quick}
    if given.action == "check" and not ours:
        print("no such digests are kept: record them, with the same options, on the version to compare with")
        return 2
    if given.action == "record" and not waste:
        stale = {} if given.only else ours
        kept = {name: parts for name, parts in known.items() if name not in stale} | digests
        lines = [f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in sorted(kept.items())]
        DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"{len(digests)} cases recorded")
        return 0
    notes = []
    if not (given.real / "conversations").exists():
        notes.append(f"real conversations: there is no {given.real / 'conversations'}")
        ours = {
            name: parts for name, parts in ours.items() if not name.removeprefix("quick ").startswith("real/")
        }
    return report(waste + compare_digests(ours, digests, whole=not given.only), notes)


def use_recordings(given: argparse.Namespace) -> int:
    """Compare two versions, or two recordings that are kept; returns the exit code."""
    from recording import Recording, compare_recordings

    if given.action == "diff":
        one, two = (Recording.read(Path(name)) for name in given.names)
        return report(compare_recordings(one, two), [])
    if not given.against:
        print("compare: --against names the other command")
        return 2
    if given.keep:
        return compare(given, given.keep)
    folder = Path(tempfile.mkdtemp(prefix="goldens-"))
    code = compare(given, folder)
    if not code:
        shutil.rmtree(folder)
    return code


def find_command(command: str) -> str:
    """Returns a command as a whole path, because it is started in other folders; looks for a bare name in PATH."""
    return str(Path(command).absolute()) if "/" in command else shutil.which(command) or command


def main() -> int:
    """Do what the command line says; returns the exit code."""
    given = parse()
    given.command = find_command(given.command or str(Path(sys.executable).parent / "compaction-proxy"))
    given.against = given.against and find_command(given.against)
    os.environ["COMPACTION_PROXY"] = given.command  # the harness of the system tests reads it
    sys.path[:0] = [str(ROOT)]
    if given.action == "lane":
        record_lane(given.keep, given.only, is_quick=given.quick, real=given.real)
        return 0
    if given.action == "replicas":
        return use_replicas(given)
    if given.action in {"compare", "diff"}:
        return use_recordings(given)
    return use_stores(given) if given.action.endswith("stores") else use_digests(given)


if __name__ == "__main__":
    sys.exit(main())
