"""A partition and an order of operations made for each other: the schedule ``custom``.

For a partition, ``schedules.justified_order`` makes an order that fits the memory. In each round, of hundreds of
partitions near the current one, those that no bound rules out are drawn by their load, and a few get orders of their
own. With an output layer in shards, orders are made by the rules of ``schedules.list_scheduler``, and partitions are
ranked by simulation under the current order (``simulation.batched``). This is a heuristic with a fixed number of
rounds and a fixed seed, so it is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .._common.errors import DynmoError
from ..costs.cost_window import SPEED_UNIT
from ..formats.plan import CUSTOM
from ..partition.balance import balance
from ..partition.exact import Solution
from ..partition.interleaved import Array, WorkerLoads, make_worker_loads, neighbors, random_neighbors
from ..partition.problem import PartitionProblem
from ..schedules.justified_order import START_RULES, justified_order
from ..schedules.list_scheduler import RULES, OperationTimes, list_order
from ..schedules.registry import Order
from ..simulation.batched import compile_order, costs_of, run_compiled
from ..simulation.bounds import bounds_of
from ..simulation.order_bound import order_bound_ns
from ..simulation.shard_passes import shards_of_workers
from ..simulation.simulator import predict, stage_costs
from .local_search import with_new_cuts

PLACEMENTS = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 3), ("interleaved-1f1b", 4))
"""Placements to try: the schedule that defines where stages are, and the stages per worker."""
NUM_BOUNDED = 24
"""Partitions per round whose bound over all orders is computed; those with the smallest get an order of their own."""
NUM_ORDERS = 4
"""Partitions per round that get an order: it takes four times as long as the bound."""
MIN_MEMORY_RATIO = 1.1
"""Step over the smallest bound over all orders of near partitions above which the memory is taken to be short."""
MAX_DESCENT, NUM_DESCENT = 60, 40
"""Shifts of cuts that may lower the bound over all orders at the start, and the number of partitions tried for each."""
LOAD_NOISE = 0.02
"""Share of the step by which partitions are drawn at random behind those with the smallest load."""
NUM_TRIALS = 6
"""The same with an output layer in shards, where partitions are ranked by simulation."""
SHARES = ((len(PLACEMENTS), 0.12), (2, 0.25), (1, None))
"""How many of the best placements continue, and for which share of the rounds; None: the rest."""
ACCEPTED_LOSS = 0.01
"""Share of the step by which a worse candidate may be accepted in the first round; it falls to 0, as in annealing."""
MAX_OPERATIONS = 8_000
"""Placements with more operations per step are skipped, because a round would take seconds."""


@dataclass(frozen=True, kw_only=True)
class ScheduledPartition:
    """A problem with its own order of operations, and the cuts that the order was made for.

    Attributes:
        start: the partition that the search started from, with the lower bound of its placement.
        problem: with ``order`` and ``layout``.
        cuts: cut indices.
        step_ns: the step in ns.
    """

    start: Solution
    problem: PartitionProblem
    cuts: tuple[int, ...]
    step_ns: int

    @property
    def solution(self) -> Solution:
        """The partition with its certificate."""
        return with_new_cuts(self.problem, self.start, self.cuts)


def operation_times(
    problem: PartitionProblem, boundaries: Sequence[int], *, with_passes: bool = False
) -> OperationTimes:
    """The operation times of a partition's stages.

    Args:
        problem: chain and workers.
        boundaries: ``[stages + 1]`` item positions.
        with_passes: whether the passes of an output layer in shards are included.
    """
    costs = stage_costs(problem, boundaries)
    static = [0] * len(problem.slots)
    for cost, position in zip(costs, problem.positions, strict=True):
        static[position] += cost.static_bytes
    # Of a worker with several stages ``problem.slot`` takes any: it subtracts the shards of the output layer.
    limits = [problem.slot(problem.positions.index(at)).memory_bytes for at in range(len(problem.slots))]
    return OperationTimes(
        forward=[cost.forward_ns for cost in costs],
        backward_input=[cost.backward_input_ns for cost in costs],
        backward_weight=[cost.backward_weight_ns for cost in costs],
        send=[cost.send_ns for cost in costs],
        trained=[cost.has_backward for cost in costs],
        positions=problem.positions,
        passes=(shards_of_workers(problem) or ()) if with_passes else (),
        stored=[cost.activation_bytes for cost in costs],
        room=[None if limit is None else limit - used for limit, used in zip(limits, static, strict=True)],
    )


class _PlacementSearch:
    """The search over one placement of stages on workers.

    Args:
        problem: with the placement.
        start: partition to start from.
        with_passes: whether orders are made for the passes of an output layer in shards, too.
    """

    def __init__(self, problem: PartitionProblem, start: Solution, *, with_passes: bool = False) -> None:
        layout, self.start, self.with_passes = problem.positions, start, with_passes
        self.problem = replace(problem, schedule=CUSTOM, layout=layout, current=None)
        self.positions = np.array(problem.chain.cuts, dtype=np.int64)
        self.loads: WorkerLoads = make_worker_loads(problem)
        # A fixed seed: the same profile must give the same plan.
        self.random = np.random.default_rng(0)
        most = problem.microbatches
        workers = len(problem.slots)
        # Microbatches in flight per stage: all, twice those of 1F1B's first worker, those, and half of those.
        self.caps = sorted({min(most, cap) for cap in (most, 2 * workers, workers, (workers + 1) // 2)}, reverse=True)
        self.rules: tuple[str, ...] = tuple(RULES)
        self.start_rules = START_RULES
        self.bound_ns = bounds_of(self.problem).step_ns
        # Of the fastest worker, so that the wait for a microbatch is not longer on any placement.
        fastest = max(slot.speed_ppm for slot in problem.slots)
        forward = problem.chain.prefix_at_cuts(problem.chain.costs.forward_ns)
        self.forward_ns = [before * SPEED_UNIT // fastest for before in forward]
        self.limited = any(slot.memory_bytes is not None for slot in problem.slots)

    def _boundaries(self, cuts: Sequence[int]) -> list[int]:
        return [self.problem.chain.cuts[cut] for cut in cuts]

    def order(self, cuts: Sequence[int], *, thorough: bool = False) -> ScheduledPartition | None:
        """The best order found for these cuts that fits the memory; None if none fits.

        Args:
            cuts: cut indices.
            thorough: whether to try all rules and improve several orders; it takes ten times as long.
        """
        lengths = operation_times(self.problem, self._boundaries(cuts), with_passes=self.with_passes)
        if self.problem.chain.vocabulary is not None:
            return self._order_by_rules(lengths, cuts)
        microbatches = self.problem.microbatches
        if thorough:
            found = justified_order(lengths, microbatches)
        else:
            found = justified_order(lengths, microbatches, self.start_rules, improved=1, rounds=2)
        return None if found is None else self._scheduled(found.order, found.step_ns, cuts)

    def _order_by_rules(self, lengths: OperationTimes, cuts: Sequence[int]) -> ScheduledPartition | None:
        # From the largest number in flight: fewer microbatches make longer bubbles, and only memory requires them.
        for cap in self.caps:
            made = [list_order(lengths, self.problem.microbatches, cap, rule) for rule in self.rules]
            fitting = [(step, at) for at, (order, step) in enumerate(made) if self._fits(order, cuts)]
            if fitting:
                step, at = min(fitting)
                return self._scheduled(made[at][0], step, cuts)
        return None

    def _scheduled(self, order: Order, step_ns: int, cuts: Sequence[int]) -> ScheduledPartition:
        problem = replace(self.problem, order=order)
        return ScheduledPartition(
            start=self.start, problem=problem, cuts=tuple(int(cut) for cut in cuts), step_ns=step_ns
        )

    def _fits(self, order: Order, cuts: Sequence[int]) -> bool:
        if not self.limited:
            return True
        # The order decides how many microbatches are in flight, so the memory is computed for each order.
        loads = make_worker_loads(replace(self.problem, order=order))
        return int(loads.excess_bytes(np.array([cuts], dtype=np.int64))[0]) == 0

    def select_rules(self, cuts: Sequence[int]) -> None:
        """Keep the two rules that are best for these cuts; each trial would otherwise make an order by every rule."""
        lengths = operation_times(self.problem, self._boundaries(cuts), with_passes=self.with_passes)
        microbatches = self.problem.microbatches
        if self.problem.chain.vocabulary is None:
            found = justified_order(lengths, microbatches, improved=1, rounds=0)
            self.start_rules = self.start_rules if found is None else found.rules[:2]
            return
        steps = {rule: list_order(lengths, microbatches, self.caps[0], rule)[1] for rule in RULES}
        self.rules = tuple(sorted(steps, key=lambda rule: steps[rule])[:2])

    def step(self, now: ScheduledPartition, best_ns: int) -> ScheduledPartition:
        """The best partition near the current one, with its order or a new one; it may be worse.

        Args:
            now: the current partition.
            best_ns: the shortest step found so far, in ns.
        """
        pool = random_neighbors(self.random, self.loads.limits, now.cuts)
        if self.problem.chain.vocabulary is not None:
            return self._step_with_shards(now, pool)
        times = self._least_times(pool)
        # A bound above the best step rules a partition out.
        likely = np.flatnonzero(times < best_ns)
        noise = self.random.random(len(likely)) * LOAD_NOISE * best_ns
        drawn = likely[np.argsort(times[likely] + noise, kind="stable")][:NUM_BOUNDED]
        bounded = []
        for at in drawn:
            cuts = tuple(int(cut) for cut in pool[at])
            bound = order_bound_ns(self.problem, self._boundaries(cuts))
            if cuts != now.cuts and bound < best_ns:
                bounded.append((bound, cuts))
        # The bound does not know the memory: where that matters, the partitions with the smallest load count.
        is_short = self.limited and now.step_ns > MIN_MEMORY_RATIO * min((bound for bound, _ in bounded), default=0)
        chosen = [] if is_short else [cuts for _, cuts in sorted(bounded)[: NUM_ORDERS // 2]]
        chosen += [cuts for _, cuts in bounded if cuts not in chosen][: NUM_ORDERS - len(chosen)]
        made = (self.order(cuts) for cuts in chosen)
        return min((one for one in made if one is not None), key=lambda one: one.step_ns, default=now)

    def descend(self, cuts: Sequence[int]) -> list[int]:
        """Cuts near ``cuts`` whose bound over all orders no shift of a run of cuts lowers.

        The partition of the smallest bottleneck leaves no time for the wait of later stages, so that no order of it may
        be short.
        """
        now = [int(cut) for cut in cuts]
        least = order_bound_ns(self.problem, self._boundaries(now))
        for _ in range(MAX_DESCENT):
            pool = neighbors(self.loads.limits, now)
            times = self._least_times(pool)
            likely = np.flatnonzero(times < least)
            for at in likely[np.argsort(times[likely], kind="stable")][:NUM_DESCENT]:
                other = [int(cut) for cut in pool[at]]
                bound = order_bound_ns(self.problem, self._boundaries(other))
                if bound < least:
                    now, least = other, bound
                    break
            else:
                break
        return now

    def _least_times(self, pool: Array) -> Array:
        """A simple bound of many partitions: each worker waits for the first microbatch and executes its work.

        Args:
            pool: ``[candidates, stages + 1]`` cut indices.

        Returns:
            ``[candidates]`` in ns.
        """
        if not len(pool):
            return np.zeros(0, dtype=np.int64)
        arrival = np.array(self.forward_ns, dtype=np.int64)[pool[:, :-1]]
        firsts = [self.loads.positions.index(worker) for worker in range(self.loads.workers)]
        times = arrival[:, firsts] + self.loads.times(pool) * self.problem.microbatches
        return np.asarray(times.max(axis=1))

    def _step_with_shards(self, now: ScheduledPartition, pool: Array) -> ScheduledPartition:
        order = now.problem.order
        if not len(pool) or order is None:
            return now
        steps = run_compiled(compile_order(order), costs_of(self.problem, self.positions[pool]))
        found = []
        loads = make_worker_loads(now.problem)
        ranked = np.argsort(steps, kind="stable")
        # Half of the trials are drawn from further back: with an order of its own, such a partition may be the best.
        drawn = self.random.integers(NUM_TRIALS // 2, max(NUM_TRIALS, len(ranked) // 10), NUM_TRIALS // 2)
        for at in (*ranked[: NUM_TRIALS // 2], *(ranked[min(d, len(ranked) - 1)] for d in drawn)):
            same = pool[at : at + 1]
            if tuple(pool[at]) == now.cuts:
                continue
            # The simulation of many partitions at once knows no passes: it ranks them only.
            if not self.with_passes and steps[at] < now.step_ns and not loads.excess_bytes(same)[0]:
                found.append(replace(now, cuts=tuple(int(cut) for cut in pool[at]), step_ns=int(steps[at])))
            other = self.order(pool[at])
            if other is not None:
                found.append(other)
        return min(found, key=lambda one: one.step_ns, default=now)

    def run(self, first: ScheduledPartition, rounds: int) -> ScheduledPartition:
        """Search ``rounds`` rounds, or until the step is the lower bound of any schedule.

        Worse candidates than ``first`` and its successors are accepted ever less, and the best is restored regularly.
        """
        best = now = first
        for number in range(rounds):
            if best.step_ns <= self.bound_ns:
                break
            left = 1 - number / rounds
            other = self.step(now, best.step_ns)
            if other.step_ns <= now.step_ns * (1 + ACCEPTED_LOSS * left * self.random.random()):
                now = other
            if now.step_ns < best.step_ns:
                best = now
            elif number % 10 == 9:
                now = best
        if self.problem.chain.vocabulary is None and rounds:
            last = self.order(best.cuts, thorough=True)
            best = best if last is None or last.step_ns >= best.step_ns else last
        return best


def _with_bound_of_any_order(problem: PartitionProblem, solution: Solution) -> Solution:
    """The solution with a lower bound for any order of operations.

    The order decides how many microbatches are in flight, so memory limits prove nothing here.
    """
    if all(slot.memory_bytes is None for slot in problem.slots):
        return solution
    slots = tuple(replace(slot, memory_bytes=None) for slot in problem.slots)
    free = balance(replace(problem, slots=slots), "exact")
    return replace(solution, lower_bound_ns=free.lower_bound_ns, blocking=free.blocking)


def search_custom_schedules(problem: PartitionProblem, rounds: int) -> list[ScheduledPartition]:
    """The best partitions with orders of their own, best first: one for each placement.

    With an output layer in shards there are two searches: for orders of the stages alone, and for orders that leave
    room for the passes. The trainer places the passes in either by one rule, and the simulation decides.

    Args:
        problem: its schedule and stages per worker are ignored; its backward pass must be split.
        rounds: length of the search of the best placement, which ends early at the lower bound; the others get a part.
    """
    found = _search(problem, rounds)
    if problem.chain.vocabulary is None:
        return found
    best: dict[tuple[int, ...], ScheduledPartition] = {}
    for one in [*found, *_search(problem, rounds, with_passes=True)]:
        simulated = replace(one, step_ns=predict(one.problem, one.solution.boundaries).step_ns)
        placement = one.problem.positions
        if placement not in best or simulated.step_ns < best[placement].step_ns:
            best[placement] = simulated
    return sorted(best.values(), key=lambda one: one.step_ns)


def _start(placed: PartitionProblem, *, with_passes: bool) -> tuple[ScheduledPartition, _PlacementSearch] | None:
    """The first order of a placement, and its search; None if nothing fits.

    Starts are the exact partition without memory limits, because an order made for the memory may need less than the
    schedule of that name, and the one within the limits.
    """
    slots = tuple(replace(slot, memory_bytes=None) for slot in placed.slots)
    for trial in (replace(placed, slots=slots), placed):
        # A placement may be infeasible, such as too few units for three stages per worker, while others are not.
        try:
            start = _with_bound_of_any_order(placed, balance(trial, "exact"))
        except DynmoError:
            continue
        search = _PlacementSearch(placed, start, with_passes=with_passes)
        cuts = [int(cut) for cut in np.searchsorted(search.positions, np.array(start.boundaries))]
        starts = [cuts] if placed.chain.vocabulary is not None else [cuts, search.descend(cuts)]
        made = [one for one in (search.order(start, thorough=True) for start in starts) if one is not None]
        if made:
            first = min(made, key=lambda one: one.step_ns)
            search.select_rules(first.cuts)
            return first, search
    return None


def _search(problem: PartitionProblem, rounds: int, *, with_passes: bool = False) -> list[ScheduledPartition]:
    """The best partitions, one for each placement, best first; see :func:`search_custom_schedules`."""
    started: list[tuple[ScheduledPartition, _PlacementSearch]] = []
    for schedule, virtual in PLACEMENTS:
        if 3 * len(problem.slots) * virtual * problem.microbatches > MAX_OPERATIONS:
            continue
        if virtual > 1 and len(problem.slots) == 1:
            continue  # one worker has no transfers to overlap
        placed = replace(problem, schedule=schedule, virtual_stages=virtual, order=None, layout=None, current=None)
        found = _start(placed, with_passes=with_passes)
        if found is not None:
            started.append(found)
    # The placement that starts best is not always the one that ends best: a V may start 10 % behind, because the
    # partition of the smallest bottleneck leaves no time for the fill. So all get a few rounds, and the best ones more.
    spent = 0
    for count, share in SHARES:
        started.sort(key=lambda one: one[0].step_ns)
        length = round(rounds * share) if share else rounds - spent
        spent += length
        for at, (now, search) in enumerate(started[:count]):
            started[at] = (search.run(now, length), search)
            if started[at][0].step_ns <= search.bound_ns:
                break  # no other placement can be better
    return sorted((one for one, _ in started), key=lambda one: one.step_ns)
