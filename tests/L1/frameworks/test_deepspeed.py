"""DeepSpeed over layers of Transformer Engine: ZeRO 0 to 3 compute the same, in files too."""

import json
import os
import sys

import pytest
from pins import ROOT, pin
from programs import captured
from tiny import STEPS, TOLERANCE

pytest.importorskip("deepspeed", minversion=pin("deepspeed"))

# DeepSpeed's own test, with a second kind of layer, two ranks, a run without FP8, and checkpoints.
PROGRAM = """
import json, sys
import deepspeed
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

folder, kind, dtype, steps = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3]), int(sys.argv[4])
deepspeed.init_distributed("gloo")
size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()


def made(stage):
    torch.manual_seed(42)
    if kind == "Linear":
        model = te.Linear(64, 64, bias=True, params_dtype=dtype)
    else:
        model = te.LayerNormMLP(64, 128, params_dtype=dtype)
    config = {
        "train_batch_size": 16 * size, "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": dtype is torch.bfloat16},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, first, last, fp8=True):
    chosen = recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
    )
    data = torch.randn(steps, size, 16, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    losses = []
    for x in data[first:last, rank]:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=chosen):
            y = engine(x)
        loss = (y.float() - x.float().roll(1, -1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


result = {"plain": train(made(0), 0, steps, fp8=False)}
for stage in range(4):
    engine = made(stage)
    losses = train(engine, 0, steps // 2)
    engine.save_checkpoint(folder, tag=f"stage{stage}")
    losses += train(engine, steps // 2, steps)
    result[stage] = losses
    if stage < 3:
        again = made(stage)
        again.load_checkpoint(folder, tag=f"stage{stage}")
        result[f"resumed {stage}"] = train(again, steps // 2, steps)
if rank == 0:
    print("losses", json.dumps(result), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        ("Linear", "float32", 1), ("Linear", "bfloat16", 1), ("LayerNormMLP", "float32", 1),
        ("Linear", "float32", 2), ("LayerNormMLP", "float32", 2),
    ],
)  # fmt: skip
def test_all_stages_of_zero_compute_the_same(kind, dtype, size, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(f"import apex_te  # installs the alias\n{PROGRAM}")
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = path
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={size}"]
    command += ["--standalone", str(program), str(tmp_path), kind, dtype, str(STEPS)]
    done = captured(command, timeout=600, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("losses"))
    losses = json.loads(line.removeprefix("losses"))
    plain = losses["plain"]
    assert plain[-1] < 0.9 * plain[0], "the plain model did not learn"
    assert losses["0"] != plain, "no product ran in FP8"
    for stage in range(4):
        assert losses[str(stage)] == pytest.approx(
            losses["0"], rel=1e-5 if dtype == "float32" else 0.01
        )
    assert sum(losses["0"][-5:]) == pytest.approx(sum(plain[-5:]), rel=TOLERANCE)
    for stage in range(3):
        assert losses[f"resumed {stage}"] == losses[str(stage)][STEPS // 2 :]
