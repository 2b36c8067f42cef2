"""Which cuts can be reached: the set of positions where stage ``p`` can end, kept as a few intervals.

With stages that may be empty, greedy furthest reach answers this. As soon as every stage must hold something, it does
not: a later stage may be unable to hold one particular unit, so an earlier stage must stop short of it.
"""

from __future__ import annotations

from .limits import Limits

Interval = tuple[int, int]


def reachable(limits: Limits, bottleneck: int) -> list[list[Interval]]:
    """For each position ``p`` the cuts at which ``p`` stages can end within the bottleneck, as closed intervals."""
    result: list[list[Interval]] = [[(0, 0)]]
    for stage in range(limits.stages):
        work = limits.places[stage].work_ns(bottleneck)
        low, high = limits.lowest[stage + 1], limits.highest[stage + 1]
        found: list[Interval] = []
        for first, last in result[-1]:
            for begin in range(first, last + 1):
                start = max(begin + limits.min_units, low)
                if start > high:
                    break
                end = min(limits.furthest(stage, begin, work), high)
                if end < start:
                    continue
                if found and start <= found[-1][1] + 1:
                    found[-1] = (found[-1][0], max(found[-1][1], end))
                else:
                    found.append((start, end))
                if end == high:
                    break  # later beginnings reach no further, and leave no gap below that is not filled
        result.append(found)
        if not found:
            break
    return result


def succeeds(limits: Limits, sets: list[list[Interval]]) -> bool:
    """Whether all stages together reach the end."""
    return len(sets) == limits.stages + 1 and any(a <= limits.units <= b for a, b in sets[-1])


def walk_back(limits: Limits, sets: list[list[Interval]], bottleneck: int) -> tuple[int, ...]:
    """One partition within the bottleneck, each stage beginning as late as it can."""
    cuts = [limits.units]
    for stage in range(limits.stages - 1, -1, -1):
        end = cuts[-1]
        first = limits.earliest(stage, end, limits.places[stage].work_ns(bottleneck))
        last = end - limits.min_units
        cuts.append(next(min(b, last) for a, b in reversed(sets[stage]) if a <= last and min(b, last) >= first))
    return tuple(reversed(cuts))
