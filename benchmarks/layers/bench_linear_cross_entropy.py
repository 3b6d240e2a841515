"""Loss of a language model's head, forward + backward: 8192 x 4096 hidden states, 128256 words.

Contenders take turns, cold L2: torch's product and its cross entropy, the product and
``apex_te.ops.cross_entropy`` in place of the logits, ``linear_cross_entropy`` with several sizes of
chunks and in FP8, and Liger's where it is installed. Memory: the peak of one call above what is
allocated before, less the gradients of hidden states and weight, which all contenders return.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te
from apex_te import recipe
from apex_te.ops.cross_entropy import cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def losses() -> dict[str, Loss]:
    """Returns the contenders' losses of hidden states, weight and target."""
    found: dict[str, Loss] = {
        "torch": lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        "product + op": lambda x, w, t: cross_entropy(F.linear(x, w), t, overwrite_logits=True),
    }
    for rows in (None, 1024, 2048):

        def ours(
            x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, rows: int | None = rows
        ) -> torch.Tensor:
            return apex_te.linear_cross_entropy(x, w, t, chunk_rows=rows)

        found[f"linear_cross_entropy, {rows or 'default'} rows"] = ours
    for name, chosen in (("tensorwise", recipe.CurrentScaling()), ("fp32 sums", None)):

        def other(
            x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, chosen: Any = chosen
        ) -> torch.Tensor:
            dtype = torch.float32 if chosen is None else None
            return apex_te.linear_cross_entropy(x, w, t, fp8_recipe=chosen, weight_grad_dtype=dtype)

        found[f"linear_cross_entropy, {name}"] = other
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        print("Liger is not measured: it is not installed")
    else:
        found["Liger"] = lambda x, w, t: liger_fused_linear_cross_entropy(x, w, t)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=3, default=(8192, 4096, 128256))
    rows, hidden, words = parser.parse_args().sizes
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(words, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    w.requires_grad_()
    target = torch.randint(0, words, (rows,), device="cuda")
    contenders = losses()

    def step(loss: Loss) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(x, w, target), (x, w))

    exact = None
    found = []
    for name, loss in contenders.items():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = step(loss)()
        kept = sum(g.numel() * g.element_size() for g in grads)
        peak = torch.cuda.max_memory_allocated() - before - kept
        exact = exact or grads
        error = max(
            float((g.float() - e.float()).norm() / e.float().norm())
            for g, e in zip(grads, exact, strict=True)
        )
        found.append({"stack": name, "peak GiB": peak / 2**30, "from torch's": error})
        del grads
    times = harness.paired_us([step(loss) for loss in contenders.values()], repeats=9)
    for row, taken in zip(found, times, strict=True):
        row["ms"] = taken["us"] / 1e3
        row["over torch"] = row["ms"] / (times[0]["us"] / 1e3)
    harness.report("linear_cross_entropy", found, sizes=[rows, hidden, words])


if __name__ == "__main__":
    main()
