"""Number of compilers to run at once, from CPUs, control groups, memory and ``MAX_JOBS``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from .. import env
from ..platform import text_of

# The largest translation unit takes 0.43 GB (block_quantize for the CPU, g++ 12; nvcc 0.21 GB).
BYTES_PER_JOB = 640 << 20
_MEMINFO = "/proc/meminfo"
_SELF = "/proc/self"
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def _number(text: str) -> int | None:
    """Returns a limit as a number; None for "max", an empty text or a number for "no limit"."""
    text = text.strip()
    value = int(text) if text.lstrip("-").isdigit() else -1
    return value if 0 <= value < _UNLIMITED else None


def _mounts() -> Iterator[tuple[str, str, set[str]]]:
    """Yields the control group mounts of this process, from mountinfo of proc(5)."""
    for line in text_of(f"{_SELF}/mountinfo").splitlines():
        own, _, rest = line.partition(" - ")
        fields, kind = own.split(), rest.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            controllers = {"2"} if kind[0] == "cgroup2" else set(kind[2].split(","))
            yield fields[3], fields[4].replace("\\040", " "), controllers


def _groups(controller: str) -> Iterator[str]:
    """Yields the folders of this process's control group and its parents, innermost first."""
    for line in text_of(f"{_SELF}/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller not in (names.split(",") if names else ["2"]):
            continue
        for root, mount, controllers in _mounts():
            if controller not in controllers:
                continue
            # in a container the path may be the host's, and the mount show only a part of it
            inside = path[len(root) :] if path.startswith(root) else ""
            parts = [part for part in inside.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                yield os.path.join(mount, *parts[:depth])


def _cpu_limits() -> Iterator[float]:
    for folder in _groups("2"):
        quota, _, period = text_of(f"{folder}/cpu.max").partition(" ")
        if (limit := _number(quota)) is not None:
            yield limit / (_number(period) or 100_000)
    for folder in _groups("cpu"):
        limit = _number(text_of(f"{folder}/cpu.cfs_quota_us"))
        if limit:
            yield limit / (_number(text_of(f"{folder}/cpu.cfs_period_us")) or 100_000)


def cpus() -> int:
    """Returns the CPUs that affinity and control groups' quotas, rounded up, allow, at least 1."""
    count = float(len(os.sched_getaffinity(0)))
    return max(1, math.ceil(min([count, *_cpu_limits()])))


# Controller of cgroup v2 and v1, files of limit and use in its folders, and name of the page cache.
_MEMORY = (
    ("2", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _memory_limits() -> Iterator[int]:
    """Yields the bytes that each control group still allows; its page cache counts as free."""
    for controller, most, current, cached in _MEMORY:
        for folder in _groups(controller):
            limit = _number(text_of(f"{folder}/{most}"))
            if limit is not None:
                used = _number(text_of(f"{folder}/{current}")) or 0
                free = re.search(rf"^{cached} (.*)", text_of(f"{folder}/memory.stat"), re.MULTILINE)
                yield limit - used + ((_number(free[1]) or 0) if free else 0)


def free_memory() -> int | None:
    """Returns the bytes of memory that are free for a build, None if the system does not tell."""
    available = re.search(r"^MemAvailable: *(\d+)", text_of(_MEMINFO), re.MULTILINE)
    known = [*_memory_limits(), *([int(available[1]) << 10] if available else [])]
    return max(0, min(known)) if known else None


def jobs() -> int:
    """Returns the number of compilers that CPUs, free memory and ``MAX_JOBS`` allow, at least 1."""
    count, memory = cpus(), free_memory()
    if memory is not None:
        count = min(count, memory // BYTES_PER_JOB)
    return max(1, min(count, env.number("MAX_JOBS", count or 1)))
