"""Command ``python -m apex_te why <op>``: explains the look-up of an op's libraries."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator

from ...spec import OpSpec
from ..backends import library
from ..backends.archs import Arch, covered
from ..errors import BuildError, CacheError
from ..find import cache, inventory
from ..find.inventory import Entry
from ..find.key import OP_ABI, key_of, made_of, normalise
from ..text import WIDTH, complain, field, short, since
from . import facts as gathered
from .facts import Facts, add_ops, ops_of


def add_why(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``why`` to its parser."""
    add_ops(parser, "an op such as rms_norm, apex_te_core (the dispatcher) or apex_te_jax")
    device = "default: cpu, and cuda where there is an arch"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=device)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run_why(args: argparse.Namespace) -> int:
    """Explains an op's libraries; returns 1 if the next call would raise, 2 if no op is named."""
    from ... import get_builder

    specs = [get_builder(name) for name in ops_of(args)]
    if not specs:
        complain("why: name an op, such as rms_norm")
        return 2
    now = gathered.here()
    found = [explain(s, device, now) for s in specs for device in _devices(s, args.device, now)]
    texts = "\n\n".join("\n".join(lines(facts)) for facts in found)
    print(json.dumps(found, indent=1) if args.json else texts)
    return 1 if any(facts["next"]["raises"] for facts in found) else 0


def _devices(spec: OpSpec, device: str | None, here: gathered.Here) -> list[str]:
    if device is not None:
        spec.check_device(device)
        return [device]
    devices = list(spec.built_devices())
    if here.targets is not None and not here.targets.known:
        return [name for name in devices if not spec.needs_archs(name)] or devices
    return devices


def explain(spec: OpSpec, device: str, here: gathered.Here) -> Facts:
    """Returns the explanation of one library's look-up as a dict for JSON."""
    facts: Facts = {
        "op": spec.NAME,
        "device": device,
        "key": key_of(spec, device),
        "abi": OP_ABI,
        "flags": normalise(library.key_flags(spec, device), str(spec.root)),
        **made_of(spec, device),
        "gpus": [str(Arch(*gpu)) for gpu in here.capabilities],
    }
    try:
        facts["compiler"] = library.compiler_version(spec, device)
    except BuildError as error:
        facts["compiler"] = f"none: {error}"
    facts["wanted"] = []
    if here.targets is not None and here.targets.named is not None:
        with contextlib.suppress(BuildError):  # "next" says what is wrong
            facts["wanted"] = [str(arch) for arch in here.archs(spec, device)]
    places = cache.locations(spec.prebuilt_folder)
    facts["steps"] = [_step(place, spec, device, here, facts) for place in places]
    facts["next"] = _next(spec, device, here)
    return facts


def _step(
    place: cache.Location, spec: OpSpec, device: str, here: gathered.Here, facts: Facts
) -> Facts:
    step: Facts = {"kind": place.kind, "path": place.path, "found": [], "problem": ""}
    step["exists"] = os.path.lexists(place.path)
    try:
        for entry in inventory.entries(place, spec.library_name(device)):
            verdict, serves = _verdict(entry, spec, device, here, facts)
            step["found"].append(
                {
                    "path": entry.path,
                    "archs": list(entry.archs),
                    "compiler": entry.manifest.get("compiler", ""),
                    "seconds": entry.seconds(),
                    "built": entry.built(),
                    "serves": serves,
                    "verdict": verdict,
                }
            )
    except (CacheError, OSError) as error:
        step["problem"] = str(error)
    return step


def _verdict(
    entry: Entry, spec: OpSpec, device: str, here: gathered.Here, facts: Facts
) -> tuple[str, bool]:
    if not facts["key"].startswith(entry.digits):
        return f"another key: {_difference(entry, spec, facts)}", False
    if entry.problem:
        return f"refused: {entry.problem}", False
    if spec.needs_archs(device):
        usable = [gpu for gpu in here.capabilities if gpu >= spec.min_arch]
        lacking = [str(Arch(*gpu)) for gpu in usable if not covered(entry.archs, gpu)]
        if lacking:
            return f"does not cover the GPU of arch {', '.join(lacking)}", False
        lacking = [arch for arch in facts["wanted"] if arch not in entry.archs]
        if lacking and not usable:
            return f"does not hold {', '.join(lacking)}, which the arch list names", False
    theirs = entry.manifest.get("compiler", "unknown")
    if theirs != facts["compiler"] and not facts["compiler"].startswith("none"):
        return f"serves, though built by {theirs} and the compiler is {facts['compiler']}", True
    return "serves", True


def _difference(entry: Entry, spec: OpSpec, facts: Facts) -> str:
    theirs, told = entry.manifest, []
    now: dict[str, str] = facts["sources"]
    was: dict[str, str] = theirs.get("sources", now)
    changes = {
        "changed": [name for name in now if name in was and was[name] != now[name]],
        "new": [name for name in now if name not in was],
        "gone": [name for name in was if name not in now],
    }
    for word, names in changes.items():
        if names:
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            told.append(f"{word} {', '.join(names[:3])}{more}")
    old, new = normalise(theirs.get("flags") or (), str(spec.root)), facts["flags"]
    if old and old != new:
        added = " ".join(flag for flag in new if flag not in old)
        dropped = " ".join(flag for flag in old if flag not in new)
        dropped = f", not {dropped}" if dropped else ""
        told.append(f"flags: now {added or 'in another order'}{dropped}")
    for name in ("machine", "extras"):
        if name in theirs and theirs[name] != facts[name]:
            told.append(f"for {theirs[name] if name == 'machine' else ' '.join(theirs[name])}")
    return "; ".join(told) or "nobody recorded what it was made of"


def _next(spec: OpSpec, device: str, here: gathered.Here) -> Facts:
    row = gathered.library_facts(spec, device, here)
    state, where = row["state"], cache.user_cache().path
    if state in ("prebuilt", "cached"):
        text = f"loads {short(row['path'])}; no compiler runs"
    elif state == "can build":
        archs = f" for {' '.join(row['archs'])}" if row["archs"] else ""
        about = f", which took {row['seconds']:.1f} s last time" if row["seconds"] else ""
        into = "a temporary folder, with a warning (the user cache cannot be written)"
        into = short(where) if cache.is_writable(where) else into
        text = f"compiles{archs}{about}, into {into}"
    else:
        again = "CompileError again, stored a moment ago" if state == "failed" else "an error"
        text = f"raises {again}: {row['reason']}"
    raises = state in ("failed", "cannot")
    return {"state": state, "raises": raises, "text": text, "archs": row["archs"]}


_STEP = {"prebuilt": "prebuilt", "cache": "user cache", "extra": "read-only"}


def lines(facts: Facts) -> Iterator[str]:
    """Yields the lines of an explanation as text; only paths may exceed ``WIDTH``."""
    yield f"{facts['op']} ({facts['device']})"
    yield from field("key", facts["key"])
    settings = [facts["machine"], f"op ABI {facts['abi']}", *facts["extras"]]
    yield from field("settings", ", ".join(settings))
    yield from field("flags", " ".join(facts["flags"]))
    for index, (name, digest) in enumerate(facts["sources"].items()):
        room = WIDTH - 13 - 12
        yield f"{'' if index else 'sources':<11}{name:<{room}} {digest[:12]}"
    yield from field("compiler", f"{facts['compiler']} (not part of the key)")
    yield ""
    yield from field("1 process", "nothing is loaded in a new process")
    for number, step in enumerate(facts["steps"], 2):
        name = f"{number} {_STEP[step['kind']]}"
        if step["problem"]:
            yield from field(name, f"{short(step['path'])}: not used: {step['problem']}")
            continue
        held = "nothing of this op" if step["exists"] else "not there"
        yield from field(name, f"{short(step['path'])}{'' if step['found'] else f': {held}'}")
        for entry in step["found"]:
            ago = since(entry["built"])
            inside = f"{os.path.relpath(entry['path'], step['path'])}{f' ({ago} old)' * bool(ago)}"
            yield from field("", f"{inside}: {entry['verdict']}")
    yield ""
    yield from field("next call", facts["next"]["text"])
