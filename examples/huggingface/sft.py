"""Fine-tunes a model of transformers with TRL's SFTTrainer in FP8, whole or by LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

try:
    import datasets
    import transformers
    import trl
except ImportError as error:
    raise SystemExit(
        f"sft.py needs {error.name}: pip install '.[huggingface]' in a checkout"
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

from apex_te import FP8Callback


def main(argv: Sequence[str] | None = None) -> Report:
    """Runs the program with a command line."""
    line = parser(__doc__, steps=40, lr=2e-3, name="sft")
    line.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters instead")
    args = line.parse_args(argv)
    recipe, rows = recipe_of(args), Bytes(text(args.bytes), args.length)

    def examples() -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {"input_ids": row["input_ids"].tolist()}

    adapters = None
    if args.lora:
        import peft

        adapters = peft.LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model=build_model(args),
        args=trl.SFTConfig(max_length=args.length, **trainer_options(args)),
        train_dataset=datasets.IterableDataset.from_generator(examples),
        processing_class=transformers.ByT5Tokenizer(extra_ids=0),
        peft_config=adapters,
        callbacks=[] if recipe is None else [FP8Callback(recipe)],
    )

    def train() -> list[float]:
        trainer.train()
        return list(logged_losses(trainer))

    report = measured(args, train)
    trainer.model.save_pretrained(args.out / "model")
    return report


if __name__ == "__main__":
    main()
