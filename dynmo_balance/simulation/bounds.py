"""Lower bounds of the step time: for any schedule and any partition, and for one stage per worker.

They show how much a search could still gain: ``partition --schedule auto`` and ``recipe --search`` report the step
over the largest bound. Each bound leaves out a reason to wait, so none is tight in general.

What all of them use. Units are the items between two permitted cuts. ``F(u)``, ``I(u)`` and ``W(u)`` are the times of
the forward pass, the input and the weight gradient of unit ``u`` at the speed of the fastest worker; ``M`` is the
number of microbatches. A unit is executed by one worker, which executes one operation at a time. The forward pass of a
microbatch passes the units in order, and its input gradients pass back in the opposite order to the first trained unit.

* **Fill**: order the workers by their first unit. The units before it are ``k`` or more for the ``k``-th worker
  (from 0), and the microbatch changed the worker ``k`` times or more. So the worker is idle until
  ``start(k) = F(0) + ... + F(k-1) + k transfers``. The rest of the step must suffice for the work:
  ``sum of speed * max(0, step - start(k)) >= M * work``. This is weakest if the fastest workers start first.
* **Unit**: the worker of ``u`` waits for the forward pass of all units before; then it executes ``M (F+I+W)(u)``; after
  its last input gradient, the units before it need theirs. Weight gradients of ``u`` can fill that wait, but only those
  of the microbatches whose activations of ``u`` fit the memory at once: ``C(u)``.
* **Packing**: of the ``k P + 1`` heaviest units, one of ``P`` workers has ``k + 1`` or more.
* **Path**: the last of ``M`` forward passes of ``u`` ends after ``F(0..u-1) + M F(u)``, and its microbatch still passes
  the units after ``u``, and back. The same holds for input gradients in the opposite direction.
* **Transfers**: with at least one unit per stage every worker has a unit. The ``P`` workers are ``P - n`` or more
  without those of the last ``n`` units, so a microbatch changes the worker ``P - 1 - n`` times or more on the way to
  the unit before these, and as often on the way back if nothing is frozen.

* **Memory**: until ``t`` = ``F(0) + F(1) + ...`` (and the transfers) no gradient can be computed, so workers execute
  forward passes only, and no activation is freed. If ``A`` is the most work of forward passes whose activations fit the
  memory of all workers together, ``step >= t + (M work - A) / speeds``. The same holds backward in time: in the last
  ``t'``, the input gradients of all units, no forward pass can be executed, and gradients only of the activations that
  are stored at its begin, which limits their work to ``A'``. The two intervals do not overlap, so
  ``step >= t + t' + (M work - A - A') / speeds``. See ``_most_work`` for ``A`` and ``A'``.

With an output layer in shards every worker also executes S and T of each microbatch, both after the whole forward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .._common.errors import UsageError
from ..costs.cost_window import SPEED_UNIT, SPLIT_SCHEDULES
from ..formats.plan import CUSTOM
from ..partition.problem import InfeasibleError, PartitionProblem, check_size


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of the step in ns; the largest is the bound.

    Attributes:
        work_ns: the work of all microbatches over the speed of all workers.
        fill_ns: the same, without the time before the first microbatch reaches a worker.
        unit_ns: the first microbatch has to reach a unit, then one worker executes that unit for all microbatches.
            After its last input gradient, the units before it still have to compute theirs.
        packing_ns: units are not divided, so some worker has several of the heaviest.
        path_ns: all microbatches pass one unit, and one of them all units forward and back.
        memory_ns: work over speed, where activations of all workers limit the forward passes before the first gradient
            and the gradients after the last forward pass; 0 if a worker has no memory limit.
    """

    work_ns: int
    fill_ns: int
    unit_ns: int
    packing_ns: int
    path_ns: int
    memory_ns: int = 0

    @property
    def step_ns(self) -> int:
        """The largest of them."""
        return max(self.work_ns, self.fill_ns, self.unit_ns, self.packing_ns, self.path_ns, self.memory_ns)

    @property
    def limit(self) -> str:
        """The name of the largest: ``work``, ``fill``, ``unit``, ``packing``, ``path`` or ``memory``."""
        names = ("unit", "path", "packing", "memory", "fill", "work")
        return max(names, key=lambda name: int(getattr(self, f"{name}_ns")))


@dataclass(frozen=True, kw_only=True)
class _Units:
    """The sums that the bounds use, in ns on a normal worker.

    Attributes:
        forward, back, whole_back: sums of the units before each cut: forward pass, input gradient, input and weight
            gradient. The frozen front passes no gradient back, so no later unit has to wait for one there.
        weights: the same sum of weight gradients.
        work: forward pass and both gradients.
        transfer_ns: the shortest transfer between two workers at any cut.
        back_transfer_ns: the same for gradients; 0 if a part of the model is frozen.
        empty_transfer_ns: the shortest transfer of a stage that may be empty: one before the first unit sends nothing.
    """

    forward: Sequence[int]
    back: Sequence[int]
    whole_back: Sequence[int]
    weights: Sequence[int]
    work: Sequence[int]
    transfer_ns: int
    back_transfer_ns: int
    empty_transfer_ns: int

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.work) - 1


def _units(problem: PartitionProblem) -> _Units:
    chain = problem.chain
    frozen = chain.frozen_items
    inputs = [0] * frozen + list(chain.costs.backward_input_ns[frozen:])
    back = chain.prefix_at_cuts(inputs)
    weights = chain.prefix_at_cuts(chain.costs.backward_weight_ns)
    # Behind the last unit only an empty stage receives anything.
    cuts = chain.cuts[1:-1] if problem.min_units else chain.cuts[1:]
    transfers = [problem.transfer_ns(chain.items[cut - 1].boundary_bytes) for cut in cuts]
    return _Units(
        forward=chain.prefix_at_cuts(chain.costs.forward_ns),
        back=back,
        whole_back=[a + b for a, b in zip(back, weights, strict=True)],
        weights=weights,
        work=chain.prefix_at_cuts(chain.work_ns),
        transfer_ns=min(transfers, default=0),
        back_transfer_ns=0 if frozen else min(transfers, default=0),
        empty_transfer_ns=problem.transfer_ns(0),
    )


def _at_least(work: int, rate: int) -> int:
    """The time in ns of ``work`` ns at ``rate`` parts per million of the normal speed, rounded up.

    Rounding up keeps the bound valid and makes it tighter, because steps are whole nanoseconds.
    """
    return -(-work * SPEED_UNIT // rate)


def _fill(units: _Units, speeds: Sequence[int], work: int, changes: bool, shards: bool) -> int:
    """The bound ``fill``.

    Args:
        units: sums of the units.
        speeds: of all workers, in parts per million.
        work: of all microbatches, in ns on a normal worker.
        changes: whether every worker has a unit.
        shards: whether workers without a unit have work, too.
    """
    found, capacity, offsets = 0, 0, 0
    transfer = units.transfer_ns if changes else 0
    for k, speed in enumerate(sorted(speeds, reverse=True)):
        if k >= units.count and not shards:
            break
        start = _at_least(units.forward[min(k, units.count)], max(speeds)) + k * transfer
        capacity += speed
        offsets += speed * start
        # Any number of workers may be used, so the step is at least the smallest of the sums that count the first few.
        step = -(-(work * SPEED_UNIT + offsets) // capacity)
        found = step if not k else min(found, step)
    return found


def _packing(loads: Sequence[int], workers: int) -> int:
    """The least possible load of the worker with the largest, from the heaviest of ``loads`` on ``workers``."""
    ordered = sorted(loads, reverse=True)
    return max(sum(ordered[k * workers - k : k * workers + 1]) for k in range((len(ordered) - 1) // workers + 1))


def _pending(problem: PartitionProblem) -> list[int]:
    """For each unit the most microbatches whose activations the memory of any worker holds at once."""
    chain, most = problem.chain, problem.microbatches
    limits = [slot.memory_bytes for slot in problem.slots if slot.memory_bytes is not None]
    if len(limits) < len(problem.slots):
        return [most] * (len(chain.cuts) - 1)
    static, stored = (pairwise(chain.prefix_at_cuts(sizes)) for sizes in (chain.static_bytes, chain.stored_bytes))
    rooms = [max(limits) - (end - begin) for begin, end in static]
    sizes = [end - begin for begin, end in stored]
    # A unit that stores nothing has all microbatches at once.
    return [min(most, max(1, room // size)) if size else most for room, size in zip(rooms, sizes, strict=True)]


def _most_work(inside: Sequence[int], outside: Sequence[int], sizes: Sequence[int], room: int, count: int) -> int:
    """The most work of ``count`` microbatches whose activations fit ``room`` bytes, at least, in ns.

    A microbatch that has passed a unit forward has passed all before it, and so it has backward in time. Its work is
    that of the units up to some unit, and of those behind it only what needs no gradient from there. With any price
    ``p`` per byte, the work is at most ``p room`` plus ``count`` times the largest work of one microbatch minus the
    price of its bytes (weak duality). Of the prices at which two choices are equal, the best is taken.

    Args:
        inside: work on each unit up to the last that the microbatch passed, in ns.
        outside: work on each unit behind it, in ns.
        sizes: activations of one microbatch on each unit, in bytes.
        room: bytes for activations.
        count: number of microbatches.
    """
    prices = {(0, 1)}
    done = stored = 0
    for own, other, size in zip(inside, outside, sizes, strict=True):
        done, stored = done + own, stored + size
        prices.update((work, total) for work, total in ((own, size), (other, size), (done, stored)) if total)

    def most(price: int, unit: int) -> int:
        """``unit`` times the bound with ``price / unit`` ns per byte."""
        # First the value if the microbatch has passed no unit.
        beyond = sum(max(0, unit * other - price * size) for other, size in zip(outside, sizes, strict=True))
        passed, best = 0, beyond
        for own, other, size in zip(inside, outside, sizes, strict=True):
            passed += unit * own - price * size
            beyond -= max(0, unit * other - price * size)
            best = max(best, passed + beyond)
        return price * room + count * best

    # The bound is convex in the price, as a sum of maxima of linear functions: bisection finds the least of them.
    ordered = sorted({Fraction(*price) for price in prices})
    low, high = 0, len(ordered) - 1
    while low < high:
        middle = (low + high) // 2
        here, above = ordered[middle], ordered[middle + 1]
        value, next_value = (most(each.numerator, each.denominator) for each in (here, above))
        if value * above.denominator <= next_value * here.denominator:
            high = middle
        else:
            low = middle + 1
    price, unit = ordered[low].numerator, ordered[low].denominator
    return -(-most(price, unit) // unit)


def _memory(problem: PartitionProblem, units: _Units, work: int, hops: int) -> int:
    """The bound ``memory``.

    Args:
        problem: the problem.
        units: sums of the units.
        work: of all microbatches, in ns on a normal worker.
        hops: the least number of times that a microbatch changes the worker on the way to the last unit.
    """
    chain, microbatches = problem.chain, problem.microbatches
    caps = [slot.memory_bytes for slot in problem.slots if slot.memory_bytes is not None]
    # Costs without backward times may stand for anything; their activations are never freed.
    if len(caps) < len(problem.slots) or not units.whole_back[-1]:
        return 0
    room = sum(caps) - sum(chain.static_bytes)
    if room < 0:
        return 0  # no partition fits; the solvers report it
    speeds = [slot.speed_ppm for slot in problem.slots]
    fastest, whole = max(speeds), sum(speeds)

    def each(prefix: Sequence[int]) -> list[int]:
        return [after - before for before, after in pairwise(prefix)]

    sizes, forward, back = each(chain.prefix_at_cuts(chain.stored_bytes)), each(units.forward), each(units.whole_back)
    # Rounded down: a shorter interval without gradients is certain, a longer one is not.
    begin = units.forward[-1] * SPEED_UNIT // fastest + hops * units.transfer_ns
    end = units.back[-1] * SPEED_UNIT // fastest + hops * units.back_transfer_ns
    ahead = min(begin * whole // SPEED_UNIT + 1, _most_work(forward, [0] * units.count, sizes, room, microbatches))
    behind = end * whole // SPEED_UNIT + 1
    # Passes of shards free no activations, and are not counted by their bytes.
    if chain.vocabulary is None:
        behind = min(behind, _most_work(back, each(units.weights), sizes, room, microbatches))
    return begin + end + max(0, _at_least(work - ahead - behind, whole))


def bounds_of(problem: PartitionProblem) -> Bounds:
    """The bounds of a problem, for any order of operations, number of stages per worker, placement and partition.

    With memory limits the bounds hold for what fits them. The proofs are at the top of the module.

    Args:
        problem: chain, workers and microbatches; the schedule has no effect.
    """
    chain, microbatches = problem.chain, problem.microbatches
    speeds = [slot.speed_ppm for slot in problem.slots]
    fastest, workers = max(speeds), len(speeds)
    units = _units(problem)
    each = [
        (
            units.forward[at + 1] - units.forward[at],
            units.back[at + 1] - units.back[at],
            units.weights[at + 1] - units.weights[at],
            units.work[at + 1] - units.work[at],
        )
        for at in range(units.count)
    ]
    shards = chain.vocabulary
    passes, least = 0, 0
    if shards is not None:
        passes = shards.forward_ns + shards.weight_ns
        least = min(shards.share(passes, at, workers) for at in range(workers))
    # With empty stages permitted, a worker may be left out.
    changes = problem.min_units > 0 and shards is None
    hops = [max(0, workers - units.count + at) if changes else 0 for at in range(units.count)]
    pending = _pending(problem)
    # Times on the fastest worker: a partition may put any unit on any worker, so only that speed is certain.
    unit = max(
        _at_least(units.forward[at] + microbatches * work, fastest)
        + hops[at] * units.transfer_ns
        + max(
            0,
            _at_least(units.back[at], fastest)
            + hops[at] * units.back_transfer_ns
            - _at_least(pending[at] * weight, fastest),
        )
        for at, (_, _, weight, work) in enumerate(each)
    )
    path = units.forward[-1] + units.back[-1]
    path += (microbatches - 1) * max(max(forward, back) for forward, back, _, _ in each)
    total = microbatches * (units.work[-1] + passes)
    return Bounds(
        work_ns=_at_least(total, sum(speeds)),
        fill_ns=_fill(units, speeds, total, changes, shards is not None),
        unit_ns=unit,
        packing_ns=_at_least(microbatches * (_packing([work for _, _, _, work in each], workers) + least), fastest),
        path_ns=_at_least(path, fastest) + hops[-1] * (units.transfer_ns + units.back_transfer_ns),
        memory_ns=_memory(problem, units, total, hops[-1]),
    )


def partition_bound_ns(problem: PartitionProblem) -> int:
    """The lower bound of a step over all partitions with one stage per worker, in the order of the workers, in ns.

    With it, the distance of a plan to the bound of any schedule is divided into that of its partition (to this bound)
    and that of its schedule (of this bound to ``bounds_of``). The bound is the shortest step for which stages that
    satisfy these conditions reach the end of the model, for every stage ``s`` of ``P``:

    * it waits for the first microbatch, executes its work, and the stages before it need their backward passes for the
      last one; with a split backward pass, weight gradients can fill that wait;
    * with ``1f1b`` it executes ``P - s`` forward passes before its first backward pass, for which a microbatch has
      passed all stages after it forward and back. The other ``M - (P - s)`` forward passes and all backward passes
      follow. Microbatch ``m + P - s`` starts there after the backward pass of ``m``, so that the times from forward to
      backward of every ``P - s``-th microbatch follow one another;
    * with a schedule by name, its activations in flight and its static bytes fit its worker.

    A stage that begins later permits the same end, or a later one: the wait grows by the time of one microbatch where
    the work shrinks by that of all.

    Args:
        problem: with one stage per worker, and whether its schedule splits the backward pass; pins and ties are
            ignored.

    Raises:
        InfeasibleError: no partition fits the memory.
        UsageError: there are several stages per worker or too few units, or the output layer is in shards.
    """
    if problem.virtual_stages != 1 or problem.chain.vocabulary is not None:
        raise UsageError("the bound of partitions needs one stage per worker and a whole output layer")
    check_size(problem)
    bounds, units = bounds_of(problem), _units(problem)
    # The load of one stage is at most the whole work; doubled for what the slowest worker adds by waiting.
    slowest = min(slot.speed_ppm for slot in problem.slots)
    path = units.forward[-1] + units.whole_back[-1]
    high = _at_least((problem.microbatches + 2) * units.work[-1] + path, slowest)
    high += 2 * len(problem.slots) * units.transfer_ns
    low = bounds.step_ns - 1
    if not _is_possible(problem, units, high):
        raise InfeasibleError(
            f"no partition with one stage per worker fits the memory under {problem.schedule}; use more workers, more"
            " memory or several stages per worker"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if _is_possible(problem, units, middle):
            high = middle
        else:
            low = middle
    return high


def _memory_limits(problem: PartitionProblem, units: _Units) -> list[list[int]]:
    """For each stage and begin of it the last cut up to which the worker's memory suffices."""
    free = [[units.count] * (units.count + 1) for _ in problem.slots]
    # An order made for the costs decides itself how many microbatches are in flight.
    if problem.schedule == CUSTOM:
        return free
    static, stored = (problem.chain.prefix_at_cuts(v) for v in (problem.chain.static_bytes, problem.chain.stored_bytes))
    for row, slot, count in zip(free, problem.slots, problem.in_flight, strict=True):
        if slot.memory_bytes is None:
            continue
        needs = [a + count * b for a, b in zip(static, stored, strict=True)]
        for begin in range(units.count + 1):
            row[begin] = bisect_right(needs, needs[begin] + slot.memory_bytes) - 1
    return free


def _is_possible(problem: PartitionProblem, units: _Units, step_ns: int) -> bool:
    """Whether some partition with one stage per worker satisfies the conditions of ``partition_bound_ns``."""
    limits = _memory_limits(problem, units)
    least, stages = problem.min_units, len(problem.slots)
    # Where a stage may begin. Not the last place alone: with a minimum of units, the next stage might not fit there.
    begins = [0]
    for stage in range(stages):
        ends: list[int] = []
        longest = 0
        for begin in begins:
            longest = max(longest, begin)
            limit = limits[stage][begin]
            while longest < limit and _fits(problem, units, stage, begin, longest + 1, step_ns):
                longest += 1
            # Every shorter stage fits, too.
            ends.extend(range(max(begin + least, ends[-1] + 1 if ends else 0), longest + 1))
        begins = ends
    return bool(begins) and begins[-1] == units.count


def _hops(problem: PartitionProblem, units: _Units, stage: int, begin: int) -> tuple[int, int]:
    """The least time in ns of the transfers of a microbatch to a stage that begins at unit ``begin``, and back."""
    if problem.min_units or not stage:
        return stage * units.transfer_ns, stage * units.back_transfer_ns
    # Empty stages pass the microbatches on, too. But those before the first unit send no bytes and get no gradient.
    if not begin:
        return stage * units.empty_transfer_ns, 0
    return (stage - 1) * units.empty_transfer_ns + units.transfer_ns, units.back_transfer_ns


def _fits(problem: PartitionProblem, units: _Units, stage: int, begin: int, end: int, step_ns: int) -> bool:
    """Whether the units from ``begin`` to ``end`` as ``stage`` satisfy the conditions of ``partition_bound_ns``."""
    microbatches, stages = problem.microbatches, len(problem.slots)
    speed, fastest = problem.slots[stage].speed_ppm, max(slot.speed_ppm for slot in problem.slots)
    split = problem.schedule in SPLIT_SCHEDULES
    forward = units.forward[end] - units.forward[begin]
    weight = units.weights[end] - units.weights[begin]
    back = units.whole_back[end] - units.whole_back[begin]
    there, back_there = _hops(problem, units, stage, begin)

    def scaled(elsewhere: int, here: int, transfers: int) -> int:
        """Times in ns on the fastest worker and on this one, and of transfers, times both speeds."""
        return SPEED_UNIT * (elsewhere * speed + here * fastest) + transfers * speed * fastest

    room = step_ns * speed * fastest
    work = scaled(units.forward[begin], microbatches * (forward + back), there)
    if split:
        after = scaled(units.back[begin], -microbatches * weight, back_there)
    else:
        after = scaled(units.whole_back[begin], 0, back_there)
    if work + max(0, after) > room:
        return False
    if problem.schedule != "1f1b" or not back:
        return True
    ahead = min(microbatches, stages - stage)
    trips = 1 + (microbatches - 1) // (stages - stage)
    rest = (microbatches - 1) % (stages - stage)
    after = units.forward[-1] + units.whole_back[-1] - units.forward[end] - units.whole_back[end]
    round_trip = scaled(
        units.forward[begin] + units.whole_back[begin] + trips * after,
        trips * (forward + back) + rest * back,
        there + back_there + trips * (stages - 1 - stage) * (units.transfer_ns + units.back_transfer_ns),
    )
    if round_trip > room:
        return False
    others = units.forward[-1] + units.whole_back[-1] - forward - back
    own = (1 + microbatches - ahead) * forward + microbatches * back
    transfers = there + back_there + (stages - 1 - stage) * (units.transfer_ns + units.back_transfer_ns)
    return scaled(others, own, transfers) <= room
