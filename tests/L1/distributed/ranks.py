"""Processes that form one process group and run functions for a whole test file.

A test calls ``ranks.run(function, *args)``: every rank runs ``function(rank, *args)`` and the
results come back as a list. Functions are module-level ones of the test files; tensors travel by
pickle. A rank that fails says so with its traceback, one that hangs is killed after a limit.
"""

import contextlib
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as mp

LIMIT = 120.0  # seconds for a call
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "apex_te",
    "apex_te.distributed.dtensor.parallel_styles",
    "apex_te.distributed.state_dict",
)


def _context(backend):
    """Processes of a server that has torch loaded: half a test run would be imports.

    A fork after CUDA has begun is none, so ranks with GPUs start afresh.
    """
    if backend == "nccl":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _serve(rank, size, backend, path, pipe, folders, environment):
    sys.path[:0] = folders
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    while True:
        message = pipe.recv()
        if message is None:
            break
        function, args = message
        try:
            torch.manual_seed(1234)
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Threads of the backend are not waited for at exit.
    os._exit(0)


class RankError(AssertionError):
    """A function failed on some rank."""


class Ranks:
    """``size`` processes with one group over ``backend``."""

    def __init__(self, size, backend="gloo"):
        self.size = size
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory()
        context = _context(backend)
        folders = [str(Path(__file__).resolve().parent), *sys.path]
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = f"{self._folder.name}/store"
            args = (rank, size, backend, store, theirs, folders, dict(os.environ))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args):
        """Results of ``function(rank, *args)`` by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT):
                self.kill()
                raise RankError(f"rank {rank} of {self.size} gave no answer in {LIMIT:.0f} s")
            answers.append(pipe.recv())
        failed = [(r, text) for r, (good, text) in enumerate(answers) if not good]
        if failed:
            raise RankError("\n".join(f"rank {r}:\n{text}" for r, text in failed))
        return [value for _, value in answers]

    def kill(self):
        for process in self._processes:
            process.kill()

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
