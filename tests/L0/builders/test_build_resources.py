"""How many compilers may run at once: CPUs, control groups, memory and MAX_JOBS."""

import os

import pytest

from op_builder.jit.build import resources
from op_builder.jit.errors import SettingError


def fake_system(folder, monkeypatch, groups, mounts, files):
    """/proc and control groups of another machine with 8 CPUs and 64 GiB."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts.format(folder))
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    monkeypatch.setattr(resources, "_SELF", str(folder))
    monkeypatch.setattr(resources, "_MEMINFO", str(folder / "meminfo"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


MOUNT_2 = "30 23 0:26 / {}/sys rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
MOUNTS_1 = (
    "31 23 0:29 /docker/abc {0}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:30 /docker/abc {0}/memory rw - cgroup cgroup rw,memory\n"
)
GROUPS_1 = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cpus", "memory"),
    [
        ("0::/\n", "", {}, 8, 64 * GIB),
        ("0::/user/job\n", MOUNT_2, {"sys/user/job/cpu.max": "150000 100000"}, 2, 64 * GIB),
        ("0::/user/job\n", MOUNT_2, {"sys/user/cpu.max": "400000 100000"}, 4, 64 * GIB),
        ("0::/a\n", MOUNT_2, {"sys/a/cpu.max": "max 100000", "sys/a/memory.max": "max"}, 8, None),
        (
            "0::/a\n",
            MOUNT_2,
            {
                "sys/a/memory.max": 4 * GIB,
                "sys/a/memory.current": 3 * GIB,
                "sys/a/memory.stat": f"anon 5\ninactive_file {GIB}",
            },
            8,
            2 * GIB,
        ),
        (
            GROUPS_1,
            MOUNTS_1,
            {
                "cpu/cpu.cfs_quota_us": 300000,
                "cpu/cpu.cfs_period_us": 100000,
                "memory/memory.limit_in_bytes": 2 * GIB,
                "memory/memory.usage_in_bytes": GIB,
                "memory/memory.stat": "total_inactive_file 4096",
            },
            3,
            GIB + 4096,
        ),
        (
            GROUPS_1,
            MOUNTS_1,
            {"cpu/cpu.cfs_quota_us": -1, "memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000},
            8,
            None,
        ),
    ],
)
def test_limits_of_control_groups(groups, mounts, files, cpus, memory, tmp_path, monkeypatch):
    fake_system(tmp_path, monkeypatch, groups, mounts, files)
    assert resources.cpus() == cpus
    assert resources.free_memory() == (memory or 64 * GIB)


@pytest.mark.parametrize(
    ("free", "max_jobs", "expected"),
    [
        (64 * GIB, "", 8),
        (64 * GIB, "3", 3),
        (64 * GIB, "99", 8),
        (3 * resources.BYTES_PER_JOB + 1, "", 3),
        (3 * resources.BYTES_PER_JOB + 1, "2", 2),
        (1, "4", 1),
        (None, "", 8),
    ],
)
def test_jobs_are_the_least_of_all_limits(free, max_jobs, expected, monkeypatch):
    monkeypatch.setattr(resources, "cpus", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: free)
    monkeypatch.setenv("MAX_JOBS", max_jobs)
    assert resources.jobs() == expected


def test_jobs_here():
    assert 1 <= resources.jobs() <= len(os.sched_getaffinity(0))
    assert resources.free_memory() or 0 > 1 << 20


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_max_jobs(text, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", text)
    with pytest.raises(SettingError, match=f"MAX_JOBS must be an integer >= 1, got '{text}'"):
        resources.jobs()
