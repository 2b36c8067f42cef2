"""Expert placement: which rank of an expert-parallel group has which experts, and how many replicas of the hot ones.

A rank computes the tokens of its experts, and all ranks wait for the one with the most. The problem: E experts with
tokens w_e, W in total, on G ranks with S slots each; an expert in several slots is replicated, and its tokens are
split. Minimize the largest load of a rank::

    tokens per expert --> _replicate --> _pack --> _improve (swaps) --> reshare (tokens by flow) --+
                     `--> fill_ranks: every rank gets W/G, where G*S >= E+G-1 ---------------------+--> best

``even`` shares split the tokens of an expert equally among its ranks, as DeepSeek's EPLB does
(https://github.com/deepseek-ai/EPLB); ``free`` shares split them as the balance needs. No rank has an expert twice: the
second slot would be wasted, as a rank computes all its tokens of an expert at once. Tokens are integers, so that the
comparison with the lower bound is exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._common.errors import UsageError

EVEN, FREE = "even", "free"
Ranks = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank its experts, ascending, with the tokens that it computes: ``(expert, tokens)``."""
# Attempts to move a replica from one expert to another; each packs the slots once.
_REPLICA_MOVES = 24


@dataclass(frozen=True, kw_only=True)
class ExpertProblem:
    """Experts of one layer, and the ranks that share them.

    Attributes:
        tokens: Tokens of each expert.
        ranks: Number of ranks.
        slots: Experts that a rank has room for.
        shares: ``even`` or ``free``.
        nodes: Number of nodes; neighboring ranks are on one node.
        groups: Number of groups of neighboring experts; with several nodes, each group is on one node, so that
            routing limited to groups stays inside nodes. 1 sets no limit.

    Raises:
        UsageError: the experts do not fit, or do not divide into nodes and groups.
    """

    tokens: tuple[int, ...]
    ranks: int
    slots: int
    shares: str = FREE
    nodes: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        experts, room = len(self.tokens), self.ranks * self.slots
        if room < experts:
            raise UsageError(f"{self.ranks} ranks of {self.slots} slots hold {room} experts; the layer has {experts}")
        if self.ranks % self.nodes:
            raise UsageError(f"{self.ranks} ranks are not a multiple of {self.nodes} nodes")
        if self.groups > 1 and (experts % self.groups or self.groups % self.nodes):
            raise UsageError(
                f"{self.groups} groups: must divide {experts} experts and be a multiple of {self.nodes} nodes"
            )

    @property
    def is_hierarchical(self) -> bool:
        """Whether each node has groups of its own."""
        return self.nodes > 1 and self.groups > 1


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts and token shares of each rank.

    Attributes:
        ranks: For each rank its ``(expert, tokens)``.
        lower_bound: No placement has a smaller largest load.
    """

    ranks: Ranks
    lower_bound: int

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return loads_of(self.ranks)

    @property
    def max_tokens(self) -> int:
        """Tokens of the rank with the most."""
        return max(self.loads)

    @property
    def is_optimal(self) -> bool:
        """Whether the largest load equals the bound."""
        return self.max_tokens == self.lower_bound


def loads_of(ranks: Ranks) -> tuple[int, ...]:
    """Tokens of each rank."""
    return tuple(sum(tokens for _, tokens in each) for each in ranks)


def contiguous(problem: ExpertProblem) -> Ranks:
    """Experts in order, the same number on each rank, without replicas: where a run starts."""
    experts = len(problem.tokens)
    return tuple(
        tuple((e, problem.tokens[e]) for e in range(experts * r // problem.ranks, experts * (r + 1) // problem.ranks))
        for r in range(problem.ranks)
    )


def lower_bound(problem: ExpertProblem) -> int:
    """A number of tokens that the heaviest rank has in every placement.

    The largest of: the mean load; the least t for which experts cut into parts of at most t fit into all slots; and,
    without spare slots, for each k the k+1 lightest of the kG+1 heaviest experts, since some rank has k+1 of them, and
    with them the S-k-1 lightest of all, since it has S.
    """
    tokens = np.sort(np.asarray(problem.tokens, dtype=np.int64))[::-1]
    room = problem.ranks * problem.slots
    bound = max(-(-int(tokens.sum()) // problem.ranks), _least_part(tokens, room))
    if room == len(tokens):
        sums = np.concatenate([[0], np.cumsum(tokens)])
        for k in range((len(tokens) - 1) // problem.ranks + 1):
            last, others = k * problem.ranks + 1, problem.slots - k - 1
            bound = max(bound, int(sums[last] - sums[last - k - 1] + sums[-1] - sums[len(tokens) - others]))
    return bound


def _least_part(tokens: np.ndarray, room: int) -> int:
    """The least t with ``sum ceil(w_e / t) <= room``; an expert without tokens needs a slot too."""
    low, high = 1, max(1, int(tokens.max()))
    while low < high:
        middle = (low + high) // 2
        if int(np.maximum(-(-tokens // middle), 1).sum()) <= room:
            high = middle
        else:
            low = middle + 1
    return low if tokens.max() else 0


def place(problem: ExpertProblem, current: Ranks | None = None) -> ExpertPlacement:
    """The placement of the least largest load that is found; among equals, the one that moves the fewest experts.

    Never worse than EPLB's placement without second slots of an expert on a rank, which is a candidate. With free
    shares and ``G*S >= E+G-1`` it is optimal.

    Args:
        problem: Tokens, ranks and slots.
        current: Where the experts are now.
    """
    if problem.is_hierarchical:
        return _place_on_nodes(problem, current)
    can_fill = problem.shares == FREE and problem.ranks * problem.slots >= len(problem.tokens) + problem.ranks - 1
    found = (*(() if can_fill else (_packed(problem), _eplb(problem))), _from_current(problem, current))
    candidates = [_to_ranks(problem, slots) for slots in found if slots is not None]
    if problem.shares == FREE:
        candidates = [reshare(problem, ranks) for ranks in candidates]
    if can_fill:
        candidates.append(fill_ranks(problem))
    if current is not None:
        candidates = [relabel(ranks, current, problem.nodes) for ranks in candidates]
        if fits(problem, current):
            candidates.append(shares_on(problem, current))
    best = min(candidates, key=lambda ranks: (max(loads_of(ranks)), _num_moves(current, ranks)))
    return ExpertPlacement(ranks=best, lower_bound=lower_bound(problem))


def fits(problem: ExpertProblem, ranks: Ranks) -> bool:
    """Whether a placement is one of the problem's experts, ranks and slots."""
    return (
        len(ranks) == problem.ranks
        and all(len(each) <= problem.slots for each in ranks)
        and {expert for each in ranks for expert, _ in each} == set(range(len(problem.tokens)))
    )


def shares_on(problem: ExpertProblem, ranks: Ranks) -> Ranks:
    """The same experts on the same ranks, with the shares of ``problem``."""
    even = _to_ranks(problem, [[expert for expert, _ in each] for each in ranks])
    return reshare(problem, even) if problem.shares == FREE else even


def moves(before: Ranks, after: Ranks) -> list[tuple[int, int, int]]:
    """``(expert, from rank, to rank)`` for each expert that a rank gets; the source is its lowest rank before."""
    source: dict[int, int] = {}
    for rank, experts in enumerate(before):
        for expert, _ in experts:
            source.setdefault(expert, rank)
    present = [{expert for expert, _ in experts} for experts in before]
    return [
        (expert, source[expert], rank)
        for rank, experts in enumerate(after)
        for expert, _ in experts
        if expert not in present[rank]
    ]


def _num_moves(before: Ranks | None, after: Ranks) -> int:
    """Experts that ranks get; on one node also those of other nodes, which no rank of it has before."""
    if before is None:
        return 0
    present = [{expert for expert, _ in experts} for experts in before]
    return sum(expert not in present[rank] for rank, experts in enumerate(after) for expert, _ in experts)


def fill_ranks(problem: ExpertProblem) -> Ranks:
    """Free shares with the mean load on every rank, rounded up; needs ``G*S >= E+G-1``.

    With g ranks left there are at most ``g(S-1)+1`` parts of experts. A window of S of them, ascending, whose sum
    reaches the target fills a rank; its last part is cut and the rest stays, so that S-1 parts are removed.
    """
    target = -(-sum(problem.tokens) // problem.ranks)
    parts = sorted((tokens, expert) for expert, tokens in enumerate(problem.tokens))
    ranks = []
    for _ in range(problem.ranks):
        start = _window(parts, problem.slots, target)
        filled: list[tuple[int, int]] = []
        left = target
        for tokens, expert in parts[start : start + problem.slots]:
            filled.append((expert, min(tokens, left)))
            left -= filled[-1][1]
            if tokens > filled[-1][1] or not left:
                break
        used = parts[start : start + len(filled)]
        rest = [(tokens - taken, expert) for (tokens, expert), (_, taken) in zip(used, filled, strict=True)]
        parts = sorted([*parts[:start], *parts[start + len(filled) :], *(part for part in rest if part[0])])
        ranks.append(tuple(sorted(filled)))
    return tuple(ranks)


def _window(parts: Sequence[tuple[int, int]], slots: int, target: int) -> int:
    """The first position of ``slots`` neighboring parts that reach the target; the last one if none does."""
    for start in range(max(0, len(parts) - slots) + 1):
        if sum(tokens for tokens, _ in parts[start : start + slots]) >= target:
            return start
    return max(0, len(parts) - slots)


def _replicate(tokens: np.ndarray, room: int, most: int) -> np.ndarray:
    """Number of slots of each expert, up to ``most``: each spare one goes to the one with the most tokens per slot."""
    counts = np.ones(len(tokens), dtype=np.int64)
    for _ in range(room - len(tokens)):
        at = int(np.argmax(np.where(counts < most, tokens / counts, -1)))
        if counts[at] == most:
            break  # every rank has every expert
        counts[at] += 1
    return counts


def _pack(tokens: np.ndarray, counts: np.ndarray, ranks: int, slots: int, *, twice: bool = False) -> list[list[int]]:
    """Experts of each rank: the heaviest slot first, to the lightest rank with room.

    Args:
        tokens: of each expert.
        counts: slots of each expert; at most ``ranks`` unless ``twice``.
        ranks, slots: ranks, and slots of each.
        twice: whether a rank may get an expert again.
    """
    weights = tokens / counts
    order = sorted((e for e in range(len(tokens)) for _ in range(counts[e])), key=lambda e: (-weights[e], e))
    placed: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    for expert in order:
        free = [rank for rank in range(ranks) if len(placed[rank]) < slots]
        others = [rank for rank in free if twice or expert not in placed[rank]]
        rank = min(others or free, key=lambda rank: (loads[rank], rank))
        if not others:
            # A full rank without the expert gets it for its lightest one that the rank with room does not have.
            without = [other for other in range(ranks) if expert not in placed[other]]
            given, other = min(
                ((each, other) for other in without for each in placed[other] if each not in placed[rank]),
                key=lambda one: (weights[one[0]], loads[one[1]], *one),
            )
            placed[other].remove(given)
            placed[other].append(expert)
            loads[other] += weights[expert] - weights[given]
            expert = given
        placed[rank].append(expert)
        loads[rank] += weights[expert]
    return placed


def _eplb(problem: ExpertProblem) -> list[list[int]]:
    """EPLB's packing, without second slots of an expert on a rank."""
    tokens, room = np.asarray(problem.tokens, dtype=np.int64), problem.ranks * problem.slots
    packed = _pack(tokens, _replicate(tokens, room, room), problem.ranks, problem.slots, twice=True)
    return [sorted(set(each)) for each in packed]


def _packed(problem: ExpertProblem) -> list[list[int]]:
    """EPLB's packing with distinct experts on a rank, improved by swaps and replicas that move between experts."""
    tokens = np.asarray(problem.tokens, dtype=np.int64)
    counts = _replicate(tokens, problem.ranks * problem.slots, problem.ranks)
    start = _pack(tokens, counts, problem.ranks, problem.slots)
    best, heaviest = _better(problem, start, _improve(tokens, counts, start))
    bound = lower_bound(problem)
    tried: set[tuple[int, int]] = set()
    while heaviest > bound and len(tried) < _REPLICA_MOVES:
        rank = int(np.argmax(loads_of(_to_ranks(problem, best))))
        takers = sorted((e for e in best[rank] if counts[e] < problem.ranks), key=lambda e: -tokens[e] / counts[e])[:2]
        # Where the loads are almost equal, the parts of a light expert even them out.
        light = [int(e) for e in np.argsort(tokens, kind="stable") if counts[e] < problem.ranks and e not in takers][:2]
        givers = sorted(np.flatnonzero(counts > 1), key=lambda e: tokens[e] / (counts[e] - 1))
        pairs = [(int(g), t) for t in takers + light for g in givers[:4] if g != t and (int(g), t) not in tried]
        if not pairs:
            break
        giver, taker = pairs[0]
        tried.add((giver, taker))
        other = counts.copy()
        other[giver] -= 1
        other[taker] += 1
        found = _pack(tokens, other, problem.ranks, problem.slots)
        found, load = _better(problem, found, _improve(tokens, other, found))
        if load < heaviest:
            best, heaviest, counts = found, load, other
    return best


def _better(problem: ExpertProblem, *found: list[list[int]]) -> tuple[list[list[int]], int]:
    """The placement of the least largest load, and this load; the first among equals."""
    rated = [(max(loads_of(_to_ranks(problem, slots))), index) for index, slots in enumerate(found)]
    load, index = min(rated)
    return found[index], load


def _from_current(problem: ExpertProblem, current: Ranks | None) -> list[list[int]] | None:
    """The current placement, improved by swaps; None where it does not fit or has free slots."""
    if current is None or not fits(problem, current):
        return None
    slots = [[expert for expert, _ in each] for each in current]
    counts = np.bincount([expert for each in slots for expert in each], minlength=len(problem.tokens))
    return _improve(np.asarray(problem.tokens, dtype=np.int64), counts, slots)


def _improve(tokens: np.ndarray, counts: np.ndarray, start: Sequence[Sequence[int]]) -> list[list[int]]:
    """Swap a slot of the heaviest rank with a lighter one of another rank while the larger of both loads falls."""
    weights = tokens / counts
    placed = [list(each) for each in start]
    loads = np.array([weights[each].sum() for each in placed])
    where = [(rank, at) for rank, each in enumerate(placed) for at in range(len(each))]
    rank_of = np.array([rank for rank, _ in where])
    for _ in range(4 * len(where)):
        heavy = int(np.argmax(loads))
        experts = np.array([placed[rank][at] for rank, at in where])
        falls = weights[placed[heavy]][:, None] - weights[experts][None, :]
        larger = np.maximum(loads[heavy] - falls, loads[rank_of] + falls)
        larger[:, rank_of == heavy] = np.inf
        for mine, expert in enumerate(placed[heavy]):
            # No rank gets an expert twice: the slot would be wasted.
            larger[mine, [expert in placed[rank] for rank in rank_of]] = np.inf
        larger[:, [each in placed[heavy] for each in experts]] = np.inf
        slot, other = divmod(int(np.argmin(larger)), len(where))
        if not larger[slot, other] < loads[heavy] * (1 - 1e-12):
            break
        rank, at = where[other]
        placed[heavy][slot], placed[rank][at] = placed[rank][at], placed[heavy][slot]
        loads[heavy], loads[rank] = weights[placed[heavy]].sum(), weights[placed[rank]].sum()
    return placed


def _to_ranks(problem: ExpertProblem, slots: Sequence[Sequence[int]]) -> Ranks:
    """Even shares: the tokens of an expert split over its slots in the order of the ranks."""
    counts = Counter(expert for each in slots for expert in each)
    done: Counter[int] = Counter()
    ranks = []
    for each in slots:
        shares: Counter[int] = Counter()
        for expert in each:
            tokens, at = problem.tokens[expert], done[expert]
            shares[expert] += tokens * (at + 1) // counts[expert] - tokens * at // counts[expert]
            done[expert] += 1
        ranks.append(tuple(sorted(shares.items())))
    return tuple(ranks)


def reshare(problem: ExpertProblem, ranks: Ranks) -> Ranks:
    """The same experts on each rank, with the shares of the least largest load: bisection over maximum flows."""
    hosts: dict[int, list[int]] = {}
    for rank, each in enumerate(ranks):
        for expert, _ in each:
            hosts.setdefault(expert, []).append(rank)
    fixed = [0] * len(ranks)
    for expert, on in hosts.items():
        if len(on) == 1:
            fixed[on[0]] += problem.tokens[expert]
    split = {expert: on for expert, on in hosts.items() if len(on) > 1}
    low = max(-(-sum(problem.tokens) // len(ranks)), *fixed)
    high = max(loads_of(ranks))
    best = {(expert, rank): tokens for rank, each in enumerate(ranks) for expert, tokens in each}
    while low < high:
        middle = (low + high) // 2
        found = _flow({e: problem.tokens[e] for e in split}, split, [middle - load for load in fixed])
        if found is None:
            low = middle + 1
        else:
            best.update(found)
            high = middle
    return tuple(tuple((expert, best[expert, rank]) for expert, _ in each) for rank, each in enumerate(ranks))


def _flow(
    tokens: dict[int, int], hosts: dict[int, list[int]], room: Sequence[int]
) -> dict[tuple[int, int], int] | None:
    """Tokens of each expert on each of its ranks, with at most ``room`` on a rank; None if they do not fit."""
    sent = {(expert, rank): 0 for expert, on in hosts.items() for rank in on}
    at_rank: dict[int, list[int]] = {}
    for expert, rank in sent:
        at_rank.setdefault(rank, []).append(expert)
    free = list(room)
    for expert, amount in sorted(tokens.items()):
        left = amount
        while left:
            path = _free_path(expert, hosts, at_rank, sent, free)
            if path is None:
                return None
            pushed = min([left, free[path[-1]], *(sent[path[i + 1], path[i]] for i in range(1, len(path) - 1, 2))])
            for i in range(0, len(path) - 1, 2):
                sent[path[i], path[i + 1]] += pushed
            for i in range(1, len(path) - 1, 2):
                sent[path[i + 1], path[i]] -= pushed
            free[path[-1]] -= pushed
            left -= pushed
    return sent


def _free_path(
    expert: int,
    hosts: dict[int, list[int]],
    at_rank: dict[int, list[int]],
    sent: dict[tuple[int, int], int],
    free: Sequence[int],
) -> list[int] | None:
    """A shortest path expert, rank, expert, rank, ... to a rank with room; None if there is none."""
    before: dict[tuple[str, int], tuple[str, int] | None] = {("expert", expert): None}
    queue = deque([("expert", expert)])
    while queue:
        node = queue.popleft()
        kind, number = node
        if kind == "rank" and free[number] > 0:
            path = []
            at: tuple[str, int] | None = node
            while at is not None:
                path.append(at[1])
                at = before[at]
            return path[::-1]
        if kind == "expert":
            following = [("rank", rank) for rank in hosts[number]]
        else:
            following = [("expert", other) for other in at_rank[number] if sent[other, number] > 0]
        for other in following:
            if other not in before:
                before[other] = node
                queue.append(other)
    return None


def relabel(ranks: Ranks, current: Ranks, nodes: int = 1) -> Ranks:
    """The same sets of experts, each on the rank of its node that has the most of them now: the fewest moves.

    Args:
        ranks: New placement.
        current: Placement now, of the same number of ranks; another number leaves ``ranks`` as they are.
        nodes: Number of nodes; sets stay on their node.
    """
    if len(ranks) != len(current):
        return ranks
    before = [{expert for expert, _ in each} for each in current]
    size = len(ranks) // nodes
    relabeled: list[tuple[tuple[int, int], ...]] = []
    for first in range(0, len(ranks), size):
        part = ranks[first : first + size]
        costs = [[-sum(expert in before[first + rank] for expert, _ in each) for rank in range(size)] for each in part]
        chosen: list[tuple[tuple[int, int], ...]] = [()] * size
        for each, rank in zip(part, assign(costs), strict=True):
            chosen[rank] = each
        relabeled.extend(chosen)
    return tuple(relabeled)


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row of a square matrix, all different, with the least sum (Kuhn 1955, shortest paths)."""
    size = len(costs)
    matrix = np.asarray(costs, dtype=np.int64).reshape(size, size)
    rows, columns = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)

    row_of = np.full(size + 1, -1)
    for row in range(size):
        row_of[size], column = row, size
        least = np.full(size, np.iinfo(np.int64).max // 4)
        before = np.full(size, size)
        is_done = np.zeros(size + 1, dtype=bool)
        while row_of[column] >= 0:
            is_done[column] = True
            at = int(row_of[column])
            reduced = matrix[at] - rows[at] - columns[:size]
            is_less = ~is_done[:size] & (reduced < least)
            least[is_less], before[is_less] = reduced[is_less], column
            following = int(np.argmin(np.where(is_done[:size], np.iinfo(np.int64).max, least)))
            step = least[following]
            rows[row_of[is_done]] += step
            columns[is_done] -= step
            least[~is_done[:size]] -= step
            column = following
        while column != size:
            row_of[column], column = row_of[before[column]], int(before[column])
    columns_of = [0] * size
    for column in range(size):
        columns_of[row_of[column]] = column
    return columns_of


def _place_on_nodes(problem: ExpertProblem, current: Ranks | None) -> ExpertPlacement:
    """Groups of experts on nodes, the heaviest first; then each node by itself."""
    per_group, per_node = len(problem.tokens) // problem.groups, problem.ranks // problem.nodes
    sums = np.asarray(problem.tokens, dtype=np.int64).reshape(problem.groups, per_group).sum(1)
    ones = np.ones(problem.groups, dtype=np.int64)
    start = _pack(sums, ones, problem.nodes, problem.groups // problem.nodes)
    packed = _improve(sums, ones, start)
    best: Ranks | None = None
    for groups_of in (start, packed) if packed != start else (start,):
        found: list[tuple[tuple[int, int], ...]] = []
        for node, groups in enumerate(_near_nodes(groups_of, current, per_group, per_node)):
            experts = [e for group in sorted(groups) for e in range(group * per_group, (group + 1) * per_group)]
            part = ExpertProblem(
                tokens=tuple(problem.tokens[e] for e in experts),
                ranks=per_node,
                slots=problem.slots,
                shares=problem.shares,
            )
            local = {expert: at for at, expert in enumerate(experts)}
            here = None
            if current is not None:
                before = current[node * per_node : (node + 1) * per_node]
                here = tuple(tuple((local[e], n) for e, n in each if e in local) for each in before)
            ranks = place(part, here).ranks
            found.extend(tuple(sorted((experts[e], tokens) for e, tokens in each)) for each in ranks)
        if best is None or max(loads_of(tuple(found))) < max(loads_of(best)):
            best = tuple(found)
    return ExpertPlacement(ranks=best or (), lower_bound=lower_bound(problem))


def _near_nodes(groups_of: list[list[int]], current: Ranks | None, per_group: int, per_node: int) -> list[list[int]]:
    """Sets of groups, each on the node that has most of their experts now."""
    if current is None or len(current) != len(groups_of) * per_node:
        return groups_of
    before = [
        Counter(expert // per_group for each in current[first : first + per_node] for expert, _ in each)
        for first in range(0, len(current), per_node)
    ]
    costs = [[-sum(node[group] for group in groups) for node in before] for groups in groups_of]
    chosen: list[list[int]] = [[] for _ in groups_of]
    for groups, node in zip(groups_of, assign(costs), strict=True):
        chosen[node] = groups
    return chosen
