"""Over which ranks scales move together: what a region says, and what is true of a state's scales.

A scope is what the regions of one ``fp8_group`` have in common; those whose recipe does not reduce
amaxes have one, too. Each scope has its own clock and its own updates, of the states that ran in it
last. Scopes are numbered by first use, which is the same on all ranks.
"""

from __future__ import annotations

import zlib
from typing import Any

from ...comm.groups import covers, ranks_of

__all__ = ["AmaxGroup", "ScaleSync", "scope_key"]


class AmaxGroup:
    """The regions of one group.

    Attributes:
        number: how many scopes there were before.
        key: its ranks, "world", or "own" where nothing is reduced; None as long as only a loaded
            state has named the number.
        group: as the last region named it; None is the whole world.
        pending: regions since the last update.
        training: a gradient of them may be to come, whose scales must not move before.
        plan: of its updates, until a state changes.
    """

    __slots__ = ("group", "key", "number", "pending", "plan", "training")

    def __init__(self, number: int, pending: int) -> None:
        self.number = number
        self.key: tuple[int, ...] | str | None = None
        self.group: Any = None
        self.pending = pending
        self.training = False
        self.plan: Any = None

    @property
    def reduces(self) -> bool:
        return self.key != "own"

    def fingerprint(self) -> int:
        """The same number for the same ranks."""
        return zlib.crc32(repr(self.key).encode())


def scope_key(recipe: Any, group: Any) -> tuple[int, ...] | str:
    """What regions of one scope have in common."""
    if not recipe.reduce_amax:
        return "own"
    if group is None:
        return "world"
    ranks = ranks_of(group)
    return "world" if ranks == ranks_of(None) else ranks


# Where a state's scales and histories are known to be equal, besides a scope or a fingerprint.
_EVERYWHERE, _NOWHERE = "everywhere", "nowhere"


class ScaleSync:
    """Over which ranks the scales of one state are reduced, and over which they are equal.

    Attributes:
        scope: of the region that the module ran in last; None before any.
        equal: all ranks of ``scope`` have the same scales and histories.
    """

    __slots__ = ("_where", "equal", "scope")

    def __init__(self) -> None:
        self.scope: AmaxGroup | None = None
        self.equal = False
        self._where: AmaxGroup | int | str = _EVERYWHERE

    def over(self, group: Any) -> bool:
        """Whether all ranks of ``group`` have the same scales, and will have."""
        return self.equal and self.reduced_over(group)

    def reduced_over(self, group: Any) -> bool:
        """Whether the amaxes of all ranks of ``group`` make the next scales."""
        scope = self.scope
        return scope is not None and scope.reduces and covers(scope.group, group)

    def enter(self, scope: AmaxGroup) -> None:
        """The module runs in a region of ``scope``."""
        self.scope = scope
        self._find_equal()

    def renewed(self) -> None:
        """Scales and histories have their initial values, everywhere alike."""
        self._where = _EVERYWHERE
        self._find_equal()

    def loaded(self, fingerprint: int | None) -> None:
        """They were equal on the ranks of ``fingerprint`` when they were saved."""
        self._where = _NOWHERE if fingerprint is None else fingerprint
        self._find_equal()

    def updated(self, scope: AmaxGroup, reduced: bool, equalised: bool) -> None:
        """An update of ``scope``, with the amaxes of its ranks if ``reduced``, is done."""
        if reduced and (equalised or self._equal_in(scope)):
            self._where = scope
        elif not (
            reduced and isinstance(self._where, AmaxGroup) and scope_covers(scope, self._where)
        ):
            self._where = _NOWHERE
        self._find_equal()

    def sure_in(self, scope: AmaxGroup) -> bool:
        """Whether this process has seen that scales are equal in ``scope``."""
        return not isinstance(self._where, int) and self._equal_in(scope)

    def fingerprint(self) -> int | None:
        """Of the ranks with equal scales, to be saved."""
        where = self._where
        if isinstance(where, AmaxGroup):
            return where.fingerprint()
        if where == _EVERYWHERE and self.scope is not None:
            return self.scope.fingerprint()
        return where if isinstance(where, int) else None

    def _equal_in(self, scope: AmaxGroup) -> bool:
        where = self._where
        if isinstance(where, AmaxGroup):
            return scope_covers(where, scope)
        return where == _EVERYWHERE or where == scope.fingerprint()

    def _find_equal(self) -> None:
        scope = self.scope
        self.equal = scope is not None and scope.reduces and self._equal_in(scope)


def scope_covers(outer: AmaxGroup, inner: AmaxGroup) -> bool:
    """Whether every rank of ``inner`` is one of ``outer``."""
    return outer is inner or (outer.reduces and inner.reduces and covers(outer.group, inner.group))
