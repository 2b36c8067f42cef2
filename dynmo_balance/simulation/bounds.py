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

With an output layer in shards every worker also executes S and T of each microbatch, both after the whole forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._common.errors import UsageError
from ..costs.cost_window import SPEED_UNIT, SPLIT_SCHEDULES
from ..partition.problem import PartitionProblem, check_size


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
    """

    work_ns: int
    fill_ns: int
    unit_ns: int
    packing_ns: int
    path_ns: int

    @property
    def step_ns(self) -> int:
        """The largest of them."""
        return max(self.work_ns, self.fill_ns, self.unit_ns, self.packing_ns, self.path_ns)

    @property
    def limit(self) -> str:
        """The name of the largest: ``work``, ``fill``, ``unit``, ``packing`` or ``path``."""
        names = ("unit", "path", "packing", "fill", "work")
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
    """

    forward: Sequence[int]
    back: Sequence[int]
    whole_back: Sequence[int]
    weights: Sequence[int]
    work: Sequence[int]
    transfer_ns: int
    back_transfer_ns: int

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
    transfers = [problem.transfer_ns(chain.items[cut - 1].boundary_bytes) for cut in chain.cuts[1:-1]]
    return _Units(
        forward=chain.prefix_at_cuts(chain.costs.forward_ns),
        back=back,
        whole_back=[a + b for a, b in zip(back, weights, strict=True)],
        weights=weights,
        work=chain.prefix_at_cuts(chain.work_ns),
        transfer_ns=min(transfers, default=0),
        back_transfer_ns=0 if frozen else min(transfers, default=0),
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
    static = chain.prefix_at_cuts(chain.static_bytes)
    stored = chain.prefix_at_cuts(chain.stored_bytes)
    return [
        min(most, max(1, (max(limits) - (static[at + 1] - static[at])) // max(1, stored[at + 1] - stored[at])))
        for at in range(len(chain.cuts) - 1)
    ]


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
      backward of every ``P - s``-th microbatch follow one another.

    A stage that begins later permits the same end, or a later one: the wait grows by the time of one microbatch where
    the work shrinks by that of all.

    Args:
        problem: with one stage per worker, and whether its schedule splits the backward pass; memory, pins
            and ties are ignored.

    Raises:
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
    while high - low > 1:
        middle = (low + high) // 2
        if _is_possible(problem, units, middle):
            high = middle
        else:
            low = middle
    return high


def _is_possible(problem: PartitionProblem, units: _Units, step_ns: int) -> bool:
    """Whether some partition with one stage per worker satisfies the conditions of ``partition_bound_ns``."""
    least, stages = problem.min_units, len(problem.slots)
    # Where a stage may begin. Not the last place alone: with a minimum of units, the next stage might not fit there.
    begins = [0]
    for stage in range(stages):
        ends: list[int] = []
        longest = 0
        for begin in begins:
            longest = max(longest, begin)
            while longest < units.count and _fits(problem, units, stage, begin, longest + 1, step_ns):
                longest += 1
            # Every shorter stage fits, too.
            ends.extend(range(max(begin + least, ends[-1] + 1 if ends else 0), longest + 1))
        begins = ends
    return bool(begins) and begins[-1] == units.count


def _fits(problem: PartitionProblem, units: _Units, stage: int, begin: int, end: int, step_ns: int) -> bool:
    """Whether the units from ``begin`` to ``end`` as ``stage`` satisfy the conditions of ``partition_bound_ns``."""
    microbatches, stages = problem.microbatches, len(problem.slots)
    speed, fastest = problem.slots[stage].speed_ppm, max(slot.speed_ppm for slot in problem.slots)
    split = problem.schedule in SPLIT_SCHEDULES
    forward = units.forward[end] - units.forward[begin]
    weight = units.weights[end] - units.weights[begin]
    back = units.whole_back[end] - units.whole_back[begin]
    # An empty stage passes the microbatches on, too.
    there, back_there = stage * units.transfer_ns, stage * units.back_transfer_ns

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
        (stage + trips * (stages - 1 - stage)) * (units.transfer_ns + units.back_transfer_ns),
    )
    if round_trip > room:
        return False
    others = units.forward[-1] + units.whole_back[-1] - forward - back
    own = (1 + microbatches - ahead) * forward + microbatches * back
    transfers = (stages - 1) * (units.transfer_ns + units.back_transfer_ns)
    return scaled(others, own, transfers) <= room
