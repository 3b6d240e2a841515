"""Loss of a language model's head, forward + backward: 8192 x 4096 hidden states, 128256 words.

Contenders take turns, cold L2: torch's product and its cross entropy, the product and
``apex_te.ops.cross_entropy`` in place of the logits, ``linear_cross_entropy`` with several sizes of
chunks and in FP8, and Liger's where it is installed. Memory: the peak of one call above what is
allocated before, less the gradients of hidden states and weight, which all contenders return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import harness
import torch
from torch.nn import functional as F

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
    linear = apex_te.linear_cross_entropy
    for rows in (None, 1024, 2048):
        name = f"linear_cross_entropy, {rows or 'default'} rows"
        found[name] = functools.partial(linear, chunk_rows=rows)
    tensorwise = functools.partial(linear, fp8_recipe=recipe.CurrentScaling())
    found["linear_cross_entropy, tensorwise"] = tensorwise
    wide = functools.partial(linear, weight_grad_dtype=torch.float32)
    found["linear_cross_entropy, fp32 sums"] = wide
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        print("Liger is not measured: it is not installed")
    else:
        found["Liger"] = lambda x, w, t: liger_fused_linear_cross_entropy(x, w, t)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
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
    found: list[harness.Row] = []
    steps = {name: step(loss) for name, loss in contenders.items()}
    for name, call in steps.items():
        grads, _, peak = harness.memory(call)
        peak -= sum(g.nbytes for g in grads)
        exact = exact or grads
        error = max(harness.distances(grads, exact))
        found.append({"stack": name, "peak GiB": peak / 2**30, "from torch's": error})
        del grads
    times = harness.paired_ms(steps, repeats=9)
    for row in found:
        row |= {"ms": times[row["stack"]], "over torch": times[row["stack"]] / times["torch"]}
    harness.report("linear_cross_entropy", found, sizes=[rows, hidden, words])


if __name__ == "__main__":
    main()
