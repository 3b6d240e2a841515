"""Commands ``report`` and ``doctor`` of ``python -m apex_te``: the facts as text, and a verdict."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ...spec import JAX_HANDLERS
from ..text import WIDTH, Column, field, print_field, short, size, table
from . import facts as gathered
from . import machine
from .facts import Facts

_ORDER = ("prebuilt", "cached", "can build", "failed", "cannot")
_BUILT, _USABLE = _ORDER[:2], _ORDER[:3]


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``doctor`` to its parser."""
    parser.add_argument("--json", action="store_true", help="the same, as JSON")


def run_doctor(args: argparse.Namespace) -> int:
    """Prints the verdict and every problem; returns 0 if apex_te is ready, else 1."""
    found = verdict(gathered.of_all_ops())
    if args.json:
        print(json.dumps(found._asdict(), indent=1))
    else:
        print(found.text)
        for problem in found.problems[1:]:
            print_field("also", problem)
    return 0 if found.ready else 1


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``report`` to its parser."""
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--paths", action="store_true", help="the path of each op's library, too")


def run_report(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if the settings are such that a call would raise an error."""
    facts = gathered.of_all_ops()
    found = verdict(facts)
    more = {label: section() for label, section in args.sections.items()}
    if args.json:
        facts["verdict"] = found._asdict()
        facts.update((label, values) for label, (values, _) in more.items())
        print(json.dumps(facts, indent=1))
    else:
        told = {label: text for label, (_, text) in more.items()}
        print("\n".join([*field("verdict", found.text), *lines(facts, args.paths, told)]))
    return 1 if setting_problems(facts) else 0


class Verdict(NamedTuple):
    """Judgement on whether calls on each device that torch could use would work."""

    ready: bool
    text: str
    problems: list[str]


def verdict(facts: Facts) -> Verdict:
    """Returns the verdict on a report, as ``facts.collect`` returns it."""
    gpus = facts["gpus"]["devices"]
    problems = [*setting_problems(facts), *_torch(facts)]
    rows = [row for row in facts["libraries"] if row["op"] != JAX_HANDLERS]
    newest = max((_numbers(gpu["arch"]) for gpu in gpus), default=())
    on_gpu = [r for r in rows if r["device"] == "cuda" and newest >= tuple(r["min_arch"])]
    parts = [_part([row for row in rows if row["device"] == "cpu"], "the CPU", problems)]
    if gpus:
        kinds = [gpu["name"] for gpu in gpus]
        named = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        parts.append(_part(on_gpu, named, problems))
    problems += _unusable([row for row in rows if row["device"] == "-"])
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


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version such as "12.4", or of an arch."""
    return tuple(map(int, re.findall(r"\d+", version)))


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
    elif torch["cuda"] and gpus["cuda"] and _numbers(torch["cuda"])[0] > _numbers(gpus["cuda"])[0]:
        yield (
            f"torch {torch['version']} is for CUDA {torch['cuda']}, and driver {gpus['driver']}"
            f" runs CUDA {gpus['cuda']} at most: update the driver, or install torch for an older"
            " CUDA"
        )


def _part(rows: list[Facts], device: str, problems: list[str]) -> str:
    """Returns the state of one device's libraries as text, and adds what is wrong to problems."""
    problems += _unusable(rows)
    built = sum(row["state"] in _BUILT for row in rows)
    later = sum(row["state"] == "can build" for row in rows)
    told = [f"{built} compiled"] * bool(built) + [f"{later} to compile on first use"] * bool(later)
    return f"libraries for {device}: {', '.join(told) or 'none'}"


def _unusable(rows: list[Facts]) -> list[str]:
    """Returns the reasons why libraries are not usable, each once with how many it is about."""
    reasons = _by_reason(row for row in rows if row["state"] not in _USABLE)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in reasons.items()
    ]


def _by_reason(rows: Iterable[Facts]) -> dict[str, list[str]]:
    """Returns the names of libraries, such as "rope (cpu)", by their reason without the op."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reason = row["reason"].removeprefix(f"{row['op']}: ")
        reasons.setdefault(reason, []).append(f"{row['op']} ({row['device']})")
    return reasons


def _machine(facts: Facts) -> Iterator[str]:
    """Yields the lines on apex_te, machine, Python and torch."""
    here, python, torch = facts["machine"], facts["python"], facts["torch"]
    yield from field(
        "apex_te", f"{facts['apex_te']['version']} in {short(facts['apex_te']['path'])}"
    )
    memory = here["memory_free"]
    free = f", {size(memory)} of memory free" if memory is not None else ""
    jobs = f", {here['jobs']} compilers at once" if here["jobs"] else ""
    yield from field(
        "machine",
        f"{here['system']} {here['architecture']}, {here['libc']}, {here['cpu']},"
        f" {here['cpus']} CPUs{free}{jobs}",
    )
    yield from field(
        "Python", f"{python['implementation']} {python['version']}, {short(python['executable'])}"
    )
    if torch["version"] is None:
        yield from field("torch", "not installed")
    else:
        kind = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}"
        kind = kind if torch["cuda"] or torch["hip"] else "CPU only"
        yield from field("torch", f"{torch['version']} ({kind})")


def _gpus(facts: Facts) -> Iterator[str]:
    """Yields the lines on GPUs, driver and archs."""
    gpus, archs = facts["gpus"], facts["archs"]
    driver = f"driver {gpus['driver'] or 'unknown'} for CUDA {gpus['cuda']}" if gpus["cuda"] else ""
    devices = [
        f"{device['name']}, arch {device['arch']}"
        + (f", {size(device['memory'])}" if device["memory"] else "")
        for device in gpus["devices"]
    ]
    for index, device in enumerate(dict.fromkeys(devices)):
        yield from field("" if index else "GPUs", f"{devices.count(device)} x {device}")
    if not devices:
        yield from field("GPUs", f"none: {gpus['problem'] or 'the driver sees none'}")
    if driver:
        yield from field("", driver)
    if archs["problem"]:
        yield from field("archs", archs["problem"])
    elif archs["archs"]:
        yield from field("archs", f"{' '.join(archs['archs'])}, from {archs['from']}")
    else:
        yield from field("archs", f"none: no GPU is visible; to compile, set {archs['example']}")


def _tools(facts: Facts) -> Iterator[str]:
    """Yields a line for each compiler, program and header."""
    for tool in facts["tools"]:
        if tool["missing"]:
            yield from field(tool["name"], f"missing: {tool['missing']}")
            continue
        origin = f", from {tool['origin']}" if tool["origin"] else ""
        version = f"{tool['version']}, " if tool["version"] else ""
        yield from field(tool["name"], f"{version}{short(tool['path'])}{origin}")


def _caches(facts: Facts) -> Iterator[str]:
    """Yields a line for each cache folder."""
    for place in facts["caches"]:
        name = {"cache": "user cache", "extra": "read-only"}.get(place["kind"], place["kind"])
        text = f"{short(place['path'])} ({place['from']}): "
        if not place["exists"]:
            text += "not there yet" if place["writable"] else "not there"
        else:
            text += f"owner {place['owner']}, mode {place['mode']}, {place['entries']} entries,"
            text += f" {size(place['bytes'])}"
        if "free" in place:
            text += f", {size(place['free'])} free"
        if place["problem"]:
            text += f"; {place['problem']}"
        yield from field(name, text)


def _settings(facts: Facts) -> Iterator[str]:
    """Yields a line for each environment variable that is set."""
    for index, item in enumerate(facts["settings"]):
        problem = f"  <- {item['problem']}" if item["problem"] else ""
        yield from field("" if index else "settings", f"{item['name']}={item['value']}{problem}")
    if not facts["settings"]:
        yield from field("settings", "none")


def _libraries(facts: Facts, paths: bool) -> Iterator[str]:
    """Yields the table of libraries and its summary; with ``paths`` the path below each row."""
    rows = facts["libraries"]
    op = min(24, max(len(row["op"]) for row in rows))
    columns = (
        Column("op", most=op),
        Column("for", 4),
        Column("state", 9),
        Column("archs", 6, most=WIDTH - op - 44, ending=".."),
        Column("s", 6, right=True),
        Column("size", 7, right=True),
        Column("key"),
    )
    titles, *told = table(columns, [_cells(row) for row in rows])
    yield titles
    for row, line in zip(rows, told, strict=True):
        yield line
        if paths and row["path"]:
            yield f"  {short(row['path'])}"
    yield ""
    yield from _summary(rows)


def _cells(row: Facts) -> tuple[str, ...]:
    """Returns the cells of a library's row."""
    seconds = f"{row['seconds']:.1f}" if row["seconds"] is not None else ""
    shown = size(row["size"]) if row["size"] is not None else ""
    archs = "+".join(row["archs"])
    return row["op"], row["device"], row["state"], archs, seconds, shown, row["key"][:12]


def _summary(rows: list[Facts]) -> Iterator[str]:
    """Yields the number of libraries in each state, and the reasons why some cannot be built."""
    counts = {state: [row for row in rows if row["state"] == state] for state in _ORDER}
    told = [f"{len(found)} {state}" for state, found in counts.items() if found]
    yield from field("libraries", ", ".join(told))
    for state in ("failed", "cannot"):
        for reason, names in _by_reason(counts[state]).items():
            more = f" and {len(names) - 2} more" if len(names) > 3 else ""
            which = ", ".join(names[: 2 if more else 3])
            yield from field(state, f"{which}{more}: {reason}")


def lines(
    facts: Facts, paths: bool = False, more: Mapping[str, list[str]] | None = None
) -> Iterator[str]:
    """Yields the lines of the report as text; only paths may exceed ``WIDTH``."""
    yield from _machine(facts)
    yield from _gpus(facts)
    yield ""
    yield from _tools(facts)
    yield ""
    yield from _caches(facts)
    yield from _settings(facts)
    for label, texts in (more or {}).items():
        for index, text in enumerate(texts):
            yield from field("" if index else label, text)
    yield ""
    yield from _libraries(facts, paths)
