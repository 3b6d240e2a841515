"""Loader modules: looking at them never compiles, and threads that meet in one get what they want.

What the ancestors' loaders got wrong: builds started by ``hasattr`` and ``dir``, threads that saw
half a module, a failing build repeated at every access, output at every start.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from programs import captured
from tiny_op import CHECKOUT, Tiny, logging_compiler

import op_builder
from op_builder.jit.backends import toolchain
from op_builder.jit.build.service import open_library
from op_builder.jit.find import cache

pytest.importorskip("torch")

OUTER = cache.user_cache().path  # the user's own, before the tests get empty ones


@pytest.fixture
def dispatcher(monkeypatch, tmp_path):
    """The environment in which the dispatcher, the slowest build of all, alone is found ready."""
    with monkeypatch.context() as patch:
        patch.setenv("APEX_TE_CACHE_DIR", OUTER)
        opened = op_builder.get_builder("apex_te_core").open()
    entry, folder = Path(opened.path).parents[1], tmp_path / "ready"
    folder.mkdir(mode=0o700)
    shutil.copytree(entry, folder / entry.name)
    return {**os.environ, "APEX_TE_CACHE_PATH": str(folder), "PYTHONPATH": str(CHECKOUT)}


def run(code, environment):
    command = [sys.executable, "-B", "-c", code]
    return captured(command, check=False, env=environment)


LOOK = """
import importlib, inspect, pydoc, sys, types
import torch, apex_te.op_builder
started = []
names = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")
sys.addaudithook(lambda event, args: started.append(event) if event in names else None)
ops = apex_te.op_builder.builder_names()
for op in ops:
    module = importlib.import_module(f"apex_te.compatibility.{op}")
    for name in module.__all__:
        assert hasattr(module, name) and name in dir(module)
        assert "args" in inspect.signature(getattr(module, name)).parameters
    assert inspect.getmembers(module, inspect.isfunction)
    assert module.__all__[0] in pydoc.render_doc(module)
    assert not hasattr(module, "nothing") and not hasattr(module, "__wrapped__")
    assert apex_te.op_builder.get_builder(op).is_compatible(verbose=True)
print(len(ops), started)
"""


def test_looking_at_every_loader_starts_nothing(cache_dir):
    done = run(LOOK, {**os.environ, "PYTHONPATH": str(CHECKOUT), "PATH": ""})
    assert (done.stdout, done.stderr) == (f"{len(op_builder.builder_names())} []\n", "")
    assert list(cache_dir.iterdir()) == []


CALLS = """
import threading
import torch
import apex_te.compatibility.amax_scale_update as op
barrier = threading.Barrier(8)
results = []
def call():
    history = torch.tensor([[2.0], [3.0]])
    scale, inverse = torch.ones(1), torch.ones(1)
    barrier.wait()
    try:
        op.amax_scale_update([history], [scale], [inverse], [448.0], None, 0, False, False)
        results.append(scale.item())
    except BaseException as error:
        results.append(repr(error)[:200])
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(results), *sorted(set(map(str, results))))
"""


@pytest.mark.long
def test_threads_that_call_first_at_once(dispatcher, tmp_path):
    compiler, log = logging_compiler(tmp_path, sleep=0.5)
    done = run(CALLS, {**dispatcher, "CXX": str(compiler)})
    count, *values = done.stdout.split()
    assert (count, len(values)) == ("8", 1), done.stdout + done.stderr
    assert float(values[0]) == pytest.approx(448.0 / 3.0)
    assert log.read_text() == "x\n"
    again = run(CALLS, {**dispatcher, "CXX": "/nowhere"})
    assert (again.stdout, again.stderr) == (done.stdout, "")  # a hit says nothing at all


FAILING = """
import torch
import apex_te.compatibility.amax_scale_update as op
from apex_te.op_builder import BuildError
before = dir(op)
function = op.amax_scale_update
told = set()
for _ in range(3):
    tensors = [torch.ones(1)]
    try:
        op.amax_scale_update(tensors, tensors, tensors, [448.0], None, 0, False, False)
    except BuildError as error:
        told.add(f"{type(error).__name__}: {error}")
assert dir(op) == before and op.amax_scale_update is function
assert hasattr(op, "amax_scale_update") and not hasattr(op, "nothing")
print("\\n---\\n".join(told))
"""


def test_failing_build_is_not_repeated(dispatcher, tmp_path):
    compiler, log = tmp_path / "failing-cxx", tmp_path / "compilations"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo x >> {log}; echo "a.cpp:1:1: error: broken" >&2;'
        ' exit 1;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    done = run(FAILING, {**dispatcher, "CXX": str(compiler)})
    assert done.stdout.startswith(
        "CompileError: amax_scale_update (cpu): a.cpp:1:1: error: broken\n  command: "
    ), done.stderr
    assert "---" not in done.stdout
    assert log.read_text() == "x\n"


def test_verbose_load_of_a_cached_op_says_nothing(root, capfd, forget):
    Tiny(root).open()
    assert "built in" in capfd.readouterr().err
    for verbose in (True, False):
        forget()
        assert open_library(Tiny(root), "cpu", verbose=verbose).fd >= 0
    assert capfd.readouterr() == ("", "")


def test_no_flag_depends_on_the_machine():
    for builder in [*op_builder.all_builders().values(), op_builder.get_builder("apex_te_core")]:
        for kind in ("cpu", "cuda"):
            flags = " ".join(builder.compile_flags(kind))
            assert "-march" not in flags
            assert "-mtune" not in flags
            assert "fast" not in flags


def test_ninja_without_its_python_module(tmp_path, monkeypatch):
    ninja = tmp_path / "ninja"
    shutil.copy(toolchain.find_ninja(), ninja)
    monkeypatch.setenv("PATH", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ninja" else find_spec(name)
    )
    assert toolchain.find_ninja() == str(ninja)
