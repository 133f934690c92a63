"""The memory that a job may use, read from /proc and from control groups of both versions."""

import mmap
import os
from pathlib import Path

import pytest

from grpo_mega.processes import HostRoom, host_room, num_killed_for_memory, resident_bytes

GIB = 2**30
MEMINFO = (
    "MemTotal:       25165824 kB\nMemFree: 1024 kB\nMemAvailable:   16777216 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
)


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v1(group: str, most: int, used: int, droppable: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{most}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 5\ntotal_inactive_file {droppable}\n",
    }


def v2(group: str, most: str, used: int, droppable: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {droppable}\n",
    }


FREE = HostRoom(24 * GIB, 16 * GIB)
NO_LIMIT = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, FREE, id="no cgroups"),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/job/a\n0::/\n"} | v1("/job/a", NO_LIMIT, 1) | v1("", NO_LIMIT, 1),
            FREE,
            id="v1 without a limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "9:name=systemd:/\n4:hugetlb,memory:/job/a\n0::/\n"}
            | v1("/job/a", 8 * GIB, 5 * GIB, 2 * GIB)
            | v1("/job", 20 * GIB, 19 * GIB),
            HostRoom(8 * GIB, 1 * GIB, "the cgroup /job/a"),
            id="v1: the parent has less left",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/slice/job\n"} | v2("/slice/job", "max", 1) | v2("/slice", str(4 * GIB), GIB, GIB),
            HostRoom(4 * GIB, 4 * GIB, "the cgroup /slice"),
            id="v2: a limit of the parent",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/of/the/host\n"} | v2("", str(2 * GIB), GIB),
            HostRoom(2 * GIB, 1 * GIB, "the cgroup /"),
            id="v2 in a container, without its path",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/of/the/host\n"} | v1("", 2 * GIB, 3 * GIB),
            HostRoom(2 * GIB, 0, "the cgroup /"),
            id="v1 in a container, over its limit",
        ),
    ],
)
def test_the_smallest_limit_of_machine_and_groups_counts(
    files: dict[str, str], expected: HostRoom, tmp_path: Path
) -> None:
    assert host_room(write_files(tmp_path, files)) == expected


def test_the_kernels_kills_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    assert num_killed_for_memory(tmp_path) == 0, "an older kernel does not count"
    assert num_killed_for_memory(write_files(tmp_path, {"proc/vmstat": "nr_free_pages 31\noom_kill 13\n"})) == 13


def test_a_system_without_proc_refuses_nothing(tmp_path: Path) -> None:
    assert host_room(tmp_path).available >= 2**60


def test_a_process_holds_what_it_has_written() -> None:
    size = 100_000_000
    with mmap.mmap(-1, size) as held:  # malloc may take memory that the process holds already
        before = resident_bytes(os.getpid())
        for offset in range(0, size, mmap.PAGESIZE):
            held[offset] = 1
        after = resident_bytes(os.getpid())
    assert before is not None and after is not None
    assert 0.9 * size < after - before < 1.3 * size
    assert resident_bytes(2**30) is None
