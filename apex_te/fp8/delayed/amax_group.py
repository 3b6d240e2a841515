"""Amax groups: the ranks over which scales are updated together, and on which they are equal.

An amax group stands for all regions with one ``fp8_group``; regions whose recipe does not reduce
amaxes form one, too. Each amax group has its own clock and its own updates, of the states that ran
in it last. Amax groups are numbered by first use, which is the same on all ranks.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

from ...comm.groups import covers, ranks_of
from ...recipe import DelayedScaling, Recipe
from .registry import registry

__all__ = ["AmaxGroup", "AmaxGroups", "ScaleSync", "amax_groups"]


class AmaxGroup:
    """Stands for the regions of one process group.

    Attributes:
        number: count of the amax groups that were there before.
        key: the ranks, ``"world"``, or ``"own"`` where nothing is reduced; None as long as only a
            loaded state has named the number.
        group: process group as the last region named it; None is the whole world.
        pending: regions since the last update.
        training: True while a backward of a pending region may be to come, before which scales must
            not move.
    """

    __slots__ = ("group", "key", "number", "pending", "training")

    def __init__(self, number: int, pending: int) -> None:
        self.number = number
        self.key: tuple[int, ...] | str | None = None
        self.group: Any = None
        self.pending = pending
        self.training = False

    @property
    def reduces(self) -> bool:
        """Returns True if amaxes are reduced over ranks."""
        return self.key != "own"

    def fingerprint(self) -> int:
        """Returns a number that is the same on every rank and in every process for these ranks."""
        return zlib.crc32(repr(self.key).encode())

    def covers(self, other: AmaxGroup) -> bool:
        """Returns True if every rank of ``other`` is a rank of this amax group."""
        return self is other or (self.reduces and other.reduces and covers(self.group, other.group))


class AmaxGroups:
    """All amax groups of the process, in the order of their first use.

    Attributes:
        current: the amax group of the last region; None before any.
        recipe: the recipe of the last region that counted; None after a state was loaded.
        several: True if there is more than one amax group.
    """

    def __init__(self) -> None:
        self.current: AmaxGroup | None = None
        self.recipe: Recipe | None = None
        self.several = False
        self._groups: list[AmaxGroup] = []
        self._pending = 0  # where the clocks of amax groups to come begin

    @property
    def pending(self) -> int:
        """Regions since the last update in the amax group that has most; setting it sets all."""
        return max((group.pending for group in self._groups), default=self._pending)

    @pending.setter
    def pending(self, count: int) -> None:
        self.clocks = (count, [count] * len(self._groups))

    @property
    def clocks(self) -> tuple[int, list[int]]:
        """Pending regions, to be put back later.

        Returns:
            Those of amax groups to come, and a list of those of each amax group.
        """
        return self._pending, [group.pending for group in self._groups]

    @clocks.setter
    def clocks(self, counts: tuple[int, list[int]]) -> None:
        self._pending, known = counts
        for group, count in itertools.zip_longest(self._groups, known, fillvalue=self._pending):
            group.pending = count  # type: ignore[union-attr]

    def any_pending(self) -> bool:
        """Returns True if an update is pending, perhaps in an amax group to come."""
        return bool(self._pending or self.waiting())

    def waiting(self) -> list[AmaxGroup]:
        """Returns the amax groups with pending regions."""
        return [group for group in self._groups if group.pending]

    def enter(self, recipe: DelayedScaling, group: Any) -> AmaxGroup:
        """Returns the amax group of a region, now the current one, reduced over ``group``."""
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
        """Returns the amax groups with pending regions that ``flush_fp8_state(group)`` updates.

        Raises:
            ValueError: no region had this process group while others that reduce are pending.
        """
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
        """Takes over the clock of a state that was saved.

        Args:
            sync: of the state.
            number: of the amax group that it was in; None if it was in none.
            pending: regions that were pending there.
            is_copy: the state was pickled or copied, perhaps in a process that has trained itself:
                the regions pending in that process count as well.
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
        return next((group for group in self._groups if group.key == key), None)

    def _add(self) -> AmaxGroup:
        group = AmaxGroup(len(self._groups), self._pending)
        self._groups.append(group)
        self.several = len(self._groups) > 1
        return group


def _key(group: Any) -> tuple[int, ...] | str:
    """Returns the ``AmaxGroup.key`` of regions that reduce over ``group``."""
    if group is None:
        return "world"
    ranks = ranks_of(group)
    return "world" if ranks == ranks_of(None) else ranks


amax_groups = AmaxGroups()

# Where a state's scales are known to be equal, besides an amax group or a fingerprint.
_EVERYWHERE, _NOWHERE = "everywhere", "nowhere"


class ScaleSync:
    """Knows over which ranks one state's amaxes are reduced, and on which its scales are equal.

    Attributes:
        amax_group: of the region that the module ran in last; None before any.
        equal: True if all ranks of ``amax_group`` have the same scales and histories.
    """

    __slots__ = ("_where", "amax_group", "equal")

    def __init__(self) -> None:
        self.amax_group: AmaxGroup | None = None
        self.equal = False
        self._where: AmaxGroup | int | str = _EVERYWHERE

    def over(self, group: Any) -> bool:
        """Returns True if all ranks of ``group`` have the same scales, and go on having them."""
        return self.equal and self.reduced_over(group)

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales are made of the amaxes of all ranks of ``group``."""
        own = self.amax_group
        return own is not None and own.reduces and covers(own.group, group)

    def enter(self, amax_group: AmaxGroup) -> None:
        """Notes that the module runs in a region of ``amax_group``."""
        self.amax_group = amax_group
        self._find_equal()

    def renewed(self) -> None:
        """Notes that scales and histories have their initial values, on all ranks alike."""
        self._where = _EVERYWHERE
        self._find_equal()

    def loaded(self, fingerprint: int | None) -> None:
        """Notes that scales were loaded, which were equal on the ranks of ``fingerprint``."""
        self._where = _NOWHERE if fingerprint is None else fingerprint
        self._find_equal()

    def updated(self, amax_group: AmaxGroup, reduced: bool, equalised: bool) -> None:
        """Notes an update.

        Args:
            amax_group: whose update it was.
            reduced: the state's amaxes were reduced over its ranks.
            equalised: scales and histories were made equal on its ranks.
        """
        where = self._where
        if reduced and (equalised or self._equal_in(amax_group)):
            self._where = amax_group
        elif not (reduced and isinstance(where, AmaxGroup) and amax_group.covers(where)):
            self._where = _NOWHERE
        self._find_equal()

    def sure_in(self, amax_group: AmaxGroup) -> bool:
        """Returns True if this process has seen that scales are equal on ``amax_group``'s ranks."""
        return not isinstance(self._where, int) and self._equal_in(amax_group)

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of the ranks with equal scales, to be saved; None if unknown."""
        where = self._where
        if isinstance(where, AmaxGroup):
            return where.fingerprint()
        if where == _EVERYWHERE and self.amax_group is not None:
            return self.amax_group.fingerprint()
        return where if isinstance(where, int) else None

    def _equal_in(self, amax_group: AmaxGroup) -> bool:
        where = self._where
        if isinstance(where, AmaxGroup):
            return where.covers(amax_group)
        return where == _EVERYWHERE or where == amax_group.fingerprint()

    def _find_equal(self) -> None:
        own = self.amax_group
        self.equal = own is not None and own.reduces and self._equal_in(own)
