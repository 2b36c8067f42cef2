"""``dynmo-train replay-step`` and ``compare-digests``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import Format, emit, emit_json
from .._common.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, UsageError
from ..config.command import with_specs
from ..config.resolve import built_in_specs
from .common import is_rank0, need_torch, world_size

if TYPE_CHECKING:
    from ..config import Config
    from ..formats.step_digests import StepDigests
    from ..parallel.process_groups import World
    from ..trainer.replay.compare_digests import FirstTensor

PLACEMENT_OPTIONS = ("plan", "schedule", "virtual_stages_per_worker", "granularity", "device", "num_threads")
Report = Annotated[Format, typer.Option("--format", help="Output format.")]


@contextlib.contextmanager
def _replay_world(config: Config) -> Iterator[World]:
    """The process groups of a replay."""
    import torch

    from ..parallel.process_groups import destroy_world
    from ..trainer.fingerprint import config_properties, join_same
    from ..trainer.settings_from_config import parallel_dims

    torch.set_num_threads(config.training.num_threads)
    timeout_s = 60.0 * config.training.distributed_timeout_minutes
    world = join_same(
        config.training.device, parallel_dims(config), lambda: config_properties(config), timeout_s=timeout_s
    )
    try:
        yield world
    finally:
        destroy_world()


@with_specs([built_in_specs()[name] for name in PLACEMENT_OPTIONS], always=True)
def replay_step(
    run: Annotated[Path, typer.Argument(help="Run directory; nothing is written into it.")],
    step: Annotated[
        int, typer.Argument(min=1, max=10**9, help="Step to execute again, or with --against the last one.")
    ],
    against: Annotated[
        Path | None, typer.Option("--against", help="Second run: find the first step and tensor that differ.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="JSON-lines file to write the digests to.")] = None,
    form: Report = Format.TEXT,
    **flags: Any,
) -> None:
    """Execute a step of a run again, bit for bit, and digest the tensors of each layer.

    Starts from the nearest checkpoint before the step, on any number of pipeline ranks. Exits with code 1 if loss or
    gradient norm differ from metrics.jsonl, or if two runs differ.
    """
    need_torch()
    from ..parallel.consensus import is_reporting_rank

    if against is not None and output is not None:
        raise UsageError("--output: has no effect with --against, which compares steps; leave one of them out")
    try:
        code = (
            _against(run, against, step, form, flags)
            if against is not None
            else _replay(run, step, output, form, flags)
        )
    except UsageError:
        # All processes have the same command line: one of them reports.
        if not is_reporting_rank(first=is_rank0()):
            raise typer.Exit(EXIT_USAGE) from None
        raise
    raise typer.Exit(code)


def _replay(run: Path, step: int, output: Path | None, form: Format, flags: dict[str, Any]) -> int:
    """Execute one step again and report it; the exit code."""
    from ..formats.step_digests import write_step_digests
    from ..trainer.replay.replay import Replay
    from ..trainer.replay.stored_run import StoredRun

    stored = StoredRun.read(run)
    checkpoint = stored.checkpoint_before(step)
    config = stored.config(flags, world_size(), checkpoint)
    replay = Replay(run=stored, config=config, checkpoint=checkpoint, first=step, last=step)
    if output is not None and output.resolve().is_relative_to(run.resolve()):
        raise UsageError(
            f"--output {output}: is in the run directory {run}, which a replay does not change; give another path"
        )
    with _replay_world(config) as world:
        [executed] = replay.execute(world)
    digests = executed.digests
    if is_rank0():
        if output is not None:
            write_step_digests(output, digests)
        _report(digests, output, form)
    return EXIT_OK if digests.matches or digests.logged is None else EXIT_FAILURE


def _report(digests: StepDigests, output: Path | None, form: Format) -> None:
    from ..trainer.replay.compare_digests import first_nonfinite_tensor

    nonfinite = first_nonfinite_tensor(digests)
    if form is Format.JSON:
        emit_json(
            {
                "step": digests.step,
                "loaded_step": digests.loaded_step,
                **vars(digests.figures),
                "logged": None if digests.logged is None else vars(digests.logged),
                "matches": digests.matches,
                "updated": digests.updated,
                "tensors": len(digests.tensors),
                "first_nonfinite_tensor": None if nonfinite is None else nonfinite.document(),
            }
        )
        return
    before = f"checkpoint of step {digests.loaded_step:,}" if digests.loaded_step else "the start of the run"
    emit(f"step {digests.step:,} from {before}: {len(digests.tensors):,} tensors")
    for name, value in vars(digests.figures).items():
        emit(f"{name}: {value} | {_agreement(digests, name)}")
    if nonfinite is not None:
        emit(f"first tensor that is not finite: {nonfinite.line()}")
    if output is not None:
        emit(f"digests: {output}")


def _agreement(digests: StepDigests, name: str) -> str:
    """How a figure of the replay compares with the metrics."""
    if digests.logged is None:
        return "metrics.jsonl has no line of this step"
    logged, value = getattr(digests.logged, name), getattr(digests.figures, name)
    return "as in metrics.jsonl, bit for bit" if logged == value else f"differs: metrics.jsonl has {logged}"


def _against(run: Path, other: Path, step: int, form: Format, flags: dict[str, Any]) -> int:
    """Find the first difference of two runs and report it; the exit code."""
    from ..trainer.replay.bisect import Pair, bisect_runs
    from ..trainer.replay.stored_run import StoredRun

    runs = StoredRun.read(run), StoredRun.read(other)
    config = runs[0].config(flags, world_size(), None)
    with _replay_world(config) as world:
        found = bisect_runs(Pair(runs=runs, flags=flags, world=world), step)
    if is_rank0():
        if form is Format.JSON:
            emit_json(found.document())
        else:
            emit("\n".join(found.lines()))
    return EXIT_OK if found.is_equal else EXIT_FAILURE


def compare_digests(
    first: Annotated[Path, typer.Argument(help="Digests of a step, from replay-step --output.")],
    second: Annotated[Path, typer.Argument(help="Digests of the same step of another execution.")],
    form: Report = Format.TEXT,
) -> None:
    """Compare the digests of a step: the first tensor that differs, or that is not finite.

    Exits with code 1 if a tensor differs.
    """
    need_torch()
    from ..formats.step_digests import read_step_digests
    from ..trainer.replay.compare_digests import Comparability, first_different_tensor, first_nonfinite_tensor

    one, other = read_step_digests(first), read_step_digests(second)
    comparability = Comparability.of(one.layout, other.layout)
    compared = comparability.select(one, other)
    different = first_different_tensor(*compared)
    nonfinite = [first_nonfinite_tensor(each) for each in (one, other)]
    if form is Format.JSON:
        emit_json(
            {
                "step": one.step,
                "tensors": len(compared[0].tensors),
                "not_compared": len({each.key for digests in (one, other) for each in digests.tensors})
                - len({each.key for digests in compared for each in digests.tensors}),
                "different_layouts": list(comparability.reasons),
                "first_different_tensor": _document(different),
                "first_nonfinite_tensor": [_document(each) for each in nonfinite],
            }
        )
    else:
        if comparability.reasons:
            emit(comparability.line())
        count = f"{len(compared[0].tensors):,} tensors of step {one.step:,}"
        emit(f"{count}: all equal" if different is None else f"first difference: {different.line()}")
        for path, found in zip((first, second), nonfinite, strict=True):
            if found is not None:
                emit(f"{path}: first tensor that is not finite: {found.line()}")
    raise typer.Exit(EXIT_OK if different is None else EXIT_FAILURE)


def _document(found: FirstTensor | None) -> dict[str, Any] | None:
    return None if found is None else found.document()
