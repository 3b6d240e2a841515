"""Batches of a token file: which tokens a step trains on depends on the seed and the step alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from user_error import UserError, needs

import apex_te

END = 0  # the token behind each document
IGNORED = -100  # target of tokens that nothing is predicted for


class Batch(NamedTuple):
    """Sequences for one forward.

    Attributes:
        inputs, targets: int64 [sequences, context]; packed, they belong to one row [1, tokens].
        cu_seqlens: where documents begin and the last one ends, int32 [documents + 1]; None if
            attention does not stop at them.
        padded: where they begin and end with the padding that ``split`` has put behind each, int32
            [documents + 1]; None if there is none.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor | None
    padded: torch.Tensor | None = None

    def split(self, ranks: int, group: Any) -> Batch:
        """Returns this rank's tokens of each sequence, for context-parallel ``group`` of ``ranks``.

        Packed documents are padded so that each can be split; ``cu_seqlens`` remains that of whole
        documents.
        """
        if ranks == 1:
            return self
        whole = self if self.cu_seqlens is None else _padded(self, ranks)
        inputs, targets = (
            apex_te.split_for_context_parallel(x, group, cu_seqlens=whole.padded)
            for x in (whole.inputs, whole.targets)
        )
        return whole._replace(inputs=inputs, targets=targets)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on ``device``, without waiting for the copies."""
        if device.type == "cpu":
            return self
        return Batch(*(t if t is None else t.pin_memory().to(device, non_blocking=True)
                       for t in self))  # fmt: skip


def _padded(batch: Batch, ranks: int) -> Batch:
    """Returns a packed batch whose documents have multiples of ``2 ranks`` tokens each.

    The last one also makes each rank's tokens a multiple of 32, as products in FP8 want them.
    """
    assert batch.cu_seqlens is not None
    begins = batch.cu_seqlens.numpy()
    lengths = np.diff(begins)
    sizes = -(-lengths // (2 * ranks)) * (2 * ranks)
    sizes[-1] += -sizes.sum() % (32 * ranks)
    padded = np.append(0, sizes.cumsum()).astype(np.int32)
    place = np.arange(begins[-1]) + np.repeat(padded[:-1] - begins[:-1], lengths)
    rows = []
    for x, rest in ((batch.inputs, END), (batch.targets, IGNORED)):
        row = x.new_full((1, int(padded[-1])), rest)
        row[0, torch.from_numpy(place)] = x[0]
        rows.append(row)
    return Batch(*rows, batch.cu_seqlens, torch.from_numpy(padded))


class Tokens:
    """Folder that prepare.py has written, with the tokens mapped into memory.

    Attributes:
        meta: what prepare.py says of them.
        train, held_out: the tokens, each document followed by ``END``.
        digest: tells other tokens apart; the folder's name where prepare.py has written none.

    Raises:
        UserError: the folder is not one that prepare.py has written, or a file is cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"tokens {folder}: must be a folder that prepare.py has written, got "
                f"{type(error).__name__} when reading its meta.json"
            ) from error
        self.train, self.held_out = self._mapped("train"), self._mapped("held_out")
        self.digest: str = self.meta.get("digest", folder.name)

    def _mapped(self, name: str) -> np.ndarray:
        """Returns the tokens of a file, in as many as the folder's ``meta`` says."""
        file, dtype = self.folder / f"{name}.bin", np.dtype(self.meta["dtype"])
        wanted = self.meta[f"{name}_tokens"] * dtype.itemsize
        found = file.stat().st_size if file.exists() else 0
        if found != wanted:
            raise UserError(
                f"tokens {self.folder}: {file.name} must have {wanted} bytes, got {found}"
            )
        return np.memmap(file, dtype, "r")

    def tokenizer(self) -> Any:
        """Returns the ``tokenizers.Tokenizer``."""
        return needs("tokenizers", "--sample").Tokenizer.from_file(
            str(self.folder / "tokenizer.json")
        )


def rows_of(tokens: np.ndarray, windows: np.ndarray, context: int) -> np.ndarray:
    """Returns windows of ``context`` tokens and the one behind, int64 [windows, context + 1]."""
    begins = windows.astype(np.int64) * context
    return tokens[begins[:, None] + np.arange(context + 1)].astype(np.int64)


def make_batch(rows: np.ndarray, packed: bool) -> Batch:
    """Makes a batch of rows as ``rows_of`` returns them.

    Args:
        rows: int64 [sequences, context + 1].
        packed: keep documents apart: nothing is predicted for the token ``END``, which the next
            document follows, and ``cu_seqlens`` tells where documents begin.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if not packed:
        made = (torch.from_numpy(np.ascontiguousarray(part)) for part in (inputs, targets))
        return Batch(*made, None)
    ends = inputs == END
    targets = np.where(ends, IGNORED, targets)
    begins = np.zeros_like(ends)
    begins[:, 0] = True
    begins[:, 1:] = ends[:, :-1]
    cu_seqlens = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
    flat = (torch.from_numpy(np.ascontiguousarray(part).reshape(1, -1)) for part in
            (inputs, targets))  # fmt: skip
    return Batch(*flat, torch.from_numpy(cu_seqlens))


class Order:
    """Order in which the windows of a token file are seen, shuffled anew in each epoch.

    Args:
        tokens: the file.
        context: tokens of a window.
        seed: of the shuffles.

    Raises:
        UserError: the file has no whole window.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.windows = (len(tokens) - 1) // context
        if self.windows < 1:
            raise UserError(
                f"Order: tokens must be at least context + 1 = {context + 1}, got {len(tokens)}; "
                "give a smaller --context or more --data"
            )
        self._epoch, self._shuffled = -1, np.empty(0, np.int64)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Returns samples ``first`` to ``first + count - 1`` of the whole run, as ``rows_of``."""
        chosen = np.empty(count, np.int64)
        for i in range(count):
            epoch, place = divmod(first + i, self.windows)
            if epoch != self._epoch:
                generator = np.random.default_rng((self.seed, epoch))
                self._epoch, self._shuffled = epoch, generator.permutation(self.windows)
            chosen[i] = self._shuffled[place]
        return rows_of(self.tokens, chosen, self.context)


class TrainingBatches:
    """Batches of the steps of a run, split over data-parallel ranks and microbatches.

    Args:
        order: the samples.
        batch: samples of a step, on all ranks.
        microbatch: samples of a forward on one rank.
        ranks, rank: number of parts of a batch's sequences, and this rank's.
        packed: as in ``make_batch``.
    """

    def __init__(
        self, order: Order, batch: int, microbatch: int, ranks: int, rank: int, packed: bool
    ) -> None:
        self.order, self.batch, self.microbatch = order, batch, microbatch
        self.own, self.rank, self.packed = batch // ranks, rank, packed

    def step(self, step: int) -> tuple[list[Batch], int]:
        """Returns this rank's batches of a step, and the number of targets on all ranks."""
        rows = self.order.rows(step * self.batch, self.batch)
        targets = rows[:, 1:].size - (np.count_nonzero(rows[:, :-1] == END) if self.packed else 0)
        own = rows[self.rank * self.own : (self.rank + 1) * self.own]
        parts = np.split(own, range(self.microbatch, self.own, self.microbatch))
        return [make_batch(part, self.packed) for part in parts], targets


def held_out_batches(
    tokens: np.ndarray, context: int, limit: int, microbatch: int, packed: bool
) -> list[Batch]:
    """Returns batches of held-out windows, evenly over the file, without overlap.

    Args:
        tokens: the file.
        context: tokens of a window.
        limit: most tokens to return.
        microbatch: windows of a batch; fewer in the last.
        packed: as in ``make_batch``.
    """
    windows = (len(tokens) - 1) // context
    count = min(windows, max(1, limit // context))
    if windows < 1:
        raise UserError(
            f"held_out_batches: tokens must be at least context + 1 = {context + 1}, "
            f"got {len(tokens)}; give a smaller --context, more --data, or --eval-tokens 0"
        )
    chosen = np.arange(count, dtype=np.int64) * windows // count
    parts = np.split(chosen, range(microbatch, count, microbatch))
    return [make_batch(rows_of(tokens, part, context), packed) for part in parts]
