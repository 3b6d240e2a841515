"""Trains a model of transformers in a loop of one's own under Accelerate, in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import accelerate
import torch
from small_model import Bytes, Report, build_model, measured, parser, recipe_of, text

from apex_te.integrations import autocast_forward, from_torch


def main(argv: Sequence[str] | None = None) -> Report:
    """Runs the program with a command line."""
    line = parser(__doc__, steps=60, lr=2e-3, name="accelerate")
    line.add_argument("--accumulate", type=int, default=1, help="batches of an optimizer step")
    args = line.parse_args(argv)
    recipe, gpu = recipe_of(args), args.device.startswith("cuda")
    accelerator = accelerate.Accelerator(
        cpu=not gpu,
        mixed_precision="bf16" if gpu else "no",
        gradient_accumulation_steps=args.accumulate,
    )
    accelerate.utils.set_seed(args.seed)
    model = build_model(args).train()
    if recipe is not None:
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
