"""The memory limits that a process sees."""

from pathlib import Path

import pytest

from compaction_proxy.support.memory_limit import read_memory_limits

MIB = 1024 * 1024


def folders(root: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A folder like /proc/self and one like /sys/fs/cgroup."""
    proc, cgroups = root / "proc", root / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    for name, content in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return proc, cgroups


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": f"{64 * MIB}\n"}),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{64 * MIB}\n"}),
        ("0::/host/path\n", {"memory.max": f"{64 * MIB}\n"}),
        ("3:cpu:/x\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{64 * MIB}\n"}),
        ("4:hugetlb,memory:/a\n0::/\n", {"memory/memory.limit_in_bytes": f"{64 * MIB}\n"}),
    ],
    ids=["container", "group above", "path of the host", "version 1", "both versions"],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    assert read_memory_limits(*folders(tmp_path, groups, files)).memory_bytes == 64 * MIB


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", "", "nonsense"])
def test_without_a_limit_the_machine_s_memory_counts(tmp_path: Path, limit: str) -> None:
    found = read_memory_limits(*folders(tmp_path, "0::/\n4:memory:/\n", {"memory.max": limit}))
    assert found.memory_bytes == read_memory_limits(tmp_path, tmp_path).memory_bytes
    assert found.memory_bytes is not None
    assert found.memory_bytes > 64 * MIB
