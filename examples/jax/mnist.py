#!/usr/bin/env python3
"""Classifies images of handwritten digits by two convolutions and FP8 dense layers.

    python examples/jax/mnist.py
    python examples/jax/mnist.py --use-fp8 --fp8-recipe blockwise

The images are scikit-learn's 1,797 bundled ones of 8 x 8 pixels, enlarged to MNIST's 28 x 28.
``--data`` takes others: an .npz file with ``images``, [n, 28, 28] in 0 to 1, and ``labels``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import training

import apex_te.jax.flax as te_flax

SIDE, CLASSES = 28, 10
HELD_OUT_SHARE = 5  # one image of so many


class Classifier(nn.Module):
    """Two 3 x 3 convolutions, two FP8 dense layers and one of Flax."""

    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, disable_dropout: bool = False) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 28, 28, 1]."""
        x = nn.Conv(32, (3, 3), dtype=self.dtype)(images)
        x = nn.relu(x)
        x = nn.Conv(64, (3, 3), dtype=self.dtype)(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dropout(0.25)(x, deterministic=disable_dropout)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(te_flax.DenseGeneral(128)(x))
        x = nn.Dropout(0.5)(x, deterministic=disable_dropout)
        x = te_flax.DenseGeneral(16)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.relu(x))


def load(path: Path | None) -> tuple[training.Data, training.Data]:
    """Returns the images in a fixed order, split in those to train with and those held out."""
    if path is not None:
        with np.load(path) as file:
            images, labels = file["images"], file["labels"]
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise SystemExit("mnist needs --data or scikit-learn") from error
        small, labels = load_digits(return_X_y=True)
        places = np.arange(SIDE) * 8 // SIDE
        images = small.reshape(-1, 8, 8)[:, places][:, :, places] / 16
    order = np.random.default_rng(0).permutation(len(labels))
    images = images[order].astype(np.float32)[..., None]
    labels = labels[order].astype(np.int32)
    cut = len(labels) // HELD_OUT_SHARE
    return (
        training.Data((images[cut:],), labels[cut:]),
        training.Data((images[:cut],), labels[:cut]),
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the example; returns its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    training.add_arguments(parser, epochs=6, batch=64, lr=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--data", type=Path, help="images instead of scikit-learn's, see above")
    args = training.parse(parser, argv)
    optimizer = optax.sgd(args.lr, args.momentum)
    model = Classifier(training.compute_dtype())
    return training.train(model, optimizer, *load(args.data), args)


if __name__ == "__main__":
    main()
