"""The report in one line: whether apex_te runs here, on what, and what is in its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...spec import JAX_HANDLERS
from . import machine

Facts = dict[str, Any]
_BUILT, _USABLE = ("prebuilt", "cached"), ("prebuilt", "cached", "can build")


class Verdict(NamedTuple):
    """Judgement on whether calls on each device that torch could use would work."""

    ready: bool
    text: str
    problems: list[str]


def verdict(facts: Facts) -> Verdict:
    """Returns the verdict on a report, as ``report.collect`` returns it."""
    gpus = facts["gpus"]["devices"]
    problems = [*setting_problems(facts), *_torch(facts)]
    rows = [row for row in facts["libraries"] if row["op"] != JAX_HANDLERS]
    on_gpu = [row for row in rows if row["device"] == "cuda" and gpus and _is_new_enough(row, gpus)]
    parts = [_part([row for row in rows if row["device"] == "cpu"], "the CPU", problems)]
    if gpus:
        kinds = [gpu["name"] for gpu in gpus]
        named = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        parts.append(_part(on_gpu, named, problems))
    problems += _libraries([row for row in rows if row["device"] == "-"])
    where = "" if gpus else " on the CPU, without a GPU"
    told = f"ready{where}; {'; '.join(parts)}" if not problems else f"not ready: {problems[0]}"
    return Verdict(not problems, told, problems)


def setting_problems(facts: Facts) -> list[str]:
    """Returns what is wrong with the variables and the cache folder, if it makes calls fail."""
    found = [item["problem"] for item in facts["settings"]]
    problems = [problem for problem in found if problem and problem != machine.UNREAD]
    for place in facts["caches"]:
        if place["from"] == "APEX_TE_CACHE_DIR" and place["problem"]:
            problems.append(f"APEX_TE_CACHE_DIR={place['path']}: {place['problem']}")
    if facts["archs"]["problem"]:
        problems.append(facts["archs"]["problem"])
    return list(dict.fromkeys(problems))


def _torch(facts: Facts) -> Iterator[str]:
    """Yields the reason why torch is missing or cannot use the machine's GPUs."""
    torch, gpus = facts["torch"], facts["gpus"]
    if torch["version"] is None:
        yield "PyTorch is not installed in this Python: pip install torch"
    elif gpus["devices"] and not torch["cuda"] and not torch["hip"]:
        yield (
            f"torch {torch['version']} is a CPU build, and a GPU is visible: install torch's build"
            " for CUDA"
        )
    elif torch["cuda"] and gpus["driver"] and gpus["problem"]:
        yield f"no GPU is usable: {gpus['problem']}"
    elif torch["cuda"] and gpus["cuda"] and _major(torch["cuda"]) > _major(gpus["cuda"]):
        yield (
            f"torch {torch['version']} is for CUDA {torch['cuda']}, and driver {gpus['driver']}"
            f" runs CUDA {gpus['cuda']} at most: update the driver, or install torch for an older"
            " CUDA"
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _is_new_enough(row: Facts, gpus: list[Facts]) -> bool:
    """Returns True if one of the GPUs has the least arch of the row's op."""
    least = row["min_arch"]
    return any(tuple(map(int, gpu["arch"].split("."))) >= tuple(least) for gpu in gpus)


def _part(rows: list[Facts], device: str, problems: list[str]) -> str:
    """Returns the state of one device's libraries as text, and adds what is wrong to problems."""
    problems += _libraries(rows)
    built = sum(row["state"] in _BUILT for row in rows)
    later = sum(row["state"] == "can build" for row in rows)
    told = []
    if built:
        told.append(f"{built} compiled")
    if later:
        told.append(f"{later} to compile on first use")
    return f"libraries for {device}: {', '.join(told) or 'none'}"


def _libraries(rows: list[Facts]) -> list[str]:
    """Returns the reasons why libraries are not usable, each once with how many it is about."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["state"] not in _USABLE:
            reason = row["reason"].removeprefix(f"{row['op']}: ")
            reasons.setdefault(reason, []).append(f"{row['op']} ({row['device']})")
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in reasons.items()
    ]
