"""A small part of a large matrix that still has all that must occur in some case, such as each pair of values."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import combinations


def pairs(values: Mapping[str, Hashable]) -> set[Hashable]:
    """Return each pair of factors with the values that a case has."""
    return set(combinations(sorted(values.items(), key=lambda item: item[0]), 2))


def cover(
    found_in: Mapping[str, Collection[Hashable]], costs: Mapping[str, float], always: Iterable[str] = ()
) -> set[str]:
    """Return names of cases that together have everything that any case has: `always`, and then again and again the
    case with the most that is new for its cost.
    """
    chosen = set(always)
    missing = {one for things in found_in.values() for one in things}
    missing.difference_update(*(found_in[name] for name in chosen))
    while missing:
        best = max(found_in, key=lambda name: len(missing.intersection(found_in[name])) / costs[name])
        chosen.add(best)
        missing.difference_update(found_in[best])
    return _without_repeats(found_in, costs, chosen, set(always))


def _without_repeats(
    found_in: Mapping[str, Collection[Hashable]], costs: Mapping[str, float], chosen: set[str], always: set[str]
) -> set[str]:
    """Drop the cases that later choices made superfluous, the most expensive first."""
    for name in sorted(chosen - always, key=lambda name: (-costs[name], name)):
        others = set[Hashable]().union(*(found_in[other] for other in chosen - {name}))
        if others.issuperset(found_in[name]):
            chosen.remove(name)
    return chosen
