"""Trains LoRA adapters of PEFT over a frozen model in FP8, and merges them into its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

try:
    import peft
except ImportError as error:
    raise SystemExit(
        f"lora.py needs {error.name}: pip install '.[huggingface]' in a checkout"
    ) from error

from small_model import Bytes, Report, build_model, measured, parser, recipe_of, text

from apex_te import fp8_autocast, from_torch, fuse_lora


def main(argv: Sequence[str] | None = None) -> Report:
    """Runs the program with a command line."""
    line = parser(__doc__, steps=60, lr=5e-3, name="lora")
    line.add_argument("--rank", type=int, default=16)
    line.add_argument("--dora", action="store_true", help="DoRA instead of LoRA")
    args = line.parse_args(argv)
    recipe = recipe_of(args)
    model = build_model(args).train().to(args.device)
    if recipe is not None:
        from_torch(model)
    config = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        use_dora=args.dora,
    )
    model = peft.get_peft_model(model, config)
    if recipe is not None and not args.dora:
        fuse_lora(model)  # the FP8 GEMMs of the frozen layers add the adapters
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    loader = torch.utils.data.DataLoader(
        Bytes(text(args.bytes), args.length), args.batch, shuffle=True, drop_last=True,
        generator=torch.Generator().manual_seed(args.seed),
    )  # fmt: skip

    def train() -> list[float]:
        losses: list[torch.Tensor] = []
        while len(losses) < args.steps:
            for batch in loader:
                batch = {key: value.to(args.device) for key, value in batch.items()}
                with (
                    torch.autocast("cuda", torch.bfloat16, enabled=args.device.startswith("cuda")),
                    fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe),
                ):
                    loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if len(losses) == args.steps:
                    break
        return torch.stack(losses).tolist()

    report = measured(args, train)
    batch = {key: value.to(args.device) for key, value in next(iter(loader)).items()}
    with torch.no_grad():
        before = model.eval()(**batch).logits
        merged = model.merge_and_unload()
        difference = (merged(**batch).logits - before).abs().max().item()
    print(f"merged: logits differ by at most {difference:.1e}")
    merged.save_pretrained(args.out / "model")
    return report


if __name__ == "__main__":
    main()
