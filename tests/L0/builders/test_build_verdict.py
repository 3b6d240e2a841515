"""``doctor``: one line that says whether apex_te runs here, and why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from op_builder.jit import cli
from op_builder.jit.inspect import facts as report
from op_builder.jit.inspect.report_command import verdict

H100 = {"name": "NVIDIA H100", "arch": "9.0", "memory": None}
A100 = {"name": "NVIDIA A100", "arch": "8.0", "memory": None}


def row(op, device, state, min_arch=None, reason=""):
    return {"op": op, "device": device, "state": state, "min_arch": min_arch, "reason": reason}


def facts(**changes):
    """A report of a machine with one H100 on which everything works."""
    return {
        "torch": {"version": "2.11.0", "cuda": "13.0", "hip": None},
        "gpus": {"devices": [H100], "driver": "580.1", "cuda": "13.0", "problem": ""},
        "archs": {"problem": ""},
        "caches": [],
        "settings": [],
        "libraries": [
            row("rope", "cpu", "cached"),
            row("rope", "cuda", "prebuilt", [8, 0]),
            row("dense_gemm", "cuda", "can build", [9, 0]),
            row("apex_te_jax", "cpu", "cannot", None, "jaxlib is missing"),
        ],
        **changes,
    }


def no_gpu(problem="no NVIDIA driver", driver=None):
    return {"devices": [], "driver": driver, "cuda": None, "problem": problem}


def test_ready():
    assert verdict(facts()).text == (
        "ready; libraries for the CPU: 1 compiled; libraries for 1 x NVIDIA H100: 1 compiled,"
        " 1 to compile on first use"
    )
    found = verdict(facts(gpus=no_gpu(), libraries=[row("rope", "cpu", "can build")]))
    assert found == (
        True,
        "ready on the CPU, without a GPU; libraries for the CPU: 1 to compile on first use",
        [],
    )


def test_an_op_for_newer_gpus_is_not_in_the_way():
    libraries = [
        row("rope", "cuda", "cached", [8, 0]),
        row("dense_gemm", "cuda", "cannot", [9, 0], "needs arch 9.0"),
    ]
    on_a100 = facts(libraries=libraries)
    on_a100["gpus"]["devices"] = [A100]
    assert verdict(on_a100).ready
    assert verdict(facts(libraries=libraries)).problems == ["dense_gemm (cuda): needs arch 9.0"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"torch": {"version": None, "cuda": None, "hip": None}}, "PyTorch is not installed"),
        ({"torch": {"version": "2.11", "cuda": None, "hip": None}}, "torch 2.11 is a CPU build"),
        (
            {"gpus": {"devices": [H100], "driver": "550.1", "cuda": "12.4", "problem": ""}},
            "torch 2.11.0 is for CUDA 13.0, and driver 550.1 runs CUDA 12.4 at most",
        ),
        ({"gpus": no_gpu("the driver answers NO", "550.1")}, "no GPU is usable: the driver answ"),
        ({"archs": {"problem": "unknown CUDA arch '9'"}}, "unknown CUDA arch '9'"),
        (
            {"settings": [{"name": "MAX_JOBS", "value": "0", "problem": "MAX_JOBS must be >= 1"}]},
            "MAX_JOBS must be >= 1",
        ),
        (
            {"caches": [{"from": "APEX_TE_CACHE_DIR", "path": "/c", "problem": "mode 0755"}]},
            "APEX_TE_CACHE_DIR=/c: mode 0755",
        ),
        (
            {
                "libraries": [
                    row(name, "cpu", "cannot", None, f"{name}: no C++ compiler found")
                    for name in ("rope", "swiglu", "rms_norm")
                ]
            },
            "rope (cpu) and 2 more: no C++ compiler found",
        ),
        ({"libraries": [row("frog", "-", "cannot", None, "broken")]}, "frog (-): broken"),
    ],
)
def test_not_ready(changes, text):
    found = verdict(facts(**changes))
    assert not found.ready
    assert found.text.startswith(f"not ready: {text}")
    assert found.problems[0].startswith(text)


def test_a_variable_that_nothing_reads_is_not_in_the_way():
    unread = {"name": "APEX_TE_CASH_DIR", "value": "/x", "problem": "nothing reads it"}
    assert verdict(facts(settings=[unread])).ready


def test_command(monkeypatch, capsys, cache_dir):
    answers: list[Callable[[], dict[str, Any]]] = [facts, lambda: facts(gpus=no_gpu("NO", "550"))]
    for status, answer in enumerate(answers):
        monkeypatch.setattr(report, "of_all_ops", answer)
        assert cli.main(["doctor"]) == status
        assert capsys.readouterr().out == f"{verdict(answer()).text}\n"
        assert cli.main(["doctor", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["ready"] is not bool(status)
    monkeypatch.setattr(
        report, "of_all_ops", lambda: facts(archs={"problem": "bad"}, gpus=no_gpu("NO", "550"))
    )
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out == "not ready: bad\nalso       no GPU is usable: NO\n"


def test_command_of_this_machine(capsys):
    status = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert out.startswith("not ready: " if status else "ready")
