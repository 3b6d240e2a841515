"""Rules of ops: which dimensions of arguments and results are the same, and which may be split.

A rule such as "x: r c, scale: _ -> rowwise: r c, columnwise: c r, dbias: + c, amax: ^" names the
arguments and results of a function of matrices and their dimensions. A name may stand for several
neighbouring dimensions, the same number in all terms, which the function sees as one. "r" are the
rows, into which ``jax.vmap`` usually folds a batch.

- "_" stands for an array that all devices have whole.
- "+" before a result's dimensions says that the result is a sum over the dimensions that it lacks,
  "^" that it is a maximum over them.
- "k/128" is a dimension with an entry for each 128 elements of "k": splitting "k" must not cut
  any of these blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_WORDS = {"r": "rows", "c": "columns", "m": "rows of the product", "n": "columns of the product"}


class Factor(NamedTuple):
    """Dimension number ``place`` of those that a name stands for; several arrays may have it."""

    name: str
    place: int


class Term(NamedTuple):
    """One argument or result of a rule.

    A dimension (name, block) has an entry for each ``block`` elements. ``reduction`` is "^" for a
    maximum over the dimensions it lacks, "+" for a sum.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    reduction: str

    def has(self, name: str) -> bool:
        """Returns True if a dimension is, or has blocks of, the dimension ``name``."""
        return any(each == name for each, _ in self.dims)


class Rule(NamedTuple):
    """A parsed rule; ``split`` may be sharded, ``ranks`` has the names of several dimensions."""

    function: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    split: frozenset[str]
    ranks: Mapping[str, int]

    def extents(self, shapes: Iterable[Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Returns the extents of every name, from the shapes of operands and perhaps of results."""
        found: dict[str, tuple[int, ...]] = {}
        for term, shape in zip((*self.operands, *self.results), shapes, strict=False):
            at = 0
            for name, block in term.dims:
                if block == 1:
                    count = self.ranks.get(name, 1)
                    found.setdefault(name, tuple(shape[at : at + count]))
                else:
                    count = len(blocks_of(found[name], block)[1])
                at += count
        return found

    def axis(self, term: Term, name: str, extents: Mapping[str, tuple[int, ...]]) -> int | None:
        """Returns the first dimension of an array that ``name`` stands for, None without one."""
        at = 0
        for each, block in term.dims:
            if each == name:
                return at
            single = block == 1
            at += self.ranks.get(each, 1) if single else len(blocks_of(extents[each], block)[1])
        return None

    def can_fold(self, name: str, extents: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns True if no block of elements along ``name`` goes on in a further batch element.

        Nor does any result add what several elements have.
        """
        terms = (*self.operands, *self.results)
        blocks = {block for term in terms for each, block in term.dims if each == name}
        rows = math.prod(extents[name])
        sums = any(term.reduction == "+" and not term.has(name) for term in self.results)
        return not sums and all(rows % block == 0 for block in blocks)

    def islands(self) -> dict[str, str]:
        """Maps every name to the representative of its island: names that share arrays.

        No array has dimensions of two islands, so that a mesh axis may split one dimension of each.
        """
        found: dict[str, str] = {}
        for term in (*self.operands, *self.results):
            names = [name for name, _ in term.dims]
            tied = {found.get(name, name) for name in names}
            for name in (*names, *(n for n, island in found.items() if island in tied)):
                found[name] = min(tied)
        return found

    def factors(
        self, term: Term, rank: int, extents: Mapping[str, tuple[int, ...]]
    ) -> list[Factor | None]:
        """Returns the factor of each dimension of an array; None for one that is never split."""
        found: list[Factor | None] = []
        for name, block in term.dims:
            count = self.ranks.get(name, 1)
            if block != 1:
                count = blocks_of(extents[name], block)[0] + 1
            found += [Factor(name, place) for place in range(count)]
        found += [None] * (rank - len(found))
        return [f if f is not None and f.name in self.split else None for f in found]

    def flat(self, term: Term, array: Any, extents: Mapping[str, tuple[int, ...]]) -> Any:
        """Returns an array with one dimension for each name."""
        if all(self.ranks.get(name, 1) == 1 for name, _ in term.dims):
            return array
        return array.reshape([math.prod(self._shape(dim, extents)) for dim in term.dims])

    def unflat(self, term: Term, array: Any, extents: Mapping[str, tuple[int, ...]]) -> Any:
        """Inverts ``flat``: returns an array in its original dimensions."""
        if all(self.ranks.get(name, 1) == 1 for name, _ in term.dims):
            return array
        shape: list[int] = []
        for extent, (name, block) in zip(array.shape, term.dims, strict=True):
            single = self.ranks.get(name, 1) == 1
            shape += (extent,) if single else self._shape((name, block), extents)
        return array.reshape(shape)

    def _shape(
        self, dim: tuple[str, int], extents: Mapping[str, tuple[int, ...]]
    ) -> tuple[int, ...]:
        name, block = dim
        return extents[name] if block == 1 else blocks_of(extents[name], block)[1]

    def check_blocks(
        self, extents: Mapping[str, tuple[int, ...]], parts: Mapping[Factor, int]
    ) -> None:
        """Raises ValueError if splitting cuts blocks of elements that share an entry."""
        blocks = {dim for term in (*self.operands, *self.results) for dim in term.dims}
        for name, block in sorted(blocks):
            places = [f.place for f in parts if f.name == name]
            if block == 1 or not places:
                continue
            last = max(places)
            own = math.prod(extents[name][last:]) // parts[Factor(name, last)]
            if own % block:
                operand = next(t.name for t in self.operands if (name, 1) in t.dims)
                words = _WORDS.get(name, f"elements along {name.upper()}")
                raise ValueError(
                    f"{self.function}: {operand} must be split between devices in multiples of"
                    f" {block} {words}, got {own}"
                )


def blocks_of(extents: Sequence[int], block: int) -> tuple[int, tuple[int, ...]]:
    """Returns the leading dimensions that blocks of flattened elements keep, and the shape."""
    for kept in reversed(range(len(extents))):
        rest = math.prod(extents[kept:])
        if rest % block == 0:
            return kept, (*extents[:kept], rest // block)
    return 0, (-(-math.prod(extents) // block),)


def parse(function: str, text: str, split: str, ranks: Mapping[str, int]) -> Rule:
    """Parses a rule; ``split`` has the names that may be sharded, separated by spaces."""

    def term(part: str) -> Term:
        name, _, text = part.partition(":")
        names = text.split()
        reduction = names.pop(0) if names and names[0] in ("^", "+") else ""
        pairs = (each.partition("/") for each in names if each != "_")
        dims = tuple((letter, int(block or 1)) for letter, _, block in pairs)
        return Term(name.strip(), dims, reduction)

    operands, _, results = text.partition("->")
    sides = [tuple(term(part) for part in side.split(",")) for side in (operands, results)]
    return Rule(function, sides[0], sides[1], frozenset(split.split()), dict(ranks))
