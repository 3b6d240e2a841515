"""Small choices of a test's cases in which every combination of a few parameters occurs."""

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np


def covering(cases: Sequence[Sequence[int]], strength: int) -> set[int]:
    """Returns the numbers of some of the cases, among which all combinations of values occur.

    A case has the id of its value of each parameter. Any ``strength`` parameters together have no
    values in ``cases`` that they do not have in the choice; with 0 it is the first case. Greedy:
    the case with the most new combinations comes next, the first one of several.
    """
    columns = [np.unique(column, return_inverse=True)[1] for column in np.array(cases).T]
    sizes = [int(column.max()) + 1 for column in columns]
    having, count = [], 0  # the numbers of each case's combinations
    for at in combinations(range(len(columns)), min(strength, len(columns))):
        number = np.zeros(len(cases), dtype=np.int64)
        for i in at:
            number = number * sizes[i] + columns[i]
        having.append(number + count)
        count += prod(sizes[i] for i in at)
    having, left = np.stack(having, 1), np.arange(len(cases))
    missing, chosen = np.ones(count, dtype=bool), set()
    while len(left):
        new = missing[having].sum(1)
        best = new.argmax()
        chosen.add(int(left[best]))
        missing[having[best]] = False
        keep = missing[having].any(1)
        having, left = having[keep], left[keep]
    return chosen
