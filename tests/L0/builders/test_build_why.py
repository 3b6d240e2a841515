"""``why`` and ``list``, and the command line itself."""

import json
import os
import re
import sys

import pytest
from planted import contents, plant, too_long
from programs import captured
from tiny_op import CHECKOUT, Tiny, TinyCuda, write_op

import op_builder
from op_builder.jit import cli
from op_builder.jit.backends import toolchain
from op_builder.jit.inspect import facts as report
from op_builder.jit.inspect import machine, why_command
from op_builder.jit.inspect.facts import ops_of

# why ----------------------------------------------------------------------------------------------


def explain(builder, device="cpu"):
    facts = why_command.explain(builder, device, report.here())
    text = "\n".join(why_command.lines(facts))
    return facts, re.sub(r"\n {11}", " ", text)


def test_why_names_what_the_key_is_made_of(root, gpus, cache_dir):
    facts, text = explain(Tiny(root))
    assert list(facts["sources"]) == [
        "csrc/common/value.h",
        "csrc/tiny/tiny.h",
        "csrc/tiny/tiny_cpu.cpp",
    ]
    assert "-ffp-contract=off" in facts["flags"]
    assert facts["key"] == Tiny(root).key("cpu")
    for part in (facts["key"], "csrc/common/value.h", "-ffp-contract=off", toolchain.cxx_version()):
        assert part in text
    assert f"2 prebuilt {root}/prebuilt: not there" in text
    assert f"3 user cache {cache_dir}: nothing of this op" in text
    assert f"next call  compiles, into {cache_dir}" in text
    assert contents(cache_dir) == []


def test_why_says_what_changed(root, gpus, forget):
    Tiny(root).open()
    assert explain(Tiny(root))[1].count("serves") == 1
    write_op(root, value=2)
    text = explain(Tiny(root))[1]
    assert "another key: changed csrc/common/value.h" in text
    assert "tiny.h," not in text
    assert re.search(r"next call  compiles, which took \d\.\d s last time, into", text)
    write_op(root, value=1)
    (root / "csrc/tiny/more.h").write_text("")
    source = root / "csrc/tiny/tiny_cpu.cpp"
    source.write_text('#include "more.h"\n' + source.read_text())
    assert "changed csrc/tiny/tiny_cpu.cpp; new csrc/tiny/more.h" in explain(Tiny(root))[1]

    class Flagged(Tiny):
        def cxx_args(self):
            return ["-DFLAG=1"]

    write_op(root, value=1)
    assert "another key: flags: now -DFLAG=1" in explain(Flagged(root))[1]


def test_why_names_archs_compilers_and_damage(root, gpus, cache_dir, monkeypatch):
    monkeypatch.setattr(report.library, "check", lambda *ignored: None)
    monkeypatch.setattr(report, "recent_failure", lambda *ignored: None)
    monkeypatch.setattr(report.library, "compiler_version", lambda *ignored: "nvcc now")
    builder = TinyCuda(root)
    entry = plant(cache_dir, builder, "cuda", "8.0", compiler="nvcc now")
    gpus((9, 0))
    text = explain(builder, "cuda")[1]
    assert "does not cover the GPU of arch 9.0" in text
    assert "next call  compiles for 9.0, which took 1.5 s last time" in text
    gpus((8, 6))
    text = explain(builder, "cuda")[1]
    assert f"next call  loads {entry}/tiny_cuda.so; no compiler runs" in text
    gpus()
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "8.0;9.0")
    assert "does not hold 9.0, which the arch list names" in explain(builder, "cuda")[1]
    monkeypatch.delenv("APEX_TE_CUDA_ARCH_LIST")
    other = plant(cache_dir, builder, "cuda", "9.0")
    text = explain(builder, "cuda")[1]
    assert "serves, though built by g++ of long ago and the compiler is nvcc now" in text
    (other / "tiny_cuda.so").write_bytes(b"short")
    assert "refused: " in explain(builder, "cuda")[1]
    os.chmod(other / "tiny_cuda.so", 0o666)
    assert "must not be writable by group or others" in explain(builder, "cuda")[1]
    os.chmod(cache_dir, 0o777)
    text = explain(builder, "cuda")[1]
    assert "not used: " in text
    assert "next call  raises an error: APEX_TE_CACHE_DIR=" in text


def test_why_command(capsys, gpus, cache_dir):
    assert cli.main(["why", "rms_norm", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rms_norm (cpu)\nkey ")
    assert "csrc/rms_norm/rms_norm_cpu.cpp" in out
    assert too_long(out.splitlines()) == []
    assert cli.main(["why", "rms_norm", "--device", "cuda", "--json"]) == 1
    (facts,) = json.loads(capsys.readouterr().out)
    assert "no GPU is visible" in facts["next"]["text"]
    assert cli.main(["why", "rms_norm"]) == 0  # without a GPU nobody asks for the CUDA library
    assert "(cuda)" not in capsys.readouterr().out
    assert cli.main(["why", "rms_nrom"]) == 2
    assert "there is no op 'rms_nrom'; did you mean 'rms_norm'?" in capsys.readouterr().err
    assert cli.main(["why"]) == 2
    assert "why: name an op" in capsys.readouterr().err
    assert cli.main(["why", "rope,swiglu", "--ops", "rope", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\w+) \(cpu\)$", out, re.MULTILINE) == ["rope", "swiglu"]
    assert cli.main(["why", "apex_te_core", "--device", "cuda"]) == 2
    assert contents(cache_dir) == []


# list and the command line ------------------------------------------------------------------------


def test_list(cache_dir, capsys):
    rope = op_builder.get_builder("rope")
    plant(cache_dir, rope, compiler=toolchain.cxx_version())
    plant(cache_dir, rope, key="0" * 64)
    plant(cache_dir, op_builder.get_builder("swiglu"))
    assert cli.main(["list", "rope", "--json"]) == 0
    folders = json.loads(capsys.readouterr().out)
    (user,) = [folder for folder in folders if folder["kind"] == "cache"]
    stale = {entry["key"][:4]: entry["stale"] for entry in user["entries"]}
    assert stale == {"0000": "other sources or flags", rope.key("cpu")[:4]: ""}
    assert cli.main(["list", "--ops", "rope,rms_norm", "--json"]) == 0
    assert {entry["op"] for entry in json.loads(capsys.readouterr().out)[-1]["entries"]} == {"rope"}
    assert cli.main(["list", "rpoe"]) == 2
    assert "there is no op 'rpoe'; did you mean 'rope'?" in capsys.readouterr().err
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert f"{cache_dir}: 3 entries" in out.replace("\n           ", " ")
    assert len(re.findall(r"^rope_cpu .* stale$", out, re.MULTILINE)) == 1
    assert len(re.findall(r"^swiglu_cpu .* stale$", out, re.MULTILINE)) == 1
    assert "built by g++ of long ago, the compiler now is" in out.replace("\n           ", " ")
    assert too_long(out.splitlines()) == []
    cache_dir.chmod(0o755)
    assert cli.main(["list"]) == 1


def test_command_line(monkeypatch, capsys):
    for arguments in (["report", "--nothing"], ["clean", "--all", "x", "--no"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
    capsys.readouterr()
    assert cli.main(["buidl"]) == 2
    assert "there is no command 'buidl'; did you mean 'build'?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "there is no command 'xyzzy'; there are: doctor, report," in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"apex_te {machine.suite_version()}\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out == told
    for command in ("doctor", "report", "why", "list", "clean", "build"):
        assert re.search(rf"^ +{command} ", out, re.MULTILINE)
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0


def test_build_command_is_reached(monkeypatch):
    from op_builder.jit.inspect import cache_commands

    asked = []
    monkeypatch.setattr(cache_commands, "run_build", lambda args: asked.append(ops_of(args)) or 7)
    assert cli.main(["build", "--ops", "rope"]) == 7
    assert cli.main(["build", "rope", "swiglu", "--ops", "rms_norm,rope"]) == 7
    assert asked == [["rope"], ["rope", "swiglu", "rms_norm"]]


def test_reader_that_stops_reading(cache_dir):
    script = (
        f"{sys.executable} -B -m op_builder.jit.cli report | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = captured(["bash", "-c", script], check=False, cwd=CHECKOUT)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("verdict ")
    assert done.stdout.splitlines()[1] == "0"


def test_front_imports_little():
    code = (
        "import sys, op_builder.jit.cli as cli\n"
        "print([n for n in ('torch', 'pybind11', 'setuptools') if n in sys.modules])"
    )
    done = captured([sys.executable, "-B", "-c", code], check=False, cwd=CHECKOUT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
