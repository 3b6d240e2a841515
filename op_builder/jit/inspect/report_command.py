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
    print(json.dumps(found._asdict(), indent=1) if args.json else found.text)
    for problem in [] if args.json else found.problems[1:]:
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
    return tuple(map(int, re.findall(r"\d+", version)))


def _torch(facts: Facts) -> Iterator[str]:
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
    more = [f" and {len(names) - 1} more" * (len(names) > 1) for names in reasons.values()]
    told = zip(reasons.items(), more, strict=True)
    return [f"{names[0]}{others}: {reason}" for (reason, names), others in told]


def _by_reason(rows: Iterable[Facts]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reason = row["reason"].removeprefix(f"{row['op']}: ")
        reasons.setdefault(reason, []).append(f"{row['op']} ({row['device']})")
    return reasons


def _machine(facts: Facts) -> Iterator[str]:
    suite, here, python, torch = (facts[key] for key in ("apex_te", "machine", "python", "torch"))
    yield from field("apex_te", f"{suite['version']} in {short(suite['path'])}")
    memory = here["memory_free"]
    told = f"{here['system']} {here['architecture']}, {here['libc']}, {here['cpu']},"
    told += f" {here['cpus']} CPUs"
    told += f", {size(memory)} of memory free" if memory is not None else ""
    told += f", {here['jobs']} compilers at once" if here["jobs"] else ""
    yield from field("machine", told)
    told = f"{python['implementation']} {python['version']}, {short(python['executable'])}"
    yield from field("Python", told)
    kind = f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    kind = f"CUDA {torch['cuda']}" if torch["cuda"] else kind
    told = f"{torch['version']} ({kind})" if torch["version"] is not None else "not installed"
    yield from field("torch", told)


def _gpus(facts: Facts) -> Iterator[str]:
    gpus, archs = facts["gpus"], facts["archs"]
    devices = []
    for gpu in gpus["devices"]:
        memory = f", {size(gpu['memory'])}" if gpu["memory"] else ""
        devices.append(f"{gpu['name']}, arch {gpu['arch']}{memory}")
    told = [f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices)]
    told = told or [f"none: {gpus['problem'] or 'the driver sees none'}"]
    if gpus["cuda"]:
        told.append(f"driver {gpus['driver'] or 'unknown'} for CUDA {gpus['cuda']}")
    yield from _fields("GPUs", told)
    text = f"none: no GPU is visible; to compile, set {archs['example']}"
    if archs["archs"]:
        text = f"{' '.join(archs['archs'])}, from {archs['from']}"
    yield from field("archs", archs["problem"] or text)


def _fields(name: str, texts: Iterable[str]) -> Iterator[str]:
    for index, text in enumerate(texts):
        yield from field("" if index else name, text)


def _tools(facts: Facts) -> Iterator[str]:
    for tool in facts["tools"]:
        origin = f", from {tool['origin']}" if tool["origin"] else ""
        version = f"{tool['version']}, " if tool["version"] else ""
        text = f"missing: {tool['missing']}" if tool["missing"] else version + short(tool["path"])
        yield from field(tool["name"], text + origin)


def _caches(facts: Facts) -> Iterator[str]:
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
    told = []
    for item in facts["settings"]:
        problem = f"  <- {item['problem']}" if item["problem"] else ""
        told.append(f"{item['name']}={item['value']}{problem}")
    yield from _fields("settings", told or ["none"])


def _libraries(facts: Facts, paths: bool) -> Iterator[str]:
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
    seconds = f"{row['seconds']:.1f}" if row["seconds"] is not None else ""
    shown = size(row["size"]) if row["size"] is not None else ""
    archs = "+".join(row["archs"])
    return row["op"], row["device"], row["state"], archs, seconds, shown, row["key"][:12]


def _summary(rows: list[Facts]) -> Iterator[str]:
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
        yield from _fields(label, texts)
    yield ""
    yield from _libraries(facts, paths)
