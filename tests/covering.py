"""Small choices of a test's cases in which every combination of a few parameters occurs."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def covering(cases: Sequence[Sequence[int]], strength: int) -> set[int]:
    """Returns the numbers of some of the cases, among which all combinations of values occur.

    A case has the id of its value of each parameter. Any ``strength`` parameters together have no
    values in ``cases`` that they do not have in the choice; with 0 it is the first case. Greedy:
    the case with the most new combinations comes next, of several the one with the most new ones of
    one parameter more, the first of those.
    """
    columns = [np.unique(column, return_inverse=True)[1] for column in np.array(cases).T]
    having, larger = (combinations_of(columns, n) for n in (strength, strength + 1))
    missing, rare = (np.ones(int(each.max()) + 1, dtype=bool) for each in (having, larger))
    left, chosen = np.arange(len(cases)), set()
    while len(left):
        new = missing[having[left]].sum(1)
        left, new = left[new > 0], new[new > 0]
        if len(left):
            best = left[new == new.max()]
            best = best[rare[larger[best]].sum(1).argmax()]
            chosen.add(int(best))
            missing[having[best]] = rare[larger[best]] = False
    return chosen


def combinations_of(columns: list[np.ndarray], count: int) -> np.ndarray:
    """The numbers of the combinations of ``count`` values that each case has."""
    numbers, begin = [], 0
    for at in combinations(columns, min(count, len(columns))):
        number = np.zeros(len(columns[0]), dtype=np.int64)
        for column in at:
            number = number * (int(column.max()) + 1) + column
        numbers.append(number + begin)
        begin += int(number.max()) + 1
    return np.stack(numbers, 1)
