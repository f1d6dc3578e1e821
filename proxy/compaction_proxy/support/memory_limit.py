"""Reads from the operating system how much memory this process may use, and returns what it does not use."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

PROC: Final = Path("/proc/self")
CGROUPS: Final = Path("/sys/fs/cgroup")
# None on Windows, where Python has no module `resource`.
resource: Any = import_module("resource") if find_spec("resource") else None


class MemoryLimits(NamedTuple):
    """Memory limits in bytes. None means that the operating system sets no limit or does not report it.

    Attributes:
        memory_bytes: The memory that this process may use. Other processes may use a part of it.
        address_bytes: The address space that this process may use in addition to its present address space.
    """

    memory_bytes: int | None
    address_bytes: int | None


def read_memory_limits(proc_folder: Path = PROC, cgroup_folder: Path = CGROUPS) -> MemoryLimits:
    """Reads the limits of the memory and of the address space of this process.

    The limit of the memory is the smallest of these sizes: the machine's memory, and the limits of all
    control groups (versions 1 and 2) that apply to this process.

    Args:
        proc_folder: The folder in which the system describes this process (`/proc/self`).
        cgroup_folder: The folder in which the system describes control groups.
    """
    limits = [
        limit
        for limit in (*_read_cgroup_limits(proc_folder, cgroup_folder), _read_physical_bytes())
        if limit is not None
    ]
    return MemoryLimits(min(limits, default=None), _read_free_address_bytes(proc_folder))


def return_free_memory() -> None:
    """Returns memory to the system that the process has freed but that its allocator keeps.

    The allocator keeps freed memory that lies between memory in use. On systems without glibc, the function
    has no effect.
    """
    if sys.platform != "linux":
        return
    with suppress(ImportError, OSError, MemoryError, AttributeError):  # AttributeError: another C library
        import_module("ctypes").CDLL(None).malloc_trim(0)


def _read_cgroup_limits(proc_folder: Path, cgroup_folder: Path) -> Iterator[int | None]:
    """Yields the memory limits, in bytes, of the control groups of this process and of all groups above them.

    Yields None for a group without a readable limit. In a container, the path in `/proc/self/cgroup` may not
    exist. The limit of the container is then in the root folder of the control groups, which this function
    also reads.
    """
    for line in _read_text(proc_folder / "cgroup").splitlines():
        _, controllers, path = f"{line}::".split(":")[:3]
        if controllers == "":
            folder, name = cgroup_folder, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = cgroup_folder / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for ancestor in (group, *group.parents):
            yield _parse_number(_read_text(folder / ancestor / name))


def _read_physical_bytes() -> int | None:
    """Returns the memory of the machine in bytes, or None if the system does not report it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return max(os.sysconf("SC_PHYS_PAGES"), 0) * os.sysconf("SC_PAGE_SIZE") or None


def _read_free_address_bytes(proc: Path) -> int | None:
    """Returns how many more bytes of address space RLIMIT_AS allows, at least 0; None if it is unlimited."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    pages = _parse_number(_read_text(proc / "statm").partition(" ")[0]) or 0
    free_bytes: int = soft - pages * resource.getpagesize()
    return max(free_bytes, 0)


def _parse_number(text: str) -> int | None:
    """Parses a whole number. Returns None for any other text, such as `max`, which means no limit."""
    return int(text) if text.strip().isdigit() else None


def _read_text(path: Path) -> str:
    """Reads a file. Returns an empty text if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
