#!/usr/bin/env python3
"""Judges by a Transformer encoder whether sentences are grammatical, in FP8.

    python examples/jax/encoder.py
    python examples/jax/encoder.py --use-fp8 --fp8-recipe tensorwise

The task is that of GLUE's CoLA, on sentences of a small grammar: in half of them a verb, or a
noun behind its article, has the wrong number, while other nouns lie between. Sentences are drawn
anew for each seed; those to train with and those held out do not overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import training

import apex_te.jax.flax as te_flax

PADDING = 0
LONGEST = 12  # words of a sentence
# The words of each kind; articles, nouns and verbs have a singular and a plural form.
KINDS = {"article": 2, "adjective": 4, "noun": 8, "verb": 6, "preposition": 2, "adverb": 2}
NUMBERED = ("article", "noun", "verb")


def vocabulary() -> dict[str, np.ndarray]:
    """Returns the tokens of each kind of word, [numbers, words], from 1 on."""
    tokens, found = 1, {}
    for kind, words in KINDS.items():
        numbers = 2 if kind in NUMBERED else 1
        found[kind] = np.arange(tokens, tokens + numbers * words).reshape(numbers, words)
        tokens += numbers * words
    return found


VOCABULARY = vocabulary()
TOKENS = 1 + sum(table.size for table in VOCABULARY.values())


def sentence(random: np.random.Generator, is_right: bool) -> list[int]:
    """Returns the tokens of a sentence: a subject, perhaps with others beside, a verb, an object.

    Args:
        random: the random numbers.
        is_right: False for a wrong number in one place.
    """
    words: list[int] = []
    places: list[tuple[int, str, int]] = []  # of words whose number may be wrong

    def add(kind: str, number: int = 0) -> None:
        table = VOCABULARY[kind]
        words.append(int(table[number % len(table), random.integers(table.shape[1])]))

    def noun_phrase(number: int) -> None:
        add("article", number)
        if random.integers(2):
            add("adjective")
        places.append((len(words), "noun", number))
        add("noun", number)

    subject = int(random.integers(2))
    noun_phrase(subject)
    for _ in range(random.integers(2)):
        add("preposition")
        noun_phrase(int(random.integers(2)))
    places.append((len(words), "verb", subject))
    add("verb", subject)
    noun_phrase(int(random.integers(2)))
    for _ in range(random.integers(2)):
        add("adverb")
    if not is_right:
        place, kind, number = places[random.integers(len(places))]
        table = VOCABULARY[kind]
        words[place] = int(table[1 - number, random.integers(table.shape[1])])
    return words


def draw(count: int, length: int, seed: int) -> training.Data:
    """Returns sentences, int32 [count, length], their padding masks, and 1 for grammatical ones."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count).astype(np.int32)
    tokens = np.full((count, length), PADDING, np.int32)
    for row, label in zip(tokens, labels, strict=True):
        words = sentence(random, bool(label))
        row[: len(words)] = words
    # 1 hides: the keys behind a sentence's end, and all keys from queries there.
    real = tokens != PADDING
    mask = 1 - (real[:, None, :, None] & real[:, None, None, :]).astype(np.uint8)
    return training.Data((tokens, mask), labels)


def load(count: int, held_out: int, length: int, seed: int) -> tuple[training.Data, training.Data]:
    """Returns sentences to train with, and held-out ones that are none of them."""
    drawn = draw(count + 2 * held_out, length, seed)
    first = drawn.take(np.arange(count))
    seen = {row.tobytes() for row in first.inputs[0]}
    rest = [i for i in range(count, len(drawn.labels)) if drawn.inputs[0][i].tobytes() not in seen]
    return first, drawn.take(np.array(rest[:held_out]))


class Classifier(nn.Module):
    """An embedding, one Transformer layer and three dense layers over all of a sentence."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(
        self, tokens: jax.Array, mask: jax.Array, disable_dropout: bool = False
    ) -> jax.Array:
        """Returns logits [batch, 2] of tokens [batch, s] and masks [batch, 1, s, s]."""
        x = nn.Embed(TOKENS, self.hidden, dtype=self.dtype)(tokens)
        x = te_flax.TransformerLayer(
            hidden_size=self.hidden,
            mlp_hidden_size=4 * self.hidden,
            num_attention_heads=8,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            intermediate_dropout=0.1,
            mlp_activations=("relu",),
            layer_type=te_flax.TransformerLayerType.ENCODER,
            self_attn_mask_type="padding",
            enable_relative_embedding=False,
        )(x, attention_mask=mask, deterministic=disable_dropout)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(te_flax.DenseGeneral(256)(x))
        x = nn.relu(te_flax.DenseGeneral(256)(x))
        return nn.Dense(2, dtype=self.dtype)(x)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the example; returns its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    training.add_arguments(parser, epochs=8, batch=64, lr=2e-3)
    parser.add_argument("--hidden", type=int, default=128, help="features of a token")
    parser.add_argument("--sentences", type=int, default=4096, help="sentences of an epoch")
    parser.add_argument("--held-out", type=int, default=2048, help="sentences for validation")
    parser.add_argument("--length", type=int, default=16, help="tokens of a padded sentence")
    args = training.parse(parser, argv)
    if args.length < LONGEST:
        parser.error(f"--length must be at least {LONGEST}, got {args.length}")
    data = load(args.sentences, args.held_out, args.length, args.seed)
    model = Classifier(args.hidden, training.compute_dtype())
    steps = args.epochs * (args.sentences // args.batch_size)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, steps // 10), steps)
    return training.train(model, optax.adamw(rate), *data, args)


if __name__ == "__main__":
    main()
