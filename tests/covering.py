"""Small choices of a test's cases in which every combination of a few parameters occurs."""

from collections.abc import Sequence
from itertools import combinations


def covering(cases: Sequence[Sequence[int]], strength: int) -> set[int]:
    """Returns the numbers of some of the cases, among which all combinations of values occur.

    A case has the id of its value of each parameter. Any ``strength`` parameters together have no
    values in ``cases`` that they do not have in the choice; with 0 it is the first case. Greedy:
    the case with the most new combinations comes next, the first one of several.
    """
    strength = min(strength, *map(len, cases))
    having = [
        {(at, *(case[i] for i in at)) for at in combinations(range(len(case)), strength)}
        for case in cases
    ]
    missing, chosen = set().union(*having), set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(having[i] & missing))
        chosen.add(best)
        missing -= having[best]
    return chosen
