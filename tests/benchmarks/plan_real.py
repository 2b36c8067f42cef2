"""The simulator against real steps of several processes, before and after ``calibrate``, on even and uneven stages.

    python tests/benchmarks/plan_real.py [--processes 4] [--microbatches 8] [--steps 5] [--unit-ms 12]

Processes run torch's own schedules (GPipe, 1F1B, interleaved 1F1B with two stages each) over gloo. Their layers sleep
for a stated time forward and twice as long backward, so that many stages overlap on two cores. Each layer measures its
own forward and backward, as the trainer's profiler does, and the medians are the costs that the simulator gets; the
step is the time between two barriers, the median over the steps. "Before" is the simulator without any constant,
"after" with the overhead of an operation that ``calibrate`` finds on the even stages of the three schedules; the
uneven ones were not used for it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from dynmo_balance._common.console import emit
from dynmo_balance.analysis.calibrate import Sample, calibrate
from dynmo_balance.costs.cost_window import ItemCosts
from dynmo_balance.formats.profile import Item
from dynmo_balance.partition.problem import Chain, PartitionProblem, WorkerSlot
from dynmo_balance.simulation.simulator import predict

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}
WIDTH = 8


class Sleep(torch.autograd.Function):
    """The identity, which takes a stated time forward and backward and notes how long it took."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s, notes):
        started = time.perf_counter_ns()
        time.sleep(forward_s)
        ctx.backward_s, ctx.notes = backward_s, notes
        result = x.clone()
        notes[0].append(time.perf_counter_ns() - started)
        return result

    @staticmethod
    def backward(ctx, gradient):
        started = time.perf_counter_ns()
        time.sleep(ctx.backward_s)
        result = gradient.clone()
        ctx.notes[1].append(time.perf_counter_ns() - started)
        return result, None, None, None


class Stage(torch.nn.Module):
    """Some layers that sleep."""

    def __init__(self, layers: list[tuple[float, float]]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.layers = layers
        self.notes: list[tuple[list[int], list[int]]] = [([], []) for _ in layers]

    def forward(self, x):
        x = x * self.scale
        for (forward_s, backward_s), notes in zip(self.layers, self.notes, strict=True):
            x = Sleep.apply(x, forward_s, backward_s, notes)
        return x


@dataclass(frozen=True)
class Case:
    schedule: str
    even: bool
    layers_s: tuple[float, ...]
    boundaries: tuple[int, ...]


def cases(processes: int, unit_s: float) -> list[Case]:
    """Even and uneven stages for each schedule; layers of one to three units."""
    found = []
    for schedule in SCHEDULES:
        stages = processes * (2 if schedule == "interleaved-1f1b" else 1)
        unit = unit_s / (2 if schedule == "interleaved-1f1b" else 1)
        even = tuple(2 * unit for _ in range(stages))
        found.append(Case(schedule, True, even, tuple(range(stages + 1))))
        uneven = tuple(unit * (1 + (5 * layer) % 3) for layer in range(stages + stages // 2))
        cuts = [0]
        for stage in range(stages):
            cuts.append(min(cuts[-1] + 1 + stage % 2, len(uneven) - (stages - stage - 1)))
        cuts[-1] = len(uneven)
        found.append(Case(schedule, False, uneven, tuple(cuts)))
    return found


def work(rank: int, port: int, args: argparse.Namespace, queue: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    for case in cases(args.processes, args.unit_ms / 1000):
        queue.put((rank, measure(rank, case, args)))
        dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, case: Case, args: argparse.Namespace) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """The steps, and the medians of this rank's layers."""
    spans = list(pairwise(case.boundaries))
    own = [stage for stage in range(len(spans)) if stage % args.processes == rank]
    modules = {s: Stage([(t, 2 * t) for t in case.layers_s[spans[s][0] : spans[s][1]]]) for s in own}
    stages = [PipelineStage(modules[s], s, len(spans), torch.device("cpu")) for s in own]
    kind = SCHEDULES[case.schedule]
    loss = torch.nn.functional.mse_loss
    schedule = kind(stages if len(stages) > 1 else stages[0], args.microbatches, loss_fn=loss)
    x, y = torch.randn(args.microbatches, WIDTH), torch.randn(args.microbatches, WIDTH)
    steps = []
    for number in range(args.steps + 1):
        if number == 1:
            for module in modules.values():
                for notes in module.notes:
                    notes[0].clear()
                    notes[1].clear()
        dist.barrier()
        started = time.perf_counter_ns()
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if (len(spans) - 1) in own else {}))
        dist.barrier()
        steps.append(time.perf_counter_ns() - started)
    costs = {}
    for s in own:
        for at, (forward, backward) in enumerate(modules[s].notes):
            costs[spans[s][0] + at] = (round(statistics.mean(forward)), round(statistics.mean(backward)))
    return steps[1:], costs


def sample(case: Case, answers: list[tuple[list[int], dict[int, tuple[int, int]]]], args: argparse.Namespace) -> Sample:
    costs = {layer: cost for _, part in answers for layer, cost in part.items()}
    count = len(case.layers_s)
    items = tuple(
        Item(
            name=f"layers.{at}",
            layer=f"layers.{at}",
            kind="layer",
            param_count=0,
            param_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
            boundary_bytes=4 * WIDTH,
            cut_before=True,
            tied_to=None,
        )
        for at in range(count)
    )
    item_costs = ItemCosts(
        forward_ns=tuple(costs[at][0] for at in range(count)),
        backward_input_ns=tuple(costs[at][1] for at in range(count)),
        backward_weight_ns=(0,) * count,
        activation_bytes=(0,) * count,
        split=False,
        records=args.steps,
        from_step=1,
        to_step=args.steps,
    )
    problem = PartitionProblem(
        chain=Chain(items=items, costs=item_costs, cuts=tuple(range(count + 1))),
        slots=tuple(WorkerSlot(worker=p) for p in range(args.processes)),
        schedule=case.schedule,
        microbatches=args.microbatches,
        virtual_stages=2 if case.schedule == "interleaved-1f1b" else 1,
    )
    slowest = [max(step) for step in zip(*(steps for steps, _ in answers), strict=True)]
    return Sample(
        problem=problem, boundaries=case.boundaries, step_ns=round(statistics.median(slowest)), records=args.steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--unit-ms", type=float, default=12.0)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(r, port, args, queue), daemon=True) for r in range(args.processes)]
    for process in processes:
        process.start()
    samples = []
    for case in cases(args.processes, args.unit_ms / 1000):
        answers = [queue.get(timeout=120)[1] for _ in processes]
        samples.append((case, sample(case, answers, args)))
    for process in processes:
        process.join()
    found = calibrate([one for case, one in samples if case.even], fit_link=False)
    emit(f"{args.processes} processes, {args.microbatches} microbatches, overhead {found.overhead_ns / 1000:.0f} us\n")
    emit("| schedule | stages | measured ms | simulated, before | after |")
    emit("|---|---|---|---|---|")
    for case, one in samples:
        before = predict(one.problem, one.boundaries).step_ns / one.step_ns - 1
        after = predict(one.problem, one.boundaries, found.overhead_ns).step_ns / one.step_ns - 1
        kind = "even" if case.even else "uneven"
        emit(f"| {case.schedule} | {kind} | {one.step_ns / 1e6:.1f} | {before:+.1%} | {after:+.1%} |")


if __name__ == "__main__":
    main()
