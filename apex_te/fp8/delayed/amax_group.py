"""Amax groups: process groups over which scales are updated together, and stay equal.

One amax group stands for all regions with one ``fp8_group``; all regions whose recipe does not
reduce amax values form one, too. Each amax group has its own clock, the number of regions since its
last update, and its own updates of the states that last ran in one of its regions. Amax groups are
numbered by first use, an order that is equal on all ranks.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

from ...comm.groups import covers, ranks_of
from ...recipe import DelayedScaling, Recipe
from .registry import registry


class AmaxGroup:
    """All regions of one process group, with their clock.

    Attributes:
        key: the ranks, ``"world"``, or ``"own"`` if amax values are not reduced; None if ``number``
            is known only from a loaded state.
        group: process group that the last region passed; None is the whole world.
        pending: number of regions since the last update.
        training: True if a pending region was entered with grad enabled: its backward may still
            come, and until then scales must not move.
    """

    __slots__ = ("group", "inside", "key", "number", "pending", "training")

    def __init__(self, number: int, pending: int) -> None:
        self.number = number
        self.key: tuple[int, ...] | str | None = None
        self.group: Any = None
        self.pending = pending
        self.training = False
        self.inside: set[int] = set()

    @property
    def reduces(self) -> bool:
        """Returns True if amax values are reduced over ranks, False if each rank keeps its own."""
        return self.key != "own"

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
        found.key = key
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
        """Notes that scales and histories have initial values, which are equal on all ranks."""
        self._where = _EVERYWHERE
        self._find_equal()

    def loaded(self, fingerprint: int | None) -> None:
        """Notes that scales were loaded; they are equal on the ranks of ``fingerprint``, if any."""
        self._where = _NOWHERE if fingerprint is None else fingerprint
        self._find_equal()

    def updated(self, amax_group: AmaxGroup, reduced: bool, equalised: bool) -> None:
        """Notes an update of scales; ``reduced`` means from the amax values of all its ranks."""
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
