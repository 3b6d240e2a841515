#!/usr/bin/env python3
"""Trains a byte-pair tokenizer on text files and writes their tokens for train.py to map.

    python examples/pretrain/prepare.py                           # this Python's own sources
    python examples/pretrain/prepare.py --data ~/books notes.txt --vocabulary 50304

Writes a folder below ``--token-cache`` and prints its path. The folder's name is a hash of the
files (path, size, time) and of the options, so that the work is done once. Whole files, chosen by
the hash of their names, are held out for evaluation; files with equal contents count once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import site
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from user_error import UserError, make_folder, needs, run

VERSION = 1  # of the files' layout, part of their key
SUFFIXES = frozenset({".py", ".pyi", ".rst", ".md", ".txt", ".h", ".hpp", ".cuh"})
SKIPPED_FOLDERS = frozenset({"__pycache__", ".git", "node_modules"})
LARGEST_FILE = 1 << 20  # above it sources are mostly generated tables
HELD_OUT_EVERY = 50
SAMPLE_BYTES = 48 << 20  # text that the tokenizer is trained on
END = "<|end|>"  # follows each document; its id is 0
FILES_PER_TASK = 32


class Source(NamedTuple):
    """One text file.

    Attributes:
        path: where the file lies.
        name: its path below the folder that was searched.
        size: bytes.
        time: time of its last change, in nanoseconds.
    """

    path: str
    name: str
    size: int
    time: int


def default_folders() -> list[Path]:
    """Returns the folders of the running Python's library and packages, those that exist."""
    names = [sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")]
    # Debian's Python also names folders for packages that it would install, if there were any.
    folders = map(Path, dict.fromkeys([*names, *site.getsitepackages()]))
    return [folder for folder in folders if folder.is_dir()]


def _rank(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def held_out_of(sources: Sequence[Source]) -> set[str]:
    """Returns the paths of the files for evaluation; the first file if no name's hash says so.

    Args:
        sources: files in order.
    """
    held_out = {
        source.path
        for source in sources
        if int.from_bytes(_rank(source.name)[:8], "big") % HELD_OUT_EVERY == 0
    }
    return held_out or {source.path for source in sources[:1]}


def find_sources(places: Sequence[Path], max_bytes: int | None = None) -> list[Source]:
    """Returns text files among ``places`` and below them, in an order that hashes decide.

    The order does not follow the alphabet, so that a limit takes a fair sample of all files.

    Args:
        places: files, which are taken whatever their suffix, and folders.
        max_bytes: most bytes to return, or None.

    Raises:
        UserError: one of ``places`` does not exist.
    """
    found: dict[str, Source] = {}
    for place in places:
        if place.is_file():
            info = place.stat()
            path = str(place.resolve())
            found[path] = Source(path, place.name, info.st_size, info.st_mtime_ns)
        elif place.is_dir():
            for source in _below(str(place.resolve())):
                found.setdefault(source.path, source)
        else:
            raise UserError(f"--data must be files and folders that exist, got {place}")
    ordered = sorted(found.values(), key=lambda source: (_rank(source.name), source.path))
    if max_bytes is None:
        return ordered
    kept, room = [], max_bytes
    for source in ordered:
        if source.size <= room:
            kept.append(source)
            room -= source.size
    return kept


def _below(folder: str) -> Iterator[Source]:
    """Yields the text files below a folder."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for file in files:
            if os.path.splitext(file)[1] not in SUFFIXES:
                continue
            path = os.path.join(root, file)
            try:
                info = os.stat(path)
            except OSError:  # a link that leads nowhere
                continue
            if 0 < info.st_size <= LARGEST_FILE:
                name = os.path.relpath(path, folder)
                yield Source(path, name, info.st_size, info.st_mtime_ns)


def read(path: str) -> str | None:
    """Returns the text of a file with plain line ends; None if it is not UTF-8."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n")


def train_tokenizer(sources: Sequence[Source], vocabulary: int) -> Any:
    """Returns a byte-level byte-pair ``tokenizers.Tokenizer`` of these files' text.

    Args:
        sources: files in order; the first ones that are not held out are read, up to a limit.
        vocabulary: number of tokens, at least 257.

    Raises:
        UserError: ``vocabulary`` is smaller, or tokenizers is not installed.
    """
    if vocabulary < 257:
        raise UserError(f"--vocabulary must be at least 257, got {vocabulary}")
    needs("tokenizers", "prepare.py")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    held_out = held_out_of(sources)

    def texts() -> Iterator[str]:
        room = SAMPLE_BYTES
        for source in sources:
            if room <= 0:
                return
            text = None if source.path in held_out else read(source.path)
            if text is not None:
                room -= source.size
                yield text

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


_worker: Any = None  # the tokenizer of a worker process


def _start_worker(tokenizer: str) -> None:
    global _worker
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _worker = Tokenizer.from_file(tokenizer)


def _encode(paths: list[str], dtype: str) -> list[tuple[bytes, bytes] | None]:
    """Returns a digest and the tokens of each file, with the end token; None if it is no text."""
    found: list[tuple[bytes, bytes] | None] = []
    for path in paths:
        text = read(path)
        if text is None:
            found.append(None)
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        ids = np.array([*_worker.encode(text).ids, 0], dtype=dtype)
        found.append((digest, ids.tobytes()))
    return found


@contextlib.contextmanager
def _encoder(tokenizer: Path, workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yields a ``map`` over worker processes; in this process if one worker is enough."""
    if workers == 1:
        _start_worker(str(tokenizer))
        yield map
        return
    start = {"initializer": _start_worker, "initargs": (str(tokenizer),)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, **start) as pool:
        yield pool.map


def write_tokens(
    sources: Sequence[Source], tokenizer: Path, folder: Path, dtype: str, workers: int
) -> dict[str, Any]:
    """Writes train.bin and held_out.bin into ``folder`` and returns what they hold.

    That is counts of tokens and files, and a digest, which is equal where the tokens are.

    Args:
        sources: files in order.
        tokenizer: the tokenizer's file.
        folder: where to write.
        dtype: ``"uint16"`` or ``"uint32"``.
        workers: processes that encode.
    """
    sizes = {"train": 0, "held_out": 0}
    counts = {"train_files": 0, "held_out_files": 0, "duplicate_files": 0, "other_files": 0}
    seen: set[bytes] = set()
    digest_of_all = hashlib.blake2b(digest_size=12)
    for_evaluation = held_out_of(sources)
    groups = [sources[i : i + FILES_PER_TASK] for i in range(0, len(sources), FILES_PER_TASK)]
    with contextlib.ExitStack() as stack:
        files = {side: stack.enter_context(open(folder / f"{side}.bin", "wb")) for side in sizes}
        encoded = stack.enter_context(_encoder(tokenizer, workers))(
            _encode, ([source.path for source in group] for group in groups), [dtype] * len(groups)
        )
        for group, results in zip(groups, encoded, strict=True):
            for source, result in zip(group, results, strict=True):
                if result is None:
                    counts["other_files"] += 1
                    continue
                digest, tokens = result
                if digest in seen:
                    counts["duplicate_files"] += 1
                    continue
                seen.add(digest)
                side = "held_out" if source.path in for_evaluation else "train"
                files[side].write(tokens)
                digest_of_all.update(side.encode() + tokens)
                sizes[side] += len(tokens) // np.dtype(dtype).itemsize
                counts[f"{side}_files"] += 1
    tokens_of = {f"{side}_tokens": size for side, size in sizes.items()}
    return {**tokens_of, **counts, "digest": digest_of_all.hexdigest()}


def key_of(sources: Sequence[Source], vocabulary: int) -> str:
    """Returns the name of the folder for these files' tokens."""
    hashed = hashlib.sha256(f"{VERSION} {vocabulary} {SAMPLE_BYTES} {HELD_OUT_EVERY}".encode())
    for source in sources:
        hashed.update(f"{source.path}\0{source.size}\0{source.time}\n".encode(errors="replace"))
    return hashed.hexdigest()[:24]


def prepare(
    places: Sequence[Path],
    cache: Path,
    vocabulary: int,
    max_bytes: int | None = None,
    workers: int | None = None,
) -> Path:
    """Returns the folder with the tokens of all text at ``places``, written now if it is missing.

    Args:
        places: files and folders.
        cache: where the folder lies.
        vocabulary: number of tokens of the vocabulary.
        max_bytes: most bytes of text, or None.
        workers: processes that encode; None is one for each core.

    Raises:
        UserError: there is no text to train on, or none to evaluate with.
    """
    begin = time.perf_counter()
    sources = find_sources(places, max_bytes)
    folder = cache / key_of(sources, vocabulary)
    if (folder / "meta.json").exists():
        return folder
    make_folder("--token-cache", cache)
    partial = cache / f"{folder.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        tokenizer = train_tokenizer(sources, vocabulary)
        tokenizer.save(str(partial / "tokenizer.json"))
        trained = time.perf_counter()
        size = tokenizer.get_vocab_size()
        dtype = "uint16" if size <= 1 << 16 else "uint32"
        cores = len(os.sched_getaffinity(0))
        workers = min(cores if workers is None else workers, 1 + len(sources) // FILES_PER_TASK)
        counts = write_tokens(sources, partial / "tokenizer.json", partial, dtype, workers)
        if not counts["train_tokens"] or not counts["held_out_tokens"]:
            where = ", ".join(map(str, places))
            raise UserError(
                f"--data must hold text for training and for evaluation, got "
                f"{counts['train_files']} and {counts['held_out_files']} files in {where}"
            )
        end = time.perf_counter()
        meta: dict[str, Any] = {"vocabulary": size, "dtype": dtype, "bytes": 0, **counts}
        meta["bytes"] = sum(source.size for source in sources)
        meta["seconds"] = {"tokenizer": trained - begin, "tokens": end - trained}
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares the tokens and prints what they are; the last line is their folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="PATH", help="text files and folders of them")
    add("--token-cache", type=Path, default=Path("build/pretrain/tokens"), metavar="DIR")
    add("--vocabulary", type=int, default=32768)
    add("--max-bytes", type=int)
    add("--workers", type=int)
    args = parser.parse_args(argv)
    places = args.data or default_folders()
    folder = prepare(places, args.token_cache, args.vocabulary, args.max_bytes, args.workers)
    print(json.dumps(json.loads((folder / "meta.json").read_text())))
    print(folder)


if __name__ == "__main__":
    run(main)
