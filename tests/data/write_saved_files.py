"""Writes files as users save them: modules, state dicts, checkpoints, FP8 parameters, recipes.

    python tests/data/write_saved_files.py FOLDER

``tests/data/saved_0`` was written by it before files of ``apex_te`` moved; later versions have to
load what is in there (``tests/L0/module/test_saved_files.py``). Needs no GPU; values are seeded.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

import apex_te
from apex_te import recipe as recipes

HIDDEN = 32
RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4, first_step="current"),
    "tensorwise": recipes.CurrentScaling(),
    "blockwise": recipes.BlockScaling(),
    "mxfp8": recipes.MXFP8Scaling(),
    "hif8": recipes.CurrentScaling(fp8_format=recipes.Format.HIF8),
}


def modules() -> dict[str, torch.nn.Module]:
    """One module of every class, in float32 on the CPU."""
    torch.manual_seed(0)
    return {
        "linear": apex_te.Linear(HIDDEN, HIDDEN),
        "split_linear": apex_te.Linear(HIDDEN, 48, parameters_split={"a": 16, "b": 32}),
        "layer_norm": apex_te.LayerNorm(HIDDEN),
        "rms_norm": apex_te.RMSNorm(HIDDEN),
        "layer_norm_linear": apex_te.LayerNormLinear(HIDDEN, HIDDEN),
        "layer_norm_mlp": apex_te.LayerNormMLP(HIDDEN, 64, activation="swiglu"),
        "grouped_linear": apex_te.GroupedLinear(2, HIDDEN, HIDDEN),
        "multihead_attention": apex_te.MultiheadAttention(HIDDEN, 2),
        "transformer_layer": apex_te.TransformerLayer(HIDDEN, 64, 2),
    }


def run(name: str, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One forward of a module on ``x`` [rows, 1, HIDDEN]."""
    if name == "grouped_linear":
        return module(x.flatten(0, 1), [x.shape[0] // 2] * 2)
    return module(x)


def train(models: dict[str, torch.nn.Module], steps: int) -> list[torch.optim.Optimizer]:
    """Some FP8 steps of every module with delayed scaling; returns their optimizers."""
    optimizers = []
    for name, module in models.items():
        optimizer = apex_te.optimizers.FusedAdam(module.parameters(), lr=1e-3)
        optimizers.append(optimizer)
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(16, 1, HIDDEN)
            with apex_te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
                out = run(name, module, x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


def write(folder: Path) -> None:
    """Write every kind of file into a new ``folder``."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True)
    models = modules()
    optimizers = train(models, 3)
    everything = torch.nn.ModuleDict(models)
    torch.save(models, folder / "modules.pt")
    torch.save(everything.state_dict(), folder / "state_dict.pt")
    torch.save([o.state_dict() for o in optimizers], folder / "optimizers.pt")
    with (folder / "optimizer.pkl").open("wb") as file:
        pickle.dump(optimizers[0], file)
    dcp.save(everything.state_dict(), checkpoint_id=folder / "dcp")
    with (folder / "recipes.pkl").open("wb") as file:
        pickle.dump(RECIPES, file)
    held = {}
    for name, recipe in RECIPES.items():
        with apex_te.fp8_model_init(recipe=recipe):
            torch.manual_seed(1)
            held[name] = apex_te.Linear(HIDDEN, 128, bias=False).weight
    torch.save(held, folder / "fp8_parameters.pt")
    torch.save(
        {name: (p.dequantize(torch.float32), p._held.rowwise.view(torch.uint8).clone())
         for name, p in held.items()},
        folder / "fp8_values.pt",
    )  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]))
