"""Modules and ranks whose amax values are reduced and whose scales are updated together.

One amax group stands for all regions with one ``fp8_group``; all regions whose recipe does not
reduce amax values form one, too. Each amax group has its own clock, the number of regions since its
last update, and its own updates of the states that last ran in one of its regions. Amax groups are
numbered by first use, an order that is equal on all ranks.

An update all-reduces recorded amax values by maximum. Its buffer has an element for each slot of
every FP8 module that the process has constructed, in the order of construction: 0 if the module has
not run or is gone. So the ranks' buffers agree even if ranks skip modules or collect garbage at
different times. A header before them describes the modules: their number, and a digest of their
sizes and labels.

A collective over a group has as many numbers as its ranks last agreed on, 16384 before they ever
did, so that ranks whose modules differ still run one collective of equal size and learn from the
header that they differ. If more numbers are needed, a first collective sends the header and as many
numbers as were agreed, and a second one the rest; further calls need one collective for all.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from ...comm.agreement import HEADER, TOP, Comparison, compared, header
from ...comm.collectives import max_over_ranks
from ...comm.groups import covers, pipeline_stage, ranks_of
from ...recipe import DelayedScaling, Recipe

if TYPE_CHECKING:
    from ...recipe import Recipe

_interned: dict[Recipe, tuple[str, Recipe]] = {}
_by_key: dict[str, Recipe] = {}
# The recipe object last asked for with its name, because hashing a recipe takes a while.
_last: tuple[Recipe, tuple[str, Recipe]] | None = None


def intern(recipe: Recipe) -> tuple[str, Recipe]:
    """Returns a process-wide name shared by all equal recipes, and the first of these recipes."""
    global _last
    last = _last
    if last is not None and last[0] is recipe:
        return last[1]
    found = _interned.get(recipe)
    if found is None:
        key = f"recipe{len(_interned)}"
        found = _interned[recipe] = (key, recipe)
        _by_key[key] = recipe
    _last = (recipe, found)
    return found


def recipe_named(key: str) -> Recipe:
    """Returns the recipe to which ``intern`` gave the name ``key``."""
    return _by_key[key]


def traced_key(recipe: Recipe) -> str:
    """Returns the interned name of a recipe, by code that torch.compile can trace."""
    kind = type(recipe)
    # Numbers are variables to torch.compile(dynamic=True); their digits are a text that it guards.
    values, integers, floats = {}, "", ""
    for name in _field_names(kind).split():
        value = getattr(recipe, name)
        if isinstance(value, float):
            floats += f"{name}={value.hex()} "
        elif isinstance(value, int) and not isinstance(value, bool):
            integers += f"{name}={float(value).hex()} "
        else:
            values[name] = value
    return _key_of_values(kind, integers, floats, **values)


def _field_names(kind: type) -> str:
    """Returns the names of a recipe class's fields, a constant for torch.compile."""
    return " ".join(field.name for field in dataclasses.fields(kind))


def _key_of_values(kind: Any, integers: str, floats: str, /, **values: Any) -> str:
    """Returns the name of ``kind(**values)``, a constant to torch.compile, from numbers as text."""
    for numbers, type_of in ((integers, int), (floats, float)):
        for number in numbers.split():
            name, _, digits = number.partition("=")
            values[name] = type_of(float.fromhex(digits))
    return intern(kind(**values))[0]


# Run while torch.compile traces, as by torch.compiler.assume_constant_result, but without the
# second that importing it takes.
_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
_key_of_values._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Registry:
    """All ``ModuleFP8`` objects of the process, held weakly and numbered.

    Entries of dead objects in ``sizes`` and ``labels`` stay, because other ranks may still have
    these objects. ``plans`` caches what updates prepare, until a member is added, removed or
    changed.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.plans: dict[Any, Any] = {}
        self._members: dict[int, weakref.ref[Any]] = {}
        # Reentrant: the garbage collector may drop a member while the lock is held.
        self._lock = threading.RLock()

    def add(self, member: Any) -> None:
        """Gives a new ``ModuleFP8`` its number; it is removed when it is garbage-collected."""
        with self._lock:
            key = len(self.sizes)
            self.sizes.append(member.num_slots)
            self.labels.append(member.label)

            def dropped(_: Any) -> None:
                self._members.pop(key, None)
                self.changed()

            self._members[key] = weakref.ref(member, dropped)
            self.changed()
            member.number = key

    def relabel(self, member: Any, label: str) -> None:
        """Gives ``member`` another label."""
        member.label = self.labels[member.number] = label
        self.changed()

    def member(self, number: int) -> Any:
        """Returns the ``ModuleFP8`` with this number, which must still exist."""
        member = self._members[number]()
        assert member is not None
        return member

    def living(self) -> list[Any]:
        """Returns the ``ModuleFP8`` objects that still exist, in the order of construction."""
        return [m for m in (ref() for ref in list(self._members.values())) if m is not None]

    def forget_dead(self, first: int) -> None:
        """Frees the numbers from ``first`` on if no living object has one of them."""
        with self._lock:
            if all(number < first for number in self._members):
                del self.sizes[first:], self.labels[first:]
                self.changed()

    def changed(self) -> None:
        """Drops the plans; called after a change of a member."""
        self.plans.clear()


registry = Registry()


def label_of(owner: Any) -> str:
    """Returns the label of a new module, equal on all ranks: its class and its pipeline stage."""
    return "" if owner is None else _label(owner, "stage", pipeline_stage())


def number_layer(layer: torch.nn.Module, number: int | None, kind: str = "layer") -> None:
    """Labels the FP8 modules in ``layer`` with a number; None leaves the labels as they are."""
    if number is None:
        return
    for module in layer.modules():
        member = getattr(module, "_fp8", None)
        if member is not None:
            registry.relabel(member, _label(module, kind, number))


def _label(module: Any, kind: str, number: int | None) -> str:
    """Returns the module's class name, with ``of <kind> <number>`` if ``number`` is not None."""
    name = type(module).__name__
    return name if number is None else f"{name} of {kind} {number}"


class AmaxGroup:
    """All regions of one process group, with their clock.

    Attributes:
        key: the ranks, ``"world"``, or ``"own"`` if amax values are not reduced; None if ``number``
            is known only from a loaded state.
        reduces: True if amax values are reduced over ranks, False if each rank keeps its own.
        group: process group that the last region passed; None is the whole world.
        pending: number of regions since the last update.
        training: True if a pending region was entered with grad enabled: its backward may still
            come, and until then scales must not move.
    """

    __slots__ = ("group", "inside", "key", "number", "pending", "reduces", "training")

    def __init__(self, number: int, pending: int) -> None:
        self.number = number
        self.key: tuple[int, ...] | str | None = None
        self.reduces = True
        self.group: Any = None
        self.pending = pending
        self.training = False
        self.inside: set[int] = set()

    def fingerprint(self) -> int:
        """Returns a checksum of the ranks for saved states, equal in every process and job."""
        return zlib.crc32(repr(self.key).encode())

    def covers(self, other: AmaxGroup) -> bool:
        """Returns True if ``other`` is this amax group or reduces over a subset of its ranks."""
        return self is other or (self.reduces and other.reduces and covers(self.group, other.group))


class AmaxGroups:
    """All amax groups of the process, in the order of their first use; ``current`` was used last.

    ``recipe`` is that of the last region that was counted; None after a state was loaded.
    """

    def __init__(self) -> None:
        self.current: AmaxGroup | None = None
        self.recipe: Recipe | None = None
        self.several = False
        self._groups: list[AmaxGroup] = []
        self._pending = 0  # clock with which new amax groups begin

    @property
    def pending(self) -> int:
        """Largest number of pending regions of any amax group; assigning sets all amax groups."""
        return max((group.pending for group in self._groups), default=self._pending)

    @pending.setter
    def pending(self, count: int) -> None:
        self.clocks = (count, [count] * len(self._groups))

    @property
    def clocks(self) -> tuple[int, list[int]]:
        """Pending regions of new amax groups, and of each existing one; can be assigned."""
        return self._pending, [group.pending for group in self._groups]

    @clocks.setter
    def clocks(self, counts: tuple[int, list[int]]) -> None:
        self._pending, known = counts
        for group, count in itertools.zip_longest(self._groups, known, fillvalue=self._pending):
            group.pending = count  # type: ignore[union-attr]

    @property
    def training(self) -> list[bool]:
        """Flag ``training`` of each existing amax group; can be assigned."""
        return [group.training for group in self._groups]

    @training.setter
    def training(self, flags: list[bool]) -> None:
        for group, flag in itertools.zip_longest(self._groups, flags, fillvalue=False):
            group.training = flag  # type: ignore[union-attr]

    def any_pending(self) -> bool:
        """Returns True if an amax group has pending regions, or a new one would begin with some."""
        return bool(self._pending or self.waiting())

    def waiting(self) -> list[AmaxGroup]:
        """Returns the amax groups that have pending regions."""
        return [group for group in self._groups if group.pending]

    def enter(self, recipe: DelayedScaling, group: Any) -> AmaxGroup:
        """Makes a region's amax group ``current``; all regions without reduction share one."""
        last = self.current
        if last is not None and last.group is group and last.reduces == recipe.reduce_amax:
            return last
        key = "own" if not recipe.reduce_amax else _key(group)
        found = self._keyed(key) or self._keyed(None) or self._add()
        found.key, found.reduces = key, recipe.reduce_amax
        found.group = group if found.reduces else None
        self.current = found
        return found

    def reduced_over(self, group: Any) -> list[AmaxGroup]:
        """Returns pending amax groups that reduce over ``group``, do not reduce, or are unknown."""
        waiting, key = self.waiting(), _key(group)
        known = self._keyed(key) or self._keyed(None)
        if not known and any(found.reduces for found in waiting):
            raise ValueError(
                "flush_fp8_state: group must be the fp8_group of regions that have run "
                f"(None: each one's own), got ranks {list(ranks_of(group))}"
            )
        return [found for found in waiting if found.key in (key, "own", None)]

    def loaded(
        self, sync: ScaleSync, number: int | None, pending: int, is_copy: bool = False
    ) -> None:
        """Sets the number of pending regions to that of a saved state.

        ``number=None``, of a state that was in no amax group, sets all groups. With ``is_copy`` the
        process itself may have trained, so the larger of the present number and ``pending`` is set.
        """
        if is_copy and number is None:
            pending = max(pending, self.pending)
        elif is_copy and number is not None and number < len(self._groups):
            pending = max(pending, self._groups[number].pending)
        if number is None:
            self.pending = pending
        else:
            while number >= len(self._groups):
                self._add()
            if sync.amax_group is None:
                sync.amax_group = self._groups[number]
            sync.amax_group.pending = pending
        self.recipe = None  # so that states of compiled code follow the next region's
        registry.changed()

    def _keyed(self, key: tuple[int, ...] | str | None) -> AmaxGroup | None:
        """Returns the first amax group with this ``key``, or None."""
        return next((group for group in self._groups if group.key == key), None)

    def _add(self) -> AmaxGroup:
        """Makes and returns the amax group with the next number."""
        group = AmaxGroup(len(self._groups), self._pending)
        self._groups.append(group)
        self.several = len(self._groups) > 1
        return group


def _key(group: Any) -> tuple[int, ...] | str:
    """Returns the ``AmaxGroup.key`` of regions that reduce over ``group``."""
    if group is None:
        return "world"
    try:
        ranks = ranks_of(group)
    except KeyError:
        raise ValueError(
            "fp8_autocast: fp8_group must be a process group of torch.distributed, got one that "
            "was destroyed"
        ) from None
    return "world" if ranks == ranks_of(None) else ranks


amax_groups = AmaxGroups()

# Where a state's scales are known to be equal, besides an amax group or a fingerprint.
_EVERYWHERE, _NOWHERE = "everywhere", "nowhere"


class ScaleSync:
    """Record of the ranks that reduce a state's amax values, and of the ranks with equal scales."""

    __slots__ = ("_where", "amax_group", "equal")

    def __init__(self) -> None:
        self.amax_group: AmaxGroup | None = None
        self.equal = False
        self._where: AmaxGroup | int | str = _EVERYWHERE

    def over(self, group: Any) -> bool:
        """Returns True if all ranks of ``group`` have equal scales, and updates keep them equal."""
        return self.equal and self.reduced_over(group)

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amax values of all ranks of ``group``."""
        own = self.amax_group
        return own is not None and own.reduces and covers(own.group, group)

    def enter(self, amax_group: AmaxGroup) -> None:
        """Makes ``amax_group`` the one that the module runs in."""
        self.amax_group = amax_group
        self._find_equal()

    def renewed(self) -> None:
        """Records that scales and histories have initial values, which are equal on all ranks."""
        self._where = _EVERYWHERE
        self._find_equal()

    def loaded(self, fingerprint: int | None) -> None:
        """Records loaded scales, equal on ranks with this ``AmaxGroup.fingerprint``, if any."""
        self._where = _NOWHERE if fingerprint is None else fingerprint
        self._find_equal()

    def updated(self, amax_group: AmaxGroup, reduced: bool, equalised: bool) -> None:
        """Records an update of scales; ``reduced`` means from the amax values of all its ranks."""
        where = self._where
        if reduced and (equalised or self._equal_in(amax_group)):
            self._where = amax_group
        elif not (reduced and isinstance(where, AmaxGroup) and amax_group.covers(where)):
            self._where = _NOWHERE
        self._find_equal()

    def sure_in(self, amax_group: AmaxGroup) -> bool:
        """Returns True if scales on ``amax_group``'s ranks are equal, not just by a header."""
        return not isinstance(self._where, int) and self._equal_in(amax_group)

    def fingerprint(self) -> int | None:
        """Returns a checksum of the ranks with equal scales for saved states; None if unknown."""
        where = self._where
        if isinstance(where, AmaxGroup):
            return where.fingerprint()
        if where == _EVERYWHERE and self.amax_group is not None:
            return self.amax_group.fingerprint()
        return where if isinstance(where, int) else None

    def _equal_in(self, amax_group: AmaxGroup) -> bool:
        """Returns True if scales are equal on ``amax_group``'s ranks, or a loaded file says so."""
        where = self._where
        if isinstance(where, AmaxGroup):
            return where.covers(amax_group)
        return where == _EVERYWHERE or where == amax_group.fingerprint()

    def _find_equal(self) -> None:
        """Sets ``equal`` after a change of ``amax_group`` or of the scales."""
        own = self.amax_group
        self.equal = own is not None and own.reduces and self._equal_in(own)


_QUANTUM = 16384


class SlotRange(NamedTuple):
    """Adjacent slots of one FP8 state; ``at`` is the first one's index among the process's slots.

    ``history`` is fp32 ``[length, slots]``, whose row 0 collects the current amax values; scales
    are fp32 ``[slots]``.
    """

    at: int
    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor


class _Channel:
    """Facts that one amax reduction over a process group leaves for the next one."""

    __slots__ = ("_copied", "_found", "capacity", "wanted")

    def __init__(self, device: torch.device) -> None:
        self.capacity = _QUANTUM
        self.wanted = 0
        self._copied: Any = None  # event of the last header's copy; None once it was read
        with torch.inference_mode(False):
            self._found = torch.empty(HEADER, dtype=torch.int32, pin_memory=device.type == "cuda")

    @staticmethod
    def of(group: Any, device: torch.device) -> _Channel:
        """Returns the channel of a process group (None: the world); it is made if missing."""
        key = distributed.group.WORLD if group is None else group
        channel = _channels.get(key)
        if channel is None:
            channel = _channels[key] = _Channel(device)
        return channel

    def store(self, reduced: torch.Tensor) -> None:
        """Copies a reduced header, int32 ``[HEADER]``, to the host; does not wait for it."""
        self._found.copy_(reduced, non_blocking=reduced.is_cuda)
        self._copied = torch.cuda.Event() if reduced.is_cuda else True
        if reduced.is_cuda:
            self._copied.record()

    def read(self) -> Comparison | None:
        """Waits for the last header stored and compares the ranks by it; None if already read."""
        if self._copied is None:
            return None
        if self._copied is not True:
            self._copied.synchronize()
        self._copied = None
        found = compared(self._found.tolist())
        self.wanted = found.flag if found.agrees else 0
        return found


_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()


class RankReduction:
    """Reduces recorded amax values over ranks; checks that all ranks have the same modules.

    ``unsure`` is True if scales and histories may differ between ranks, as after loading. ``sizes``
    are numbers of slots, in the order of modules' construction.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        labels: Sequence[str],
        slots: Sequence[SlotRange],
        device: torch.device,
        unsure: bool = False,
    ) -> None:
        if slots:
            device = slots[0].history.device
        self._modules = len(sizes)
        self._total = sum(sizes)
        self._slots = slots
        self._length = max((s.history.shape[0] for s in slots), default=0)
        capacity = -(-(HEADER + self._total) // _QUANTUM) * _QUANTUM
        with torch.inference_mode(False):
            self._buffer = torch.zeros(capacity, dtype=torch.float32, device=device)
            modules = repr((list(sizes), list(labels))).encode()
            self._own = torch.tensor(header(len(sizes), modules), dtype=torch.int32).to(device)
        if unsure:
            self._own[-1:].fill_(self._length)
        self._rows = [s.history[0] for s in slots]
        starts = [HEADER + s.at for s in slots]
        self._parts = [
            self._buffer[start : start + row.numel()]
            for start, row in zip(starts, self._rows, strict=True)
        ]
        self._agreed: _Channel | None = None  # the channel whose ranks were found to agree

    def run(self, group: Any) -> bool:
        """Reduces recorded amax values over ``group``; returns True if it made all scales equal.

        A new group's header is checked at once, others in the next call, so that no step waits. If
        some rank is unsure, the next call equalises scales and histories by one more collective.
        """
        buffer, channel = self._buffer, _Channel.of(group, self._buffer.device)
        capturing = buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        equalise = False
        if not capturing:
            self._check(channel, group)
            equalise, channel.wanted = channel.wanted > 0, 0
        used = channel.capacity
        rest = buffer.numel() > used
        with torch.no_grad():
            said = self._fill(equalise)
            max_over_ranks(buffer[:used] if rest else buffer, group)
            if not capturing:
                channel.store(said)
                if equalise or rest or self._agreed is not channel:
                    self._check(channel, group)
                    self._agreed = channel
            if rest:
                max_over_ranks(buffer[used:], group)
                channel.capacity = buffer.numel()
            if self._parts:
                torch._foreach_copy_(self._rows, self._parts)
            if equalise:
                _equalise(self._slots, self._total, channel.wanted, buffer.device, group)
                channel.wanted = 0
                self._own[-1:].zero_()
        return equalise

    def _fill(self, equalise: bool) -> torch.Tensor:
        """Writes header and staged amax values into the buffer; returns the header's view."""
        self._buffer.zero_()
        said = self._buffer[:HEADER].view(torch.int32)
        said.copy_(self._own)
        if equalise:
            said[-1:].fill_(self._length)
        if self._parts:
            torch._foreach_copy_(self._parts, self._rows)
        return said

    def _check(self, channel: _Channel, group: Any) -> None:
        """Raises RankMismatchError if a header not read before shows that ranks' modules differ."""
        found = channel.read()
        if found is None or found.agrees:
            return
        hint = ""
        if found.most == found.least:
            hint = (
                ", whose sizes, classes, layer numbers or stages differ: are there ranks of "
                "another pipeline stage among them?"
            )
        what = "the whole world" if group is None else f"ranks {list(ranks_of(group))}"
        raise found.error(
            f"fp8_autocast: every rank of fp8_group ({what}) must have constructed the same FP8 "
            "modules in the same order",
            self._modules,
            hint,
        )


def _equalise(
    slots: Sequence[SlotRange], total: int, length: int, device: torch.device, group: Any
) -> None:
    """Gives all ranks each slot's smallest scale and largest amax values, by one collective.

    Histories shorter than ``length`` are aligned by their newest rows. Slots that were never set,
    with scale 1 and an empty history, do not count.
    """
    rows = max(length, 1) + 1  # the staging row, which is not sent, gives way to two of scales
    buffer = torch.zeros(rows, total, dtype=torch.float32, device=device)
    bits = buffer.view(torch.int32)
    for at, history, scale, scale_inv in slots:
        mine = slice(at, at + scale.numel())
        is_set = (scale != 1) | (history[1:] != 0).any(0)
        # Positive numbers order as their bits do: the largest of what is left of the top.
        bits[0, mine] = torch.where(is_set, TOP - scale.view(torch.int32), 0)
        buffer[1, mine] = torch.where(is_set, scale_inv, 0.0)
        if history.shape[0] > 1:
            buffer[rows + 1 - history.shape[0] :, mine] = history[1:]
    max_over_ranks(buffer, group)
    for at, history, scale, scale_inv in slots:
        mine = slice(at, at + scale.numel())
        left = bits[0, mine]
        scale.copy_(torch.where(left != 0, (TOP - left).view(torch.float32), scale))
        scale_inv.copy_(torch.where(left != 0, buffer[1, mine], scale_inv))
        if history.shape[0] > 1:
            history[1:] = buffer[rows + 1 - history.shape[0] :, mine]
