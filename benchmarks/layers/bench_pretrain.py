"""A whole training step of a Llama-style decoder: examples/pretrain, one process a stack.

Forward, backward, clipping and optimizer, on text. Each stack trains the same shape on the same
tokens: PyTorch and torchao compiled, apex_te eager. A row has the median milliseconds of the steps
after the first five, tokens a second, the share of the GPU's dense bf16 peak (MFU), peak memory,
and joules of a step. Stacks run one after the other, each after the same pause of imports and
compilation. ``of bf16`` is the speed over apex_te's bf16, ``of torch`` over compiled PyTorch.

    python benchmarks/layers/bench_pretrain.py --tokens build/pretrain/tokens/<key>
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import harness

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "examples/pretrain/train.py"
STACKS = {
    "apex_te bf16": ["--recipe", "bf16"],
    "apex_te delayed": ["--recipe", "delayed"],
    "apex_te delayed, FP8 head": ["--recipe", "delayed", "--fp8-head"],
    "apex_te tensorwise": ["--recipe", "tensorwise"],
    "apex_te blockwise": ["--recipe", "blockwise"],
    "apex_te blockwise, FP8 head": ["--recipe", "blockwise", "--fp8-head"],
    "torch bf16 compiled": ["--layers", "torch", "--compile"],
    "torchao tensorwise compiled": ["--layers", "torchao", "--recipe", "tensorwise", "--compile"],
}


def run(options: argparse.Namespace, own: list[str], folder: str) -> dict[str, Any]:
    """Returns the figures that train.py prints at its end; ``own`` are options of the stack."""
    command = [
        sys.executable, str(ROOT / TRAIN), *shared(options), *own,
        "--out", folder, "--eval-tokens", "0", "--sample", "0", "--health-every", "0",
        "--log-every", "5", "--no-tensorboard",
    ]  # fmt: skip
    if options.tokens is not None:
        command += ["--tokens", str(options.tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"bench_pretrain: {' '.join(own)}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def shared(options: argparse.Namespace) -> list[str]:
    names = ("model", "context", "batch", "steps")
    return [word for name in names for word in (f"--{name}", str(getattr(options, name)))]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="1.3b", help="a shape of examples/pretrain")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--stacks", nargs="+", choices=[*STACKS], default=[*STACKS])
    parser.add_argument("--tokens", type=Path, metavar="DIR", help="written by prepare.py")
    parser.add_argument("--name", default="pretrain_1.3b_h100", help="of the results file")
    options = parser.parse_args()
    rows = []
    for stack in options.stacks:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(options, STACKS[stack], folder)
        row = {"stack": stack, "tokens/s": round(figures["tokens_per_s"]), "ms": figures["ms"]}
        row |= {"MFU": figures.get("mfu"), "peak GiB": figures.get("peak_gib")}
        row["J"] = figures.get("joules_per_token", 0) * options.batch * options.context
        rows.append(row)
        print(row, flush=True)
    speed = {row["stack"]: row["tokens/s"] for row in rows}
    for row in rows:
        for name, base in (("of bf16", "apex_te bf16"), ("of torch", "torch bf16 compiled")):
            if base in speed:
                row[name] = row["tokens/s"] / speed[base]
    about = {name: getattr(options, name) for name in ("model", "context", "batch", "steps")}
    if any("torchao" in stack for stack in options.stacks):
        about["torchao"] = importlib.metadata.version("torchao")
    harness.report(options.name, rows, **about, command=" ".join([TRAIN, *shared(options)]))


if __name__ == "__main__":
    main()
