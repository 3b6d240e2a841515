"""Attacks that are repeated at random moments, a few times in L0 and many times in L1."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings

from attacks import (
    CALL,
    LIMIT,
    call,
    call_in_process,
    finish,
    half_written,
    kill,
    names_of,
    processes_of,
    resized,
    wait_for,
)
from tiny_op import PRELUDE, Tiny, logging_compiler, write_op

from op_builder.jit.build import lock


def _fresh(cache_dir):
    for path in cache_dir.glob("tiny_cpu-*/cpu"):
        shutil.rmtree(path)


def _load(root, forget):
    """A load that must succeed, whatever happened before."""
    forget()
    opened = Tiny(root).open()
    assert call(opened) == 1
    os.close(opened.fd)


def kill_builders(root, cache_dir, forget, tally, count):
    """SIGKILL at a random moment: the builder alone, or with all that it started."""
    chance = random.Random(count)
    for number in range(count):
        process = call_in_process(root)
        if number % 4:  # else a moment of the start, of an interpreter mostly

            def begun(process=process):
                return list(cache_dir.glob("tmp/*")) or process.poll() is not None

            assert wait_for(begun)
        time.sleep(chance.uniform(0.0, 0.3))
        building = list(cache_dir.glob("tmp/*"))
        process.kill()
        if number % 2:
            for pid in processes_of(root.parent):
                kill(pid)
        out, _ = process.communicate(timeout=LIMIT)
        assert half_written(cache_dir, root) == []
        moment = "published" if list(cache_dir.glob("tiny_cpu-*/cpu")) else "before the build"
        tally.count("finished" if out else "in the build" if building else moment)
        assert out in ("", "value 1\n")
        _load(root, forget)
        _fresh(cache_dir)
    # what the killed left goes with the next build, once their compilers have ended, too
    assert wait_for(lambda: not processes_of(root.parent))
    _load(root, forget)
    assert list(cache_dir.glob("tmp/*")) == []


def _dying_tool(folder, tool, seconds):
    """Environment in which gcc's ``tool`` is killed after a while, in the middle of its work."""
    command = ["g++", f"-print-prog-name={tool}"]
    real = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    path = shutil.which(real)
    assert path is not None
    tools = folder / f"dying-{tool}"
    tools.mkdir(exist_ok=True)
    script = tools / tool
    script.write_text(f'#!/bin/sh\n{path} "$@" &\nsleep {seconds:.3f}\nkill -9 $! $$\n')
    script.chmod(0o755)
    return {"COMPILER_PATH": str(tools)}


def _kill_named(process, folder, name, seconds):
    """Kill the process of this name that works in ``folder``, a while after it comes."""
    victims: list[int] = []

    def found():
        victims.extend(pid for pid, its in names_of(processes_of(folder)).items() if its == name)
        return victims or process.poll() is not None

    assert wait_for(found)
    time.sleep(seconds)
    for pid in victims[:1]:
        kill(pid)


def kill_compilers(root, cache_dir, forget, tally, count):
    """SIGKILL of ninja, a compiler, an assembler or a linker: no compile error, nothing stored."""
    chance = random.Random(count)
    for number in range(count):
        name = ("ninja", "as", "cc1plus", "g++", "ld", "sh")[number % 6]
        seconds = chance.choice((0.0, chance.uniform(0.0, 0.05)))
        if name in ("as", "cc1plus", "ld"):
            process = call_in_process(root, **_dying_tool(root.parent, name, seconds))
        else:
            process = call_in_process(root)
            _kill_named(process, cache_dir, name, seconds)
        output = finish(process)
        if output != "value 1\n":
            assert output.startswith("BuildInterruptedError tiny (cpu): "), output
            assert half_written(cache_dir, root) == []
        assert list(cache_dir.rglob("failure-*")) == []
        tally.count(f"{name} killed" if output != "value 1\n" else f"{name} had ended")
        _load(root, forget)
        _fresh(cache_dir)


def interrupt(root, cache_dir, forget, tally, count):
    """Ctrl-C at a random moment in a process that lives on, as a notebook does."""
    chance = random.Random(count)
    code = (
        PRELUDE
        + f"""
from op_builder.jit.build import failure, lock, publish
try:
    print("ready", flush=True)
{textwrap.indent(textwrap.dedent(CALL.format(root=str(root))), "    ")}
except KeyboardInterrupt:
    print("interrupted", flush=True)
while True:
    try:
        sys.stdin.read()
        break
    except KeyboardInterrupt:
        pass
"""
    )
    for _ in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        end = process.stdout.readline().strip()
        if end not in ("interrupted", "value 1"):
            raise AssertionError(f"{end}\n{process.communicate(timeout=LIMIT)}")
        assert time.monotonic() - sent < 10
        # the process lives, holds no lock, and nothing that it started lives
        assert wait_for(lambda process=process: processes_of(root.parent) in ([], [process.pid]))
        for path in cache_dir.glob("locks/*"):
            assert lock.is_free(str(path))
        assert half_written(cache_dir, root) == []
        _load(root, forget)
        with contextlib.suppress(ProcessLookupError):
            assert process.poll() is None
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        tally.count(end)
        _fresh(cache_dir)


def start_cold(folder, tally, processes, ops):
    """Processes that start at once and want the same ops, each in another order: one compile each.

    The ops are versions of one op in checkouts that share the cache.
    """
    folder.mkdir(exist_ok=True)
    compiler, log = logging_compiler(folder, sleep=0.1)
    roots = [
        str(write_op(folder / f"checkout-{processes}-{value}", value, f"/* {folder} */"))
        for value in range(ops)
    ]
    started = []
    for number in range(processes):
        code = textwrap.dedent(CALL).partition("print(")[0].replace("{{", "{").replace("}}", "}")
        order = roots[number % ops :] + roots[: number % ops]
        code += f"found = {{root: call(root) for root in {order!r}}}\n"
        code += f"print([found[root] for root in {roots!r}])\n"
        started.append(_python(code, CXX=str(compiler)))
    expected = f"{[f'value {value}' for value in range(ops)]}\n"
    for process in started:
        tally.count("right" if finish(process) == expected else "WRONG")
    tally.count(f"{log.read_text().count('x')} compiles of {ops} ops")
    assert log.read_text() == "x\n" * ops


def fail_cold(folder, tally, processes):
    """Processes that start at once and want an op that does not compile: one error for all."""
    folder.mkdir(exist_ok=True)
    compiler, log = logging_compiler(folder, sleep=0.3)
    root = write_op(folder / "broken", body=f"return no_such_name; /* {folder} */")
    started = [call_in_process(root, CXX=str(compiler)) for _ in range(processes)]
    outputs = [finish(process) for process in started]
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("CompileError tiny (cpu): ")
    assert log.read_text() == "x\n"
    for _ in outputs:
        tally.count("the same error")
    tally.count("compile")


def swap(root, library, planted, folder, tally, count):
    """Loads while another process changes the library for a planted one, and back, all the time."""
    right, wrong, ready = folder / "right.so", folder / "wrong.so", folder / "ready"
    shutil.copy2(library, right)
    wrong.write_bytes(resized(planted, right.stat().st_size))
    code = f"""
import shutil
new = {str(library)!r} + ".new"
while True:
    for path in {[str(right), str(wrong)]!r}:
        shutil.copy2(path, new)
        os.chmod(new, 0o644)
        os.rename(new, {str(library)!r})
        open({str(ready)!r}, "w").close()
"""
    swapper = _python(code)
    try:
        assert wait_for(ready.exists)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count):
                found = Tiny(root).find()
                if found is None:
                    tally.count("refused")
                    continue
                value = call(found)
                tally.count("right" if value == 1 else f"WRONG {value}")
                os.close(found.fd)
    finally:
        swapper.kill()
        swapper.communicate()


def fill_disk(root, other, disk, tally, free_pages):
    """Builds on a disk with a few pages left: each is refused and said, or whole.

    ``other`` is an op that is built before; it loads from the full disk.
    """
    folder = disk / "cache"
    os.close(Tiny(other).open().fd)
    room = os.statvfs(disk)
    for pages in free_pages:
        filler = disk / "filler"
        filler.write_bytes(bytes((room.f_bavail - pages) * room.f_frsize))
        output = finish(call_in_process(root))
        if output == "value 1\n":
            tally.count("built")
            assert half_written(folder, root) == []
            shutil.rmtree(next(folder.glob(f"tiny_cpu-{Tiny(root).key('cpu')[:24]}/cpu")))
        else:
            assert output.startswith(f"DiskFullError tiny (cpu): no space to build in {folder}")
            assert " bytes free" in output
            assert Tiny(root).find() is None
            tally.count("refused")
        assert list(folder.glob("tmp/*")) == []
        assert list(folder.rglob("failure-*")) == []
        assert finish(call_in_process(other)) == "value 2\n"
        filler.unlink()
    assert finish(call_in_process(root)) == "value 1\n"


def _python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
