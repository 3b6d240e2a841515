#!/usr/bin/env python3
"""Classifies scikit-learn's bundled handwritten digits, 1,797 images of 8 x 8 pixels.

    python examples/digits/digits.py --use-te --use-fp8
    python examples/digits/digits.py --use-fp8 --fp8-recipe delayed

The model is a perceptron of three linear layers and two norms. Without switches only the baseline
is trained: plain PyTorch, fp32 on a CPU, bf16 on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

sys.path.pop(0)  # where the folder jax would pass for the package

from apex_te import from_torch

PIXELS, CLASSES = 64, 10
HELD_OUT = 360


class Digits:
    """The data, split once by a fixed permutation, and the classifier."""

    measure = "held-out accuracy"

    def __init__(self, args: argparse.Namespace) -> None:
        images, labels = load()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order].to(args.device), labels[order].to(args.device)
        self.held_out = images[:HELD_OUT], labels[:HELD_OUT]
        self.images, self.labels = images[HELD_OUT:], labels[HELD_OUT:]
        self.batch_size, self.width = args.batch, args.width

    def model(self, te: bool) -> nn.Module:
        """Returns a classifier with the same weights either way: apex_te's is made of PyTorch's."""
        width = self.width
        model = nn.Sequential(
            nn.Linear(PIXELS, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, CLASSES),
        )  # fmt: skip
        return from_torch(model) if te else model

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Random images, [batch, 64] in 0 to 1, with their labels."""
        index = torch.randint(len(self.images), (self.batch_size,), generator=generator)
        index = index.to(self.images.device)
        return self.images[index], self.labels[index]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the held-out images that are classified correctly."""
        images, labels = self.held_out
        return (model(images).argmax(-1) == labels).float().mean().item()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, fp32 [1797, 64] in 0 to 1, and labels, int64 [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("digits needs scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)


def main(argv: Sequence[str] | None = None) -> list[common.Result]:
    """Runs the example and returns one result per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_arguments(parser, steps=400, lr=2e-3, name="digits")
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=256, help="features of the hidden layers")
    args = common.parse(parser, argv)
    return common.compare(Digits(args), args)


if __name__ == "__main__":
    main()
