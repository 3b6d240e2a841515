"""Trains a model of transformers with its Trainer in FP8, by FP8Callback, and exports it."""

from __future__ import annotations

from collections.abc import Sequence

try:
    import transformers
except ImportError as error:
    raise SystemExit(
        f"trainer.py needs {error.name}: pip install '.[huggingface]' in a checkout"
    ) from error

from small_model import (
    Bytes,
    Report,
    build_model,
    logged_losses,
    measured,
    parser,
    recipe_of,
    text,
    trainer_options,
)

from apex_te import FP8Callback, export_fp8


def main(argv: Sequence[str] | None = None) -> Report:
    """Runs the program with a command line."""
    line = parser(__doc__, steps=60, lr=2e-3, name="trainer")
    line.add_argument("--fuse", action="store_true", help="join norms and projections")
    line.add_argument("--checkpoints", type=int, metavar="STEPS", help="steps between checkpoints")
    line.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    line.add_argument("--export", action="store_true", help="write an FP8 checkpoint for servers")
    args = line.parse_args(argv)
    recipe, options = recipe_of(args), trainer_options(args)
    if args.checkpoints:
        options |= {"save_strategy": "steps", "save_steps": args.checkpoints}
    trainer = transformers.Trainer(
        build_model(args),
        transformers.TrainingArguments(**options),
        train_dataset=Bytes(text(args.bytes), args.length),
        callbacks=[] if recipe is None else [FP8Callback(recipe, fuse=args.fuse)],
    )

    def train() -> list[float]:
        trainer.train(resume_from_checkpoint=args.resume or None)
        return list(logged_losses(trainer))

    report = measured(args, train)
    trainer.model.save_pretrained(args.out / "model")
    if args.export and recipe is not None:
        export_fp8(trainer.model, args.out / "fp8", weights="tensor")
    return report


if __name__ == "__main__":
    main()
