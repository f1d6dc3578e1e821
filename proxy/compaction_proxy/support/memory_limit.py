"""How much memory the system lets this process have: the smallest of the limits that it can see."""

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

PROC: Final = Path("/proc/self")
CGROUPS: Final = Path("/sys/fs/cgroup")
# Not on Windows.
resource: Any = import_module("resource") if find_spec("resource") else None


class MemoryLimits(NamedTuple):
    """What the system allows, in bytes; None where it sets no limit or does not say.

    Attributes:
        memory_bytes: Memory for this process and all others that share the limit.
        address_bytes: Address space that this process may still take.
    """

    memory_bytes: int | None
    address_bytes: int | None


def read_memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryLimits:
    """Returns the limits of control groups (Linux, both versions), of the machine and of the process.

    Args:
        proc: Folder of the process (`/proc/self`).
        cgroups: Where control groups are mounted.
    """
    known = [
        each for each in (*_read_cgroup_limits(proc, cgroups), _read_physical_bytes()) if each is not None
    ]
    return MemoryLimits(min(known, default=None), _read_free_address_bytes(proc))


def _read_cgroup_limits(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """The limit of each group that the process is in, and of all groups above it.

    Inside a container the named path may not exist; the container's own limit then stands at the top.
    """
    for line in _read_text(proc / "cgroup").splitlines():
        _, controllers, path = f"{line}::".split(":")[:3]
        if controllers == "":
            folder, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield _parse_number(_read_text(folder / each / name))


def _read_physical_bytes() -> int | None:
    """The memory of the machine."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return max(os.sysconf("SC_PHYS_PAGES"), 0) * os.sysconf("SC_PAGE_SIZE") or None


def _read_free_address_bytes(proc: Path) -> int | None:
    """What RLIMIT_AS leaves of the address space."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    pages = _parse_number(_read_text(proc / "statm").partition(" ")[0]) or 0
    left: int = soft - pages * resource.getpagesize()
    return max(left, 0)


def _parse_number(text: str) -> int | None:
    """A whole number; None for `max` and for nothing."""
    return int(text) if text.strip().isdigit() else None


def _read_text(path: Path) -> str:
    """A file's content; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
