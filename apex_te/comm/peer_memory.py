"""Gathers and sums of rows by copies between GPUs of one host, overlapped with GEMMs.

An exchange is one gather or one sum, and a piece is the rows that one rank contributes to a gather,
or gets of a sum. Ranks write pieces right into the peers' buffers, which are torch's symmetric
memory. The copies run on the GPUs' copy engines, which take no multiprocessor from a GEMM, as NCCL
would. A gathered piece can be multiplied while the others travel, and a piece of a summand travels
while the next is computed.

Every rank of a group runs the same exchanges in the same order. Gathers have two buffers that take
turns, and sums have two others. A rank may write to a peer's buffer for exchange ``n + 2`` once it
has received the peer's piece of exchange ``n + 1``: the peer sends this after it has read exchange
``n``.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed

from ..op_builder.jit import env
from ..ops.peer_exchange import HEADER, await_rank, join, send, sum_pieces
from ..runtime import is_traced
from .collectives import Pending

# Bytes of a rank's piece below which a step with collectives takes less time, because of the host's
# time for one more GEMM and copy (figures: benchmarks/layers/bench_tensor_parallel.py).
SMALLEST = 16 << 20
MAX_SHAPES = 16  # of pieces of which a buffer keeps views
_WANTED = "APEX_TE_PEER_MEMORY"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_known: WeakKeyDictionary[Any, PeerMemory | None] = WeakKeyDictionary()


def peer_memory(group: Any, x: torch.Tensor, piece_bytes: int) -> PeerMemory | None:
    """Returns the ``PeerMemory`` of ``group``, or None if the caller must use a collective.

    All ranks get the same answer if ``piece_bytes`` is the same on all, as it must be. The first
    call for a group is collective. The answer is None for pieces below ``SMALLEST`` bytes, on the
    CPU, in graphs (CUDA's and ``torch.compile``'s), and for groups that are not NCCL groups on one
    host.
    """
    if not x.is_cuda or piece_bytes < SMALLEST or is_traced():
        return None
    if torch._C._cuda_isCurrentStreamCapturing():  # replays would not take turns
        return None
    group = distributed.group.WORLD if group is None else group
    try:
        return _known[group]
    except KeyError:
        memory = _known[group] = _found(group, x.device)
        return memory


def _found(group: Any, device: torch.device) -> PeerMemory | None:
    """Returns a new ``PeerMemory`` if all ranks are on one host and none has it switched off."""
    if "nccl" not in distributed.get_backend(group) or torch.version.hip is not None:
        return None
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    wanted: bool | str
    try:
        wanted = bool(env.boolean(_WANTED, True))
    except ValueError as error:
        wanted = str(error)
    place = (socket.gethostname(), boot, wanted)
    places = _told(place, group)
    for *_, refused in places:
        if isinstance(refused, str):  # on all ranks
            raise ValueError(refused)
    if len(set(places)) > 1 or not wanted:
        return None
    return PeerMemory(group, device)


def _told(value: Any, group: Any) -> list[Any]:
    """Returns a list of each rank's ``value``, in the order of the group's ranks; collective."""
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


class PeerMemory:
    """Runs the exchanges of one process group, and owns the buffers for them.

    Buffers are allocated when an exchange first needs them, or needs larger ones. If that fails on
    one rank, ``works`` becomes False, and all ranks use collectives from then on. If a peer's piece
    does not arrive within the group's timeout, the process ends with a CUDA error. Copies to peers
    run on ``stream``.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = ref(group)  # its owner may end it
        self.device = device
        self.rank = distributed.get_rank(group)
        self.ranks = distributed.get_world_size(group)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.fork = _event(self.stream)
        self.timeout_ms = _timeout_ms(group, device)
        self.works = True
        self._gathers = _Turns(self)
        self._sums = _Turns(self)

    def gather(self, x: torch.Tensor, whole: bool) -> Pending | None:
        """Begins to gather the rows of all ranks to ``[ranks * rows, ..]``, ordered by rank.

        If ``whole`` is False, the handle supports only ``pieces``, which saves a copy of the
        contiguous ``x``. ``wait`` or ``release`` must be called before the next gather. Before
        that, and without buffers, the result is None on all ranks, and the caller uses a
        collective.
        """
        buffer = self._gathers.begin(x.nbytes * self.ranks)
        return None if buffer is None else _Gathered(self._gathers, buffer, x, whole)

    def reduce(
        self, out: torch.Tensor, produce: Callable[[slice, torch.Tensor], Any]
    ) -> Pending | None:
        """Begins to sum a matrix ``[rows, cols]`` over ranks; ``out`` gets this rank's rows.

        ``produce(rows, into)`` writes the slice ``rows`` of this rank's summand to ``into``. It is
        called immediately, once for the rows of each rank, this rank's last. The result is None in
        the same cases as for ``gather``.
        """
        buffer = self._sums.begin(out.nbytes * self.ranks)
        return None if buffer is None else _Reduced(self._sums, buffer, out, produce)

    def _buffers(self, size: int) -> list[_Buffer] | None:
        """Allocates two symmetric buffers with ``size`` bytes for the pieces of all ranks.

        Collective, and the host waits. If one rank cannot allocate, all ranks warn and get None.
        """
        from torch.distributed import _symmetric_memory as symmetric

        group: Any = self._group()
        torch.cuda.synchronize(self.device)  # earlier buffers may be in use
        error: Exception | None = None
        buffers = []
        try:
            for _ in range(2):
                own = symmetric.empty(HEADER + size, dtype=torch.uint8, device=self.device)
                own[:HEADER].zero_()
                torch.cuda.synchronize(self.device)  # before a peer writes to it
                buffers.append(_Buffer(own, symmetric.rendezvous(own, group), self))
        except (RuntimeError, TypeError, ValueError) as raised:
            error = raised
        if all(_told(error is None, group)):
            return buffers
        self.works = False
        why = f"{type(error).__name__}: {error}" if error else "another rank has none"
        warnings.warn(
            f"apex_te: no symmetric memory of {size} bytes on {self.device} ({why}); collectives "
            "of tensor parallelism run without it, beside fewer products",
            stacklevel=2,
        )
        return None


def _timeout_ms(group: Any, device: torch.device) -> int:
    """Returns the timeout of the group's collectives, in milliseconds."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", distributed.distributed_c10d.default_pg_timeout)
    return int(timeout.total_seconds() * 1e3)


def _address(device: int) -> int:
    """Returns the address of a GPU's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Returns an event that was recorded once, so that its ``cuda_event`` handle exists."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class _Buffer:
    """Symmetric buffer of all ranks: this rank's memory, and that of its peers mapped here.

    The memory of each rank is uint8 ``[HEADER + size]``: arrival counters, then one piece per rank.
    ``peers`` begins with the next rank's memory. ``sent`` is recorded after this rank's copies to
    peers; ``number`` counts exchanges modulo 2^32.
    """

    __slots__ = ("_pieces", "handle", "number", "own", "peers", "ranks", "sent")

    def __init__(self, own: torch.Tensor, handle: Any, memory: PeerMemory) -> None:
        self.own = own
        self.handle = handle  # keeps the peers' memory mapped
        self.ranks = memory.ranks
        self.peers = [
            handle.get_buffer((memory.rank + step) % memory.ranks, own.shape, own.dtype)
            for step in range(1, memory.ranks)
        ]
        self.sent = _event(memory.stream)
        self.number = 0
        self._pieces: dict[tuple[torch.dtype, torch.Size], _Pieces] = {}

    def pieces_like(self, x: torch.Tensor) -> _Pieces:
        """Returns views of ``own`` for pieces like ``x``, cached by shape and dtype."""
        key = x.dtype, x.shape
        try:
            return self._pieces[key]
        except KeyError:
            if len(self._pieces) >= MAX_SHAPES:
                self._pieces.clear()
            with torch.inference_mode(False):  # as a later training step uses them
                found = self._pieces[key] = _Pieces.of(self.own, x, self.ranks)
            return found


class _Pieces(NamedTuple):
    """Views of a buffer's pieces: ``[ranks * rows, ..]`` as a whole, and each rank's part."""

    whole: torch.Tensor
    places: list[slice]
    parts: list[torch.Tensor]

    @classmethod
    def of(cls, own: torch.Tensor, x: torch.Tensor, ranks: int) -> _Pieces:
        """Returns the views of ``own``, a buffer of ``ranks`` pieces like ``x`` after a header."""
        data, rows = own[HEADER : HEADER + x.nbytes * ranks], x.shape[0]
        whole = data.view(x.dtype).view(rows * ranks, *x.shape[1:])
        places = [slice(rank * rows, (rank + 1) * rows) for rank in range(ranks)]
        return cls(whole, places, [whole[place] for place in places])


class _Turns:
    """Two buffers of one kind of exchange, gathers or sums, which take turns."""

    __slots__ = (
        "_buffers", "_device", "_last_address", "_last_stream", "_size", "_turn", "busy", "memory",
    )  # fmt: skip

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self.busy = False
        self._buffers: list[_Buffer] = []
        self._size = 0
        self._turn = 0
        self._device = memory.device.index
        # Streams are compared by address: torch.cuda.current_stream makes an object by 17 calls.
        self._last_address: int | None = None
        self._last_stream: torch.cuda.Stream | None = None

    def begin(self, size: int) -> _Buffer | None:
        """Begins an exchange of ``size`` bytes of pieces, those of all ranks together."""
        memory = self.memory
        if self.busy or not memory.works:
            return None
        if size > self._size:
            buffers = memory._buffers(size)
            if buffers is None:
                return None
            self._buffers, self._size = buffers, size
        if self._last_stream is not None and self._last_address != _address(self._device):
            memory.stream.wait_stream(self._last_stream)  # it read the buffer written next
        self._turn ^= 1
        self.busy = True
        buffer = self._buffers[self._turn]
        buffer.number = (buffer.number + 1) % (1 << 32)
        return buffer

    def end(self) -> None:
        """Ends an exchange, once all reads of its buffer are on the current stream."""
        address = _address(self._device)
        if address != self._last_address:
            self._last_stream = torch.cuda.current_stream(self._device)
            self._last_address = address
        self.busy = False

    def send(
        self,
        buffer: _Buffer,
        piece: torch.Tensor,
        targets: Sequence[torch.Tensor],
        own: torch.Tensor | None = None,
    ) -> None:
        """Starts copies of this rank's ``piece``, after the work queued on the current stream."""
        memory = self.memory
        send(
            piece.view(torch.uint8), targets, own, memory.rank, buffer.number, memory.stream,
            memory.fork, buffer.sent,
        )  # fmt: skip


class _Gathered(Pending):
    """Handle of a gather whose pieces arrive in this rank's buffer; starts the copies to peers."""

    __slots__ = ("_awaited", "_buffer", "_is_whole", "_pieces", "_turns")

    def __init__(self, turns: _Turns, buffer: _Buffer, x: torch.Tensor, whole: bool) -> None:
        super().__init__(x)
        self._turns = turns
        self._buffer = buffer
        self._is_whole = whole
        self._awaited = 0
        self._pieces = buffer.pieces_like(x)
        turns.send(buffer, x, buffer.peers, buffer.own if whole else None)

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        memory, pieces = self._turns.memory, self._pieces
        yield pieces.places[memory.rank], self._result
        while self._awaited + 1 < memory.ranks:
            rank = self._await_next()
            yield pieces.places[rank], pieces.parts[rank]

    def _await_next(self) -> int:
        """Makes the current stream wait for the next peer's piece, and returns the peer's rank."""
        memory, buffer = self._turns.memory, self._buffer
        self._awaited += 1
        rank = (memory.rank - self._awaited) % memory.ranks
        await_rank(buffer.own, rank, buffer.number, memory.timeout_ms)
        return rank

    def borrow(self) -> torch.Tensor:
        if not self._is_whole:
            raise RuntimeError("PeerMemory: whole must be True in gather for borrow, got False")
        self._await_all()
        return self._pieces.whole

    def _await_all(self) -> None:
        """Makes the current stream wait for all peers' pieces and for this rank's copies."""
        while self._awaited + 1 < self._turns.memory.ranks:
            self._await_next()
        join(self._buffer.own, self._buffer.sent)

    def release(self) -> None:
        self._await_all()
        self._turns.end()

    def wait(self) -> torch.Tensor:
        whole = self.borrow().clone()
        self._turns.end()
        return whole


class _Reduced(Pending):
    """Handle of a sum: each peer's summand of this rank's rows arrives in this rank's buffer."""

    __slots__ = ("_buffer", "_turns")

    def __init__(
        self,
        turns: _Turns,
        buffer: _Buffer,
        like: torch.Tensor,
        produce: Callable[[slice, torch.Tensor], Any],
    ) -> None:
        super().__init__(like)
        self._turns = turns
        self._buffer: _Buffer | None = buffer
        memory, pieces = turns.memory, buffer.pieces_like(like)
        sending = []
        for step, target in enumerate(buffer.peers, 1):
            part = torch.empty_like(like)
            produce(pieces.places[(memory.rank + step) % memory.ranks], part)
            turns.send(buffer, part, [target])
            sending.append(part)
        self._keep: Any = sending
        produce(pieces.places[memory.rank], pieces.parts[memory.rank])

    def wait(self) -> torch.Tensor:
        buffer, memory = self._buffer, self._turns.memory
        if buffer is not None:
            sum_pieces(
                buffer.own, memory.ranks, memory.rank, buffer.number, memory.timeout_ms,
                self._result,
            )  # fmt: skip
            join(buffer.own, buffer.sent)
            self._turns.end()
            self._buffer = self._keep = None
        return self._result
