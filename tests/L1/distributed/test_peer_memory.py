"""Rows exchanged piece by piece: through peers' memory on GPUs, and what modules make of pieces."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from shards import MODULES
from test_tensor_parallel import _plain, _quantized
from torch import distributed

from apex_te.comm import collectives, peer_memory
from apex_te.comm.collectives import Pending
from apex_te.module._core import tensor_parallel as _tensor_parallel

SMALLEST = peer_memory.SMALLEST


class _Rows(Pending):
    """Gathered rows that arrive one rank's after the other's, none before it is asked for."""

    def __init__(self, x, group):
        super().__init__(collectives.all_gather_rows(x, group).wait())
        self.order = [(distributed.get_rank(group) - i) % distributed.get_world_size(group)
                      for i in range(distributed.get_world_size(group))]  # fmt: skip
        self.released = False

    def pieces(self):
        rows = self._result.shape[0] // len(self.order)
        for rank in self.order:
            piece = slice(rank * rows, (rank + 1) * rows)
            yield piece, self._result[piece].clone()

    def borrow(self):
        assert not self.released
        return self._result

    def release(self):
        """What is read later is not what was gathered."""
        assert not self.released
        self.released = True
        self._result.view(torch.uint8).fill_(0x7F)

    def wait(self):
        whole = self._result.clone()
        self.release()
        return whole


class StandIn:
    """`PeerMemory` over collectives, for any device."""

    def __init__(self, group):
        self.group = group
        self.used = []

    def gather(self, x, whole):
        self.used.append("gather")
        return _Rows(x, self.group)

    def reduce(self, out, produce):
        self.used.append("reduce")
        ranks, rows = distributed.get_world_size(self.group), out.shape[0]
        parts = torch.full((ranks, *out.shape), torch.nan, dtype=out.dtype)
        for step in range(1, ranks + 1):
            rank = (distributed.get_rank(self.group) + step) % ranks
            produce(slice(rank * rows, (rank + 1) * rows), parts[rank])
        return collectives.reduce_scatter_rows(parts.flatten(0, 1), self.group, out)


@contextmanager
def _instead(memory):
    kept = _tensor_parallel.peer_memory
    _tensor_parallel.peer_memory = lambda group, x, size: memory
    try:
        yield
    finally:
        _tensor_parallel.peer_memory = kept


def _in_pieces(rank, name, recipe):
    """The comparison with one rank, all rows in pieces; what was exchanged so."""
    memory = StandIn(distributed.group.WORLD)
    with _instead(memory):
        result = (
            _plain(rank, name, True) if recipe is None else _quantized(rank, name, True, recipe)
        )
    return result, set(memory.used)


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_multiply_pieces(two_ranks, name, recipe):
    for result, used in two_ranks.run(_in_pieces, name, recipe):
        assert used == ({"gather"} if recipe == "blockwise" else {"gather", "reduce"})
        if result is not None:
            assert min(result[0].values()) >= 20.0


def test_modules_multiply_pieces_of_four(four_ranks):
    for recipe in (None, "delayed"):
        four_ranks.run(_in_pieces, "mlp", recipe)


def test_pieces_are_views_of_a_buffer():
    own = torch.zeros(peer_memory.HEADER + 3 * 48 + 5, dtype=torch.uint8)
    pieces = peer_memory._Pieces.of(own, torch.empty(4, 3, 2, dtype=torch.bfloat16), 3)
    assert pieces.whole.shape == (12, 3, 2)
    for rank, (place, part) in enumerate(zip(pieces.places, pieces.parts, strict=True)):
        part.fill_(rank + 1.0)
        assert (pieces.whole[place] == rank + 1.0).all()
        assert part.shape == (4, 3, 2)
        assert part.data_ptr() == own.data_ptr() + peer_memory.HEADER + 48 * rank
    assert not own[: peer_memory.HEADER].any()
    assert not own[-5:].any()


def _memory(x):
    peer_memory.SMALLEST = 0
    try:
        return peer_memory.peer_memory(None, x, 1)
    finally:
        peer_memory.SMALLEST = SMALLEST


def _same_as_collectives(rank, rounds):
    """Random sizes and delays; every result bitwise."""
    device, group = torch.device("cuda", rank), distributed.group.WORLD
    ranks = distributed.get_world_size()
    memory = _memory(torch.empty(1, device=device))
    assert memory is not None
    sizes, delays = torch.Generator().manual_seed(1), torch.Generator().manual_seed(rank)
    for number in range(rounds):
        rows, cols, kind = (torch.randint(1, 200, (3,), generator=sizes)).tolist()
        grow = number < 3  # the buffers are made again
        rows = (rows + (600 if grow and number else 0)) * ranks
        torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
        x = torch.randn(rows // ranks, cols * 16, device=device).to(torch.float8_e4m3fn)
        expected = collectives.all_gather_rows(x, group).wait()
        gathered = memory.gather(x, kind % 2 == 0)
        assert memory.gather(x, True) is None  # one at a time
        found = torch.empty_like(expected)
        for piece, codes in gathered.pieces():
            torch.cuda._sleep(int(torch.randint(0, 100_000, (), generator=delays)))
            found[piece] = codes
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        if kind % 2 == 0:
            whole = gathered.borrow() if kind % 4 else gathered.wait()
            assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
        if kind % 4:
            gathered.release()
        y = torch.randn(rows, cols * 8, device=device, dtype=torch.bfloat16)
        out = torch.empty(rows // ranks, cols * 8, device=device, dtype=torch.bfloat16)
        pending = memory.reduce(out, lambda some, into, y=y: into.copy_(y[some]))
        every = collectives.all_gather_rows(y, group).wait().view(ranks, rows, cols * 8)
        own = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        expected = torch.zeros_like(out, dtype=torch.float32)
        for part in every[:, own].float():
            expected += part
        expected = expected.to(y.dtype)
        torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
        found = pending.wait()
        assert found is out
        assert torch.equal(found, expected), number
    return True


@pytest.mark.cuda
def test_same_as_collectives(two_gpus):
    assert two_gpus.run(_same_as_collectives, 60) == [True, True]


@pytest.mark.cuda
def test_same_as_collectives_of_four(four_gpus):
    assert four_gpus.run(_same_as_collectives, 40) == [True] * 4


def _large(rank):
    """Sums whose kernel fills the GPU while this rank's own bytes are still to be sent."""
    device, ranks = torch.device("cuda", rank), distributed.get_world_size()
    memory = _memory(torch.empty(1, device=device))
    y = torch.randn(ranks, 4096, 4096, device=device, dtype=torch.bfloat16)
    expected = y.clone()
    distributed.all_reduce(expected)
    for _ in range(20):
        out = torch.full_like(y[0], torch.nan)
        pending = memory.reduce(out, lambda some, into: into.copy_(y.flatten(0, 1)[some]))
        assert torch.equal(pending.wait(), expected[rank])
    return True


@pytest.mark.cuda
def test_large_sums(two_gpus):
    assert two_gpus.run(_large) == [True, True]


def _on_streams(rank):
    """Exchanges that begin on streams in turns read and write in order."""
    device = torch.device("cuda", rank)
    memory = _memory(torch.empty(1, device=device))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    ranks = distributed.get_world_size()
    results = []
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            x = torch.full((64, 512), float(number * ranks + rank), device=device)
            torch.cuda._sleep(200_000 * (rank + 1))
            gathered = memory.gather(x, True)
            results.append(gathered.wait())
    torch.cuda.synchronize()
    return [r.view(ranks, -1)[:, 0].tolist() for r in results]


@pytest.mark.cuda
def test_streams(two_gpus):
    for found in two_gpus.run(_on_streams):
        assert found == [[2.0 * i, 2.0 * i + 1.0] for i in range(20)]


def _used(rank, name, recipe):
    """The comparison with one rank on GPUs; the exchanges that went through peers' memory."""
    counts = {"gather": 0, "reduce": 0}
    kept = {what: getattr(peer_memory.PeerMemory, what) for what in counts}

    def counted(what):
        def call(self, *args):
            counts[what] += 1
            pending = kept[what](self, *args)
            assert pending is not None
            return pending

        return call

    peer_memory.SMALLEST = 0
    for what in counts:
        setattr(peer_memory.PeerMemory, what, counted(what))
    try:
        result = (
            _plain(rank, name, True) if recipe is None else _quantized(rank, name, True, recipe)
        )
    finally:
        peer_memory.SMALLEST = SMALLEST
        for what, function in kept.items():
            setattr(peer_memory.PeerMemory, what, function)
    return result, counts


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_on_gpus(two_gpus, name, recipe):
    for result, counts in two_gpus.run(_used, name, recipe):
        assert counts["gather"] > 0
        assert recipe == "blockwise" or counts["reduce"] > 0
        if result is not None:
            assert min(result[0].values()) >= 20.0


def _captured(rank):
    x = torch.empty(1 << 22, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        found = peer_memory.peer_memory(None, x, x.nbytes)
        x.add_(1)
    return found is None


@pytest.mark.cuda
def test_not_in_a_capture(two_gpus):
    assert two_gpus.run(_captured) == [True, True]


_ALONE = """
import os, sys, torch
from datetime import timedelta
from torch import distributed
from apex_te.distributed import peer_memory
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                               timeout=timedelta(seconds=5))
x = torch.ones(1 << 20, 4, device="cuda")
memory = peer_memory.peer_memory(None, x, x.nbytes)
memory.gather(x, True).wait()
torch.cuda.synchronize()
if rank == 1:
    os._exit(0)
memory.gather(x, True).wait()
torch.cuda.synchronize()
"""


@pytest.mark.cuda
def test_a_rank_that_is_gone(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    start = time.monotonic()
    command = [sys.executable, "-c", _ALONE]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    assert processes[1].returncode == 0, errors[1]
    assert processes[0].returncode != 0
    assert "CUDA" in errors[0]
    assert time.monotonic() - start < 60


def _switched_off(rank, value):
    device = torch.device("cuda", rank)
    group = distributed.new_group([0, 1])
    os.environ["APEX_TE_PEER_MEMORY"] = value if rank == 1 else "1"
    try:
        if value != "0":
            with pytest.raises(ValueError, match=r"APEX_TE_PEER_MEMORY must be .* got 'maybe'"):
                peer_memory.peer_memory(group, torch.empty(1, device=device), 1 << 30)
            return None
        return peer_memory.peer_memory(group, torch.empty(1, device=device), 1 << 30)
    finally:
        del os.environ["APEX_TE_PEER_MEMORY"]


@pytest.mark.cuda
@pytest.mark.parametrize("value", ["0", "maybe"])
def test_switched_off_on_one_rank(two_gpus, value):
    assert two_gpus.run(_switched_off, value) == [None, None]
