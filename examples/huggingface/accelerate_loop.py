"""Trains a model of transformers in a loop of one's own under Accelerate, in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from small_model import HISTORY, Bytes, Report, build_model, measured, parser, recipe_of, text

from apex_te import autocast_forward, from_torch
from apex_te.integrations import transformer_engine


def switched() -> dict[str, Any]:
    """Returns arguments of ``Accelerator`` that turn on its own FP8, with apex_te below.

    Accelerate looks for ``transformer_engine``, so that its alias comes first. It converts the
    model itself, output head included.
    """
    transformer_engine.install()
    from accelerate.utils import TERecipeKwargs

    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=HISTORY, amax_compute_algo="max")
    return {"mixed_precision": "fp8", "kwargs_handlers": [recipe]}


def main(argv: Sequence[str] | None = None) -> Report:
    """Runs the program with a command line."""
    line = parser(__doc__, steps=60, lr=2e-3, name="accelerate")
    line.add_argument("--accumulate", type=int, default=1, help="batches of an optimizer step")
    line.add_argument("--switch", action="store_true", help='use mixed_precision="fp8" instead')
    args = line.parse_args(argv)
    if args.switch and (args.no_fp8 or args.recipe != "delayed"):
        line.error("--switch goes with --recipe delayed only")
    recipe, gpu = recipe_of(args), args.device.startswith("cuda")
    precision: dict[str, Any] = {"mixed_precision": "bf16" if gpu else "no"}
    if args.switch:
        precision = switched()
    import accelerate  # behind the alias, for which it may look once

    accelerator = accelerate.Accelerator(
        cpu=not gpu, gradient_accumulation_steps=args.accumulate, **precision
    )
    accelerate.utils.set_seed(args.seed)
    model = build_model(args).train()
    if recipe is not None and not args.switch:
        autocast_forward(from_torch(model), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = torch.utils.data.DataLoader(
        Bytes(text(args.bytes), args.length), args.batch, shuffle=True, drop_last=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train() -> list[float]:
        losses: list[torch.Tensor] = []
        while len(losses) < args.steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                if len(losses) == args.steps:
                    break
        return torch.stack(losses).tolist()

    report = measured(args, train)
    accelerator.unwrap_model(model).save_pretrained(
        args.out / "model", is_main_process=accelerator.is_main_process
    )
    return report


if __name__ == "__main__":
    main()
