"""Removing compiled libraries: what goes, what stays, and that nothing else is touched."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from planted import contents, plant
from tiny_op import PRELUDE, Tiny, start, write_op

import op_builder
from op_builder.core import CoreBuilder
from op_builder.jit import cli
from op_builder.jit.backends import pythons, toolchain
from op_builder.jit.find import cache
from op_builder.jit.inspect import clean
from op_builder.jit.inspect import facts as stale

OLD = time.time() - 2 * clean.LEFTOVER_AGE


def place(folder):
    return cache.Location(str(folder), True, "cache")


def now(*builders):
    return stale.current(builders)


def summary(found):
    """What each thing that was found ended in: its reason, or "left: " and why."""
    return {
        str(
            Path(item.path).name if item.left else item.what
        ): f"{'left: ' * item.left}{item.reason}"
        for item in found
    }


# What goes and what stays -------------------------------------------------------------------------


def test_named_ops_go_with_all_their_entries(cache_dir, capsys):
    rope, swiglu = op_builder.get_builder("rope"), op_builder.get_builder("swiglu")
    doomed = [plant(cache_dir, rope), plant(cache_dir, rope, "cuda", "8.0", "9.0a")]
    doomed.append(plant(cache_dir, rope, key="0" * 64))
    (doomed[2].parent / "log-cpu.txt").write_text("log")
    size = sum(path.stat().st_size for entry in doomed for path in entry.iterdir())
    kept = plant(cache_dir, swiglu)
    assert cli.main(["clean", "rope", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert sum(item["bytes"] for item in items) == size
    assert not any(item["left"] for item in items)
    names = contents(cache_dir)
    assert [name for name in names if "rope" in name] == []
    assert kept.joinpath("manifest.json").exists()
    assert cli.main(["clean", "swiglu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("removed    swiglu_cpu, ")
    assert "in all     1 removed, " in out
    assert contents(cache_dir) == ["locks", "tmp"]


def test_stale_entries_go_and_current_ones_stay(root, cache_dir):
    builder = Tiny(root)
    current = plant(cache_dir, builder, compiler=toolchain.cxx_version())
    other_key = plant(cache_dir, builder, key="a" * 64, compiler=toolchain.cxx_version())
    damaged = plant(cache_dir, builder, key="b" * 64)
    (damaged / "tiny_cpu.so").write_bytes(b"")
    strange = plant(cache_dir, builder, key="c" * 64)
    (strange / "manifest.json").write_text("{")
    machine = plant(cache_dir, builder, key="d" * 64, machine="another")
    unknown = cache_dir / f"somebodys_cpu-{'e' * 24}" / "cpu"
    shutil.copytree(current, unknown)
    (unknown / "tiny_cpu.so").rename(unknown / "somebodys_cpu.so")
    manifest = json.loads((unknown / "manifest.json").read_text())
    (unknown / "manifest.json").write_text(json.dumps({**manifest, "key": "e" * 64}))
    failed = cache_dir / f"tiny_cpu-{'f' * 24}"
    failed.mkdir(mode=0o700)
    (failed / "log-cpu.txt").write_text("log")
    (failed / "failure-cpu.json").write_text("{}")
    clean.remove_stale(place(cache_dir), now(builder), dry=True)
    before = contents(cache_dir)
    found = clean.remove_stale(place(cache_dir), now(builder), dry=True)
    assert contents(cache_dir) == before
    assert clean.remove_stale(place(cache_dir), now(builder)) == found
    kept = {entry.parent.name for entry in (current, machine, unknown)}
    assert {path.name for path in cache_dir.iterdir()} == {*kept, "locks", "tmp"}
    assert sorted(item.reason.split(" (")[0].partition(":")[0] for item in found) == sorted(
        ["it is damaged", "other sources or flags", "other sources or flags"]
        + [
            item.reason.split(" (")[0].partition(":")[0]
            for item in found
            if "tiny_cpu.so" in item.reason
        ]
    )
    for gone in (other_key, damaged, strange, failed):
        assert not gone.exists()


def test_another_compiler_is_stale_and_no_compiler_is_not(root, cache_dir, tmp_path, monkeypatch):
    builder = Tiny(root)
    entry = plant(cache_dir, builder)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert clean.remove_stale(place(cache_dir), now(builder)) == []
    monkeypatch.delenv("CXX")
    (item,) = clean.remove_stale(place(cache_dir), now(builder))
    version = toolchain.cxx_version()
    assert item.reason == f"built by g++ of long ago, the compiler now is {version}"
    assert not entry.exists()


def test_one_arch_of_a_key_may_go_alone(cache_dir):
    rope = op_builder.get_builder("rope")
    good = plant(cache_dir, rope, "cuda", "8.0")
    bad = plant(cache_dir, rope, "cuda", "9.0")
    (bad / "rope_cuda.so").write_bytes(b"")
    compilers = {"rope_cuda": "g++ of long ago"}
    current = stale.Current({"rope_cuda": {rope.key("cuda")[:24]}}, compilers, "")
    assert len(clean.remove_stale(place(cache_dir), current)) == 1
    assert good.exists()
    assert not bad.exists()


def test_dispatchers_of_other_pythons_stay(root, cache_dir):
    other = pythons.Python("3.29", pythons.suffix_for("3.29"), "")
    mine = CoreBuilder()
    entry = plant(cache_dir, CoreBuilder(python=other), compiler=mine.compiler_version("cpu", ()))
    gone = plant(cache_dir, mine, key="0" * 64)
    clean.remove_stale(place(cache_dir), now(mine))
    assert entry.exists()
    assert not gone.exists()


def test_leftovers_of_dead_builders(root, cache_dir):
    Tiny(root).open()
    tmp, name = cache_dir / "tmp", f"tiny_cpu-{'0' * 24}"
    for folder, moment in (
        (f"{name}.old", OLD),
        (f"{name}.young", time.time()),
        (f"{name}.x", OLD),
    ):
        (tmp / folder).mkdir()
        (tmp / folder / "part.o").write_bytes(b"x" * 1000)
        os.utime(tmp / folder, (moment, moment))
    (tmp / "notes").mkdir()
    (cache_dir / "locks" / f"tiny_cpu-{'1' * 24}").write_text("")
    found = clean.remove_stale(place(cache_dir), now(Tiny(root)))
    assert sum(item.bytes for item in found) == 2000
    assert {path.name for path in tmp.iterdir()} == {f"{name}.young", "notes"}
    assert not (cache_dir / "locks" / f"tiny_cpu-{'1' * 24}").exists()
    found = clean.remove_all(place(cache_dir))
    assert [path.name for path in tmp.iterdir()] == ["notes"]
    assert summary(found)["notes"] == "left: it is no build folder of ours"


def test_all(cache_dir, root):
    Tiny(root).open()
    write_op(root, value=2)
    (cache_dir / "gemm").mkdir()
    for name in ("NVIDIA_H200-cublaslt130100.json", "NVIDIA_H200-cublaslt130100.json.lock"):
        (cache_dir / "gemm" / name).write_text("{}")
    found = clean.remove_all(place(cache_dir))
    assert contents(cache_dir) == ["locks", "tmp"]
    assert sum(item.bytes for item in found) > 1000
    assert clean.remove_all(place(cache_dir)) == []


# What is being built or used ----------------------------------------------------------------------


def test_entry_that_is_being_built_stays(root, cache_dir, capsys):
    entry = Path(Tiny(root).open().path).parent
    name = entry.parent.name
    (cache_dir / "tmp" / f"{name}.building").mkdir()
    os.utime(cache_dir / "tmp" / f"{name}.building", (OLD, OLD))
    code = f"""
        from op_builder.jit.build import lock
        with lock.held({str(cache_dir / "locks" / name)!r}, "tiny (cpu)", 1):
            print("held", flush=True)
            sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    for arguments in (["tiny"], ["--all"], ["--all", "--dry-run"]):
        assert cli.main(["clean", *arguments]) == 1
        out = capsys.readouterr().out.replace("\n           ", " ")
        assert f"it is being built: pid {holder.pid} on host" in out
        assert "building tiny (cpu)" in out
        assert entry.exists()
        assert (cache_dir / "tmp" / f"{name}.building").exists()
    holder.communicate("")
    assert cli.main(["clean", "--all"]) == 0
    assert contents(cache_dir) == ["locks", "tmp"]


@pytest.mark.long
def test_cleaning_while_processes_build_and_load(root, tmp_path, cache_dir):
    code = f"""
        import ctypes
        from op_builder.jit.build import service
        for round in range(6):
            service._opened.clear()
            print(ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny())
    """
    processes = [start(code) for _ in range(3)]
    cleaned = 0
    while any(process.poll() is None for process in processes):
        cleaned += sum(not item.left for item in clean.remove_all(place(cache_dir)))
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert out == "1\n" * 6, err
    assert cleaned >= 1


def test_loaded_library_outlives_its_entry(root, cache_dir):
    library = ctypes.CDLL(Tiny(root).open().proc_path)
    clean.remove_all(place(cache_dir))
    assert library.tiny() == 1


def test_killed_clean_leaves_nothing_half(root, cache_dir, monkeypatch, forget):
    Tiny(root).open()

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clean.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            clean.remove_all(place(cache_dir))
    assert list(cache_dir.glob("tiny_cpu-*")) == []  # gone with one rename
    assert len(list((cache_dir / "tmp").iterdir())) == 1
    forget()
    Tiny(root).open()  # a build clears what the killed one left
    assert list((cache_dir / "tmp").iterdir()) == []


# What is not ours ---------------------------------------------------------------------------------


def test_strangers_stay(root, cache_dir, tmp_path):
    Tiny(root).open()
    (key,) = cache_dir.glob("tiny_cpu-*")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    (cache_dir / f"tiny_cpu-{'0' * 24}").symlink_to(outside)
    (cache_dir / "notes.txt").write_text("")
    (cache_dir / "results").mkdir()
    (cache_dir / f"half-{'0' * 23}").mkdir()
    (key / "cpu" / "profile.txt").write_text("")
    nested = plant(cache_dir, Tiny(root), key="1" * 64)
    (nested / "tiny_cpu.so").unlink()
    (nested / "tiny_cpu.so").mkdir()
    before = {name for name in contents(cache_dir) if not name.startswith("locks")}
    found = clean.remove_all(place(cache_dir))
    assert {name for name in contents(cache_dir) if not name.startswith("locks")} == before
    assert all(item.left for item in found)
    told = summary(found)
    assert told["notes.txt"] == told["results"] == "left: it is not ours"
    assert told[key.name] == "left: cpu/profile.txt in it is not ours"
    assert told[nested.parent.name] == "left: cpu/tiny_cpu.so in it is not ours"
    assert told[f"tiny_cpu-{'0' * 24}"] == "left: it is no folder of ours"
    assert (outside / "precious").exists()
    (key / "cpu" / "profile.txt").unlink()
    (key / "link").symlink_to(outside)
    clean.remove_ops(place(cache_dir), ["tiny"])
    assert key.exists()
    assert (outside / "precious").exists()


def test_unsafe_cache_is_not_cleaned(root, cache_dir, capsys):
    Tiny(root).open()
    before = contents(cache_dir)
    cache_dir.chmod(0o770)
    assert cli.main(["clean", "--all"]) == 1
    assert "must not be writable by group or others" in capsys.readouterr().err
    cache_dir.chmod(0o700)
    real = cache_dir.rename(cache_dir.with_name("real"))
    cache_dir.symlink_to(real)
    assert cli.main(["clean", "--all"]) == 1
    assert "must be a real folder" in capsys.readouterr().err
    assert contents(real) == before


def test_package_and_extra_caches_are_not_touched(root, cache_dir, tmp_path, monkeypatch):
    extra = tmp_path / "extra"
    plant(extra, Tiny(root))
    before = contents(extra)
    monkeypatch.setenv("APEX_TE_CACHE_PATH", str(extra))
    assert cli.main(["clean", "--all"]) == 0
    assert contents(extra) == before


def test_session_folder_is_cleaned_too(root, cache_dir, tmp_path, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    (runtime / "apex_te").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    entry = plant(runtime / "apex_te", Tiny(root))
    assert cli.main(["clean", "tiny"]) == 0
    assert not entry.exists()


def test_requests_that_are_none(cache_dir, capsys):
    plant(cache_dir, op_builder.get_builder("rope"))
    before = contents(cache_dir)
    for arguments in ([], ["--all", "--stale"], ["rope", "--all"]):
        assert cli.main(["clean", *arguments]) == 2
        assert "name ops, or one of --all and --stale" in capsys.readouterr().err
    assert cli.main(["clean", "rpoe"]) == 2
    assert "there is no op 'rpoe'; did you mean 'rope'?" in capsys.readouterr().err
    assert contents(cache_dir) == before


def test_no_cache_at_all(cache_dir, monkeypatch, capsys):
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(cache_dir / "nowhere"))
    assert cli.main(["clean", "--all"]) == 0
    assert "0 removed, 0 B: no cache folder exists" in capsys.readouterr().out
    assert contents(cache_dir) == []
