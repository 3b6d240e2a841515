"""Accelerate and Trainer on several ranks, which find the alias by its files: CPU and GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pins import ROOT, pin
from programs import captured
from tiny import check_losses

pytest.importorskip("accelerate", minversion=pin("accelerate"))
pytest.importorskip("transformers", minversion=pin("transformers"))

KINDS = [
    "cpu 1",
    "cpu 2",
    pytest.param("cuda 2", marks=pytest.mark.cuda),
]


@pytest.fixture(scope="module", params=KINDS)
def losses(request, tmp_path_factory):
    """Losses of each training, by a launch of torchrun."""
    device, size = request.param.split()
    if device == "cuda" and torch.cuda.device_count() < int(size):
        pytest.skip(f"needs {size} GPUs, got {torch.cuda.device_count()}")
    return launched(device, size, tmp_path_factory.mktemp("alias"))


def launched(device, size, folder):
    """Runs train_ranks.py with the alias as files in a folder; returns what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_TE_T")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=path.rstrip(os.pathsep))
    if device == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"
    write = [sys.executable, "-m", "apex_te", "install-alias", "--prefix", str(folder)]
    subprocess.run(write, env=environment, check=True)
    site = next(folder.rglob("transformer_engine")).parent
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}"]
    command += ["--standalone", str(Path(__file__).with_name("train_ranks.py")), device]
    done = captured(command, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("losses"))
    return json.loads(line.removeprefix("losses"))


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_fp8_learns_as_without_it(losses, framework):
    check_losses(losses[f"{framework}, fp8"], losses[f"{framework}, plain"])
