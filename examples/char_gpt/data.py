"""Character-level data set made of the source files of the running Python's standard library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

# Tests are not library text, third-party packages differ between machines, and the two last
# folders are generated tables that would make the text easier than source code is.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idle_test",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
        "encodings",
        "pydoc_data",
    }
)
HELD_OUT_EVERY = 10
UNKNOWN = 0  # the id of every character too rare to have its own


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Returns True if the file with this path below the root belongs to the validation set."""
    return _hash(name) % HELD_OUT_EVERY == 0


def list_sources(root: Path) -> list[str]:
    """Returns relative POSIX paths of the usable .py files under ``root``, sorted by hash.

    The order is the same on every machine and independent of the alphabet, so that a size limit
    takes a fair sample of the files.
    """
    names = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and path.is_file():
            names.append(relative.as_posix())
    return sorted(names, key=lambda name: (_hash(name), name))


@dataclass(frozen=True)
class Vocabulary:
    """Characters with an id of their own: ``characters[i]`` has id ``i + 1``; id 0 is the rest."""

    characters: str

    def __len__(self) -> int:
        return len(self.characters) + 1

    @classmethod
    def of(cls, text: str, rarest: float = 2e-6, at_most: int = 127) -> Vocabulary:
        """Makes a vocabulary of characters that are at least the share ``rarest`` of ``text``."""
        counts = Counter(text)
        floor = max(1.0, rarest * len(text))
        kept = [c for c, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        kept = [c for c in kept[:at_most] if counts[c] >= floor]
        return cls("".join(sorted(kept)))

    def encode(self, text: str) -> torch.Tensor:
        """Returns the ids of ``text``, uint8 [len(text)]."""
        table = {ord(c): i + 1 for i, c in enumerate(self.characters)}
        return torch.tensor([table.get(ord(c), UNKNOWN) for c in text], dtype=torch.uint8)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ``ids``; unknown characters appear as U+FFFD."""
        return "".join("\ufffd" if i == UNKNOWN else self.characters[i - 1] for i in ids)


@dataclass(frozen=True)
class Corpus:
    """Training and validation text as ids, uint8 [characters], and the files they come from."""

    vocabulary: Vocabulary
    train: torch.Tensor
    validation: torch.Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]

    def to(self, device: torch.device) -> Corpus:
        """Returns the corpus with its ids on ``device``."""
        return Corpus(
            self.vocabulary,
            self.train.to(device),
            self.validation.to(device),
            self.train_files,
            self.validation_files,
        )


def load_corpus(max_bytes: int, root: Path | None = None) -> Corpus:
    """Reads up to ``max_bytes`` of whole files under ``root`` (default: the standard library).

    About every tenth file, chosen by the hash of its name, is held out for validation; a tenth of
    ``max_bytes`` is theirs. Files that are not UTF-8 are left out.

    Raises:
        ValueError: nothing remains on either side.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts: dict[bool, list[str]] = {False: [], True: []}
    files: dict[bool, list[str]] = {False: [], True: []}
    room = {True: max_bytes // 10, False: max_bytes - max_bytes // 10}
    for name in list_sources(root):
        raw = (root / name).read_bytes()
        held_out = is_held_out(name)
        if not raw or len(raw) > room[held_out]:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        room[held_out] -= len(raw)
        texts[held_out].append(text.replace("\r\n", "\n"))
        files[held_out].append(name)
    if not texts[False] or not texts[True]:
        raise ValueError(
            f"load_corpus: root must hold Python source files for both training and validation, "
            f"got {len(texts[False])} and {len(texts[True])} usable files under {root}"
        )
    train, validation = "".join(texts[False]), "".join(texts[True])
    vocabulary = Vocabulary.of(train)
    return Corpus(
        vocabulary,
        vocabulary.encode(train),
        vocabulary.encode(validation),
        tuple(files[False]),
        tuple(files[True]),
    )


def windows(ids: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, ...]:
    """Returns inputs and targets, int64 [len(starts), context], of the windows at ``starts``."""
    index = starts.to(ids.device)[:, None] + torch.arange(context + 1, device=ids.device)
    rows = ids[index].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def random_batch(
    ids: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Returns ``batch`` random windows of ``ids``; the CPU ``generator`` draws the positions."""
    starts = torch.randint(len(ids) - context, (batch,), generator=generator)
    return windows(ids, starts, context)


def validation_batches(
    ids: torch.Tensor, batch: int, context: int, count: int
) -> list[tuple[torch.Tensor, ...]]:
    """Returns at most ``count`` full batches of windows, evenly over ``ids``, without overlap."""
    possible = (len(ids) - 1) // context
    wanted = min(count, possible // batch) * batch
    if wanted < 1:
        raise ValueError(
            f"validation_batches: ids must hold at least {batch * context + 1} characters, "
            f"got {len(ids)}"
        )
    starts = torch.tensor([math.floor(i * possible / wanted) * context for i in range(wanted)])
    return [windows(ids, part, context) for part in starts.split(batch)]
