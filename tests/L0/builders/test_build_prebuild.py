"""Building many libraries beforehand: limits, failures, who builds, and what is reported."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from apex_te.op_builder.jit import errors as package_errors
from many_ops import make_op, most_at_once, watched_compiler
from planted import visible_gpus
from programs import captured
from tiny_op import CHECKOUT

import apex_te
from op_builder import CPUOpBuilder, all_builders
from op_builder.core import CoreBuilder
from op_builder.jit import cli
from op_builder.jit.errors import (
    ArchError,
    JitDisabledError,
    PrebuildError,
    SettingError,
    UnknownOpError,
)
from op_builder.jit.prebuild import batch, install
from op_builder.jit.prebuild.batch import Choice, Targets

NO_GPU = Targets(None)


@pytest.fixture
def ops(root, monkeypatch):
    """Six ops; no dispatcher and no handlers, which would take seconds, are built with them."""
    for module in (batch, install):
        monkeypatch.setattr(module, "dispatchers", lambda named: [])
        monkeypatch.setattr(module, "jax_handlers", list)
    return {f"op{i}": make_op(root, f"op{i}") for i in range(6)}


# How many compilers ------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 3])
def test_limit_holds_over_all_ops(jobs, ops, tmp_path, monkeypatch):
    compiler, notes = watched_compiler(tmp_path, 0.2)
    monkeypatch.setenv("CXX", str(compiler))
    choices = batch.choose_ops(ops, None, None, NO_GPU)
    report = batch.into_cache(ops, choices, NO_GPU, jobs=jobs)
    assert [library.state for library in report.libraries] == ["built"] * 6
    assert report.jobs == most_at_once(notes) == jobs


def test_sources_of_a_library_share_what_nothing_else_wants(root):
    """Long builds come first; one uses several compilers only if no other library waits."""
    one, two = make_op(root, "one"), make_op(root, "two")
    for name in ("two_a", "two_b"):
        (root / f"csrc/two/{name}_cpu.cpp").write_text("int x;\n")
    (root / "csrc/one/one_cpu.cpp").write_text("// long\n" * 100)
    items = [batch.Wanted(two, "cpu"), batch.Wanted(one, "cpu")]
    items.sort(key=batch.Wanted.cost, reverse=True)
    assert [item.op for item in items] == ["one", "two"]

    def shares(names, free):
        wanted = [items[0] if name == "1" else items[1] for name in names]
        return [share for _, share in batch._fitting(wanted, free)]

    assert shares("2", 8) == [3]
    assert shares("2", 2) == [2]
    assert shares("2222", 3) == [1, 1, 1]
    assert shares("221", 4) == [2, 1, 1]
    assert shares("11", 8) == [1, 1]
    assert shares("11", 0) == []


# What is built -----------------------------------------------------------------------------------


def test_second_prebuild_finds_everything(ops):
    choices = batch.choose_ops(ops, ["op1", "op2", "op1"], None, NO_GPU)
    first = batch.into_cache(ops, choices, NO_GPU)
    second = batch.into_cache(ops, batch.choose_ops(ops, "op1", "cpu", NO_GPU), NO_GPU)
    assert [library.state for library in first.libraries] == ["built", "built"]
    assert [library.state for library in second.libraries] == ["present"]
    assert second.libraries[0].path == first.libraries[0].path
    assert all(library.size > 1000 and library.seconds > 0 for library in first.libraries)


def test_one_failure_stops_no_other(ops, root, tmp_path):
    ops["broken"] = make_op(root, "broken", "return no_such_name;")
    with pytest.raises(PrebuildError, match="1 of 7 libraries could not be built") as caught:
        batch.into_cache(ops, batch.choose_ops(ops, None, None, NO_GPU), NO_GPU)
    report = caught.value.report
    assert report is not None
    assert [library.op for library in report.of_state("failed")] == ["broken"]
    assert len(report.of_state("built")) == 6
    assert "no_such_name" in str(caught.value)
    assert copy.copy(caught.value).report is report

    target = tmp_path / "prebuilt"
    choices = [Choice(name, "cpu", True) for name in ops]
    with pytest.raises(PrebuildError, match=r"broken \(cpu\): .*no_such_name"):
        install.into_package(ops, choices, str(target))
    assert len(list(target.rglob("*.so"))) == 6


def test_package_holds_libraries_alone(ops, root, cache_dir):
    target = root / "prebuilt"
    choices = [Choice("op0", "cpu", True), Choice("op1", "cpu", False, False, "not asked for")]
    report = install.into_package(ops, choices, str(target))
    assert [library.state for library in report.libraries] == ["built", "skipped"]
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == [
        "manifest.json",
        "op0_cpu.so",
    ]
    assert list(cache_dir.iterdir()) == []
    found = ops["op0"].find()
    assert found is not None
    assert found.kind == "prebuilt"


def test_libraries_are_for_no_particular_machine(ops, root, monkeypatch, tmp_path):
    for builder in (CoreBuilder(), *all_builders().values()):
        for device in builder.DEVICES:
            flags = " ".join(builder.key_flags(device))
            assert "native" not in flags
            assert "-march" not in flags
    native = {"NAME": "op0", "cxx_args": lambda self: ["-O2", "-march=native"]}
    ops["op0"] = type("Native", (CPUOpBuilder,), native)(root)
    with pytest.raises(SettingError, match=r"op0 \(cpu\): -march=native makes a library for this"):
        install.into_package(ops, [Choice("op0", "cpu", True)], str(tmp_path / "prebuilt"))


def test_archs_do_not_depend_on_order_or_place(root, monkeypatch):
    """10.0 is later than 9.0, and an arch list is read, never written."""
    builders = {"op": make_op(root, "op", cuda=True)}
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "10.0;8.0 9.0a+PTX")
    before = dict(os.environ)
    choices = [Choice("op", "cuda", True)]
    (wanted,), rows = batch.plan(builders, choices, Targets.find())
    assert [str(arch) for arch in wanted.archs] == ["8.0", "9.0a+PTX", "10.0"]
    (other,), _ = batch.plan(builders, choices, Targets.find("9.0"))
    assert [str(arch) for arch in other.archs] == ["9.0"]
    with pytest.raises(ArchError, match="unknown CUDA arch '9'"):
        Targets.find("9")
    with pytest.raises(ArchError, match="arch names no CUDA arch, got ' ; '"):
        Targets.find(" ; ")
    assert (rows, dict(os.environ)) == ([], before)


def test_group_leaves_out_what_an_arch_cannot_have(root, monkeypatch):
    visible_gpus(monkeypatch)
    builder = make_op(root, "op", cuda=True)
    type(builder).min_arch = (9, 0)
    told = r"needs arch 9\.0 or later, and arch='8\.0' names none"
    found = Targets.find("8.0")
    wanted, (row,) = batch.plan({"op": builder}, [Choice("op", "cuda", True)], found)
    assert (wanted, row.state) == ([], "skipped")
    assert re.search(told, row.reason)
    with pytest.raises(ArchError, match=told):
        batch.plan({"op": builder}, [Choice("op", "cuda", True, True)], found)
    with pytest.raises(ArchError, match="no GPU is visible to choose a CUDA arch from"):
        batch.plan({"op": builder}, [Choice("op", "cuda", True)], NO_GPU)


def test_package_that_lacks_a_compiler_fails_at_once(ops, root, tmp_path, monkeypatch):
    ops["gpu"] = make_op(root, "gpu", cuda=True)
    monkeypatch.setenv("APEX_TE_CUDA_HOME", "/nowhere")
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "9.0")
    choices = [Choice("op0", "cpu", True), Choice("gpu", "cuda", True)]
    with pytest.raises(PrebuildError, match=r"gpu \(cuda\): APEX_TE_CUDA_HOME=/nowhere holds no"):
        install.into_package(ops, choices, str(tmp_path / "prebuilt"))
    assert not (tmp_path / "prebuilt").exists()


def test_cuda_is_left_out_without_an_arch(root):
    builders = {"one": make_op(root, "one"), "two": make_op(root, "two", cuda=True)}

    def states(device, found):
        chosen = batch.choose_ops(builders, None, device, found)
        return [(each.op, each.device, each.wanted) for each in chosen]

    cpu = [("one", "cpu", True), ("two", "cpu", True)]
    assert states("cpu", NO_GPU) == cpu
    assert states(None, NO_GPU) == [*cpu, ("two", "cuda", False)]
    assert states(None, Targets.find("9.0")) == [*cpu, ("two", "cuda", True)]
    assert states("cuda", NO_GPU) == [("one", "cuda", False), ("two", "cuda", True)]


def test_entry_that_serves_the_gpu_is_present(root, cache_dir, monkeypatch):
    """For visible GPUs whatever covers them will do, as on first use; a list is meant as it is."""
    builder = make_op(root, "op", cuda=True)
    folder = cache_dir / f"op_cuda-{builder.key('cuda')[:24]}" / "8.0+PTX"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "op_cuda.so").write_bytes(b"library")
    manifest = {"key": builder.key("cuda"), "archs": ["8.0+PTX"], "size": 7, "seconds": 1.5}
    manifest["crc32"] = zlib.crc32(b"library")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for found, state in ((Targets(None, ((9, 0),)), "present"), (Targets.find("9.0"), None)):
        (wanted,), _ = batch.plan({"op": builder}, [Choice("op", "cuda", True)], found)
        rows = {}
        assert batch._missing([wanted], found, rows) == ([] if state else [wanted])
        assert [row.state for row in rows.values()] == ([state] if state else [])


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (
            {"ops": ["rms_norm", "nothing"]},
            UnknownOpError,
            "there is no op 'nothing'; there are:",
        ),
        ({"device": "gpu"}, SettingError, "device must be one of cpu, cuda, got 'gpu'"),
        ({"arch": "9"}, ArchError, "unknown CUDA arch '9'"),
        ({"arch": "hoper"}, ArchError, r"unknown CUDA arch 'hoper'; did you mean 'hopper'\?"),
        ({"arch": ["9.0a", "Amper"]}, ArchError, r"'Amper'; did you mean 'ampere'\?"),
        ({"arch": ""}, ArchError, "arch names no CUDA arch, got ''"),
        ({"arch": ["9.0a", 3]}, TypeError, "arch must be a text .* or a list of them, got 3 in it"),
        ({"arch": b"9.0"}, TypeError, "arch must be a text .*, got b'9.0'"),
        ({"ops": [3]}, TypeError, "ops must be a name or a list of names, got 3 in it"),
        ({"device": 3}, SettingError, "device must be one of cpu, cuda, got 3"),
        ({"device": "cpu", "jobs": True}, TypeError, "jobs must be an int, got bool"),
        ({"device": "cpu", "verbose": "yes"}, TypeError, "verbose must be a bool, got 'yes'"),
        ({"device": "cpu", "jobs": 0}, SettingError, "jobs must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(arguments, error, told):
    error = getattr(package_errors, error.__name__, error)  # the checkout's modules are here twice
    with pytest.raises(error, match=f"^prebuild: .*{told}"):
        apex_te.prebuild(**arguments)


@pytest.mark.long
def test_archs_may_be_generations_and_any_iterable():
    report = apex_te.prebuild(iter(["rms_norm"]), arch=iter(["hopper"]), device="cpu")
    assert {row.op for row in report.libraries} >= {"rms_norm"}


def test_forbidden_where_something_is_missing(ops, cache_dir, monkeypatch):
    choices = batch.choose_ops(ops, "op0", None, NO_GPU)
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match=r"op0 \(cpu\): neither prebuilt nor cached"):
        batch.into_cache(ops, choices, NO_GPU)
    assert list(cache_dir.iterdir()) == []
    monkeypatch.delenv("APEX_TE_DISABLE_JIT")
    batch.into_cache(ops, choices, NO_GPU)
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    assert batch.into_cache(ops, choices, NO_GPU).libraries[0].state == "present"


def test_table():
    rows = [
        ("rms_norm", "cpu", "built", (), 9.44, 210_000),
        ("rms_norm", "cuda", "present", ("8.0", "9.0a"), 5.0, 1_200_000),
        ("swiglu", "cuda", "failed", (), 0.0, 0, "", "no nvcc"),
        ("rope", "cpu", "skipped", (), 0.0, 0, "", "APEX_BUILD_ROPE=0"),
        ("hif8", "cpu", "skipped", (), 0.0, 0, "", "APEX_BUILD_ROPE=0"),
    ]
    libraries = tuple(batch.LibraryReport(*row) for row in rows)
    report = batch.BuildReport(libraries, 12.5, 4)
    assert str(report).splitlines() == [
        "op        device  archs     state    seconds    size",
        "rms_norm  cpu     -         built        9.4  210 kB",
        "rms_norm  cuda    8.0 9.0a  present           1.2 MB",
        "swiglu    cuda    -         failed",
        "skipped (cpu): rope, hif8: APEX_BUILD_ROPE=0",
        "1 built, 1 present, 2 skipped, 1 failed; 1.4 MB in 12.5 s, at most 4 compilers at once",
    ]
    assert report.failures().splitlines()[1] == "swiglu (cuda): no nvcc"
    assert json.loads(json.dumps(report.to_dict()))["libraries"][1]["archs"] == ["8.0", "9.0a"]


# Who builds --------------------------------------------------------------------------------------

RANK = """
import sys, time
sys.path[:0] = [{tests!r}, {checkout!r}]
from many_ops import make_op
from op_builder.jit.prebuild import batch
from op_builder.jit.prebuild.batch import Targets
from op_builder.jit.errors import BuildError
from pathlib import Path
batch.dispatchers = lambda named: []
ops = {{name: make_op(Path({root!r}), name, {body!r}) for name in ("op0", "op1", "op2")}}
choices = batch.choose_ops(ops, None, None, Targets(None))
print("ready", flush=True)
sys.stdin.readline()
try:
    report = batch.into_cache(ops, choices, Targets(None), jobs=2)
    print(sorted(library.state for library in report.libraries))
except BuildError as error:
    print(str(error).splitlines()[0])
"""


def ranks(root, compiler, count, body=""):
    """Processes that wait for a line on stdin, then prebuild the same three ops."""
    tests = str(Path(__file__).parent)
    code = RANK.format(tests=tests, checkout=str(CHECKOUT), root=str(root), body=body)
    environment = {**os.environ, "CXX": str(compiler)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    found = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        for _ in range(count)
    ]
    for process in found:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return found


def test_one_rank_builds_the_others_wait(root, tmp_path):
    compiler, notes = watched_compiler(tmp_path, 0.2)
    processes = ranks(root, compiler, 3)
    outputs = [process.communicate("go\n", timeout=120)[0] for process in processes]
    states = ["built", "present", "present"]
    assert sorted(outputs) == [f"{[state] * 3}\n" for state in states]
    assert notes.read_text().split().count("+") == 6  # three compilations, three links
    assert most_at_once(notes) <= 2


def test_ranks_share_a_failure(root, tmp_path):
    compiler, notes = watched_compiler(tmp_path, 0.2)
    processes = ranks(root, compiler, 3, "return no_such_name;")
    outputs = {process.communicate("go\n", timeout=120)[0] for process in processes}
    assert outputs == {"3 of 3 libraries could not be built\n"}
    assert notes.read_text().split().count("+") == 3


def test_ctrl_c_leaves_no_compiler(root, tmp_path, cache_dir):
    compiler, notes = watched_compiler(tmp_path, 60)
    (process,) = ranks(root, compiler, 1)
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while notes.read_text().count("+") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert time.monotonic() - begun < 15
    running = captured(["ps", "-eo", "args"], check=False).stdout
    assert str(compiler) not in running
    assert list(cache_dir.glob("op*/cpu")) == []


# The command -------------------------------------------------------------------------------------


def test_command(ops, monkeypatch, capsys):
    monkeypatch.setattr("op_builder.all_builders", lambda: ops)
    assert cli.main(["build", "--ops", "op0,op1", "op2", "--device", "cpu"]) == 0
    assert "3 built, 0 present, 0 skipped, 0 failed" in capsys.readouterr().out
    assert cli.main(["build", "--ops", "op0", "--json", "--jobs", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [library["state"] for library in answer["libraries"]] == ["present"]
    assert cli.main(["build", "--ops", "nothing"]) == 2
    assert cli.main(["build", "op9"]) == 2
    assert "there is no op 'op9'; did you mean 'op0'?" in capsys.readouterr().err
    assert cli.main(["build", "nothing"]) == 2
    assert "there is no op 'nothing'; there are: op0, op1" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert cli.main(["build", "--ops", "op3"]) == 1
    captured = capsys.readouterr()
    assert "op3  cpu     -      failed" in captured.out
    assert "op3 (cpu): no C++ compiler found" in captured.err
