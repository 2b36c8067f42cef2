"""Finds the first step, item and microbatch in which two runs differ.

::

    metrics of both      -> first step with another loss or gradient norm
    checkpoints of both  -> last equal one before it, first different one
    replay of both from the last equal checkpoint, step by step -> first different tensor
    replay of that step with copies of the tensor                -> number of different elements

If both replays are equal, the cause is no longer there: the stored weights were altered, or a device erred once. Then
the first different checkpoint is compared, and the metrics of each run with its replay.

Only the last two steps before the first difference are digested: an update that differs changes the loss of the next
step, and the losses before are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._common.errors import UsageError
from ...parallel.process_groups import World
from ..garbage_collection import release_engine
from .compare_digests import FirstTensor, first_different_tensor, first_nonfinite_tensor, with_elements
from .replay import Replay, ReplayedStep
from .stored_run import StoredRun, common_checkpoints, first_different_step


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The result of a comparison of two runs.

    Attributes:
        step: last step that was compared.
        logged: first step whose logged loss or gradient norm differs; None without one.
        equal_checkpoint: last common checkpoint whose tensors are equal; 0: the initial weights.
        different_checkpoint: first common checkpoint whose tensors differ; None without one.
        first: first different tensor; None if both replays are equal.
        nonfinite: first tensor that is not finite, of each run; None without one.
        mismatched: run directory -> first step whose replay differs from the run's metrics.
    """

    step: int
    logged: int | None
    equal_checkpoint: int
    different_checkpoint: int | None
    first: FirstTensor | None
    nonfinite: tuple[FirstTensor | None, FirstTensor | None]
    mismatched: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The result as a JSON document."""
        return {
            "step": self.step,
            "first_different_logged_step": self.logged,
            "last_equal_checkpoint": self.equal_checkpoint,
            "first_different_checkpoint": self.different_checkpoint,
            "first_different_tensor": None if self.first is None else self.first.document(),
            "first_nonfinite_tensor": [None if each is None else each.document() for each in self.nonfinite],
            "first_step_unlike_its_metrics": dict(self.mismatched),
        }

    def lines(self) -> list[str]:
        """The result as sentences."""
        logged = (
            "no logged step differs" if self.logged is None else f"logged losses differ first at step {self.logged:,}"
        )
        found = [f"{logged} (up to step {self.step:,})"]
        before = f"step {self.equal_checkpoint:,}" if self.equal_checkpoint else "the start"
        different = self.different_checkpoint
        after = "" if different is None else f"; the first different one is of step {different:,}"
        found.append(f"checkpoints: equal up to {before}{after}")
        found.append(
            "first difference: "
            + (self.first.line() if self.first is not None else "none: both replays have the same bits")
        )
        found += [f"first tensor that is not finite: {each.line()}" for each in self.nonfinite if each is not None]
        found += [
            f"{run}: the replay of step {step:,} differs from its metrics: the run erred once, or was started with"
            " other options"
            for run, step in self.mismatched.items()
        ]
        return found

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and self.logged is None and self.different_checkpoint is None and not self.mismatched


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs, and the options of their replays.

    Attributes:
        runs: the runs.
        flags: options of the placement and the device.
        world: process groups.
    """

    runs: tuple[StoredRun, StoredRun]
    flags: Mapping[str, Any]
    world: World

    def replay(self, at: int, checkpoint_step: int, first: int, last: int) -> Replay:
        """A replay of one of the runs.

        Args:
            at: index of the run, 0 or 1.
            checkpoint_step: completed steps of the checkpoint to start from; 0 starts as the run did.
            first: first step to digest.
            last: last step.
        """
        run = self.runs[at]
        checkpoint = run.path / "checkpoints" / f"step-{checkpoint_step:08d}" if checkpoint_step else None
        config = run.config(self.flags, self.world.size, checkpoint)
        return Replay(run=run, config=config, checkpoint=checkpoint, first=first, last=last)

    def steps(self, at: int, checkpoint_step: int, first: int, last: int, *copy_keys: Any) -> list[ReplayedStep]:
        """The executed steps of :meth:`replay`, from ``first`` to ``last``; the engine is freed afterwards.

        Args:
            at: index of the run, 0 or 1.
            checkpoint_step: completed steps of the checkpoint to start from.
            first: first step to digest.
            last: last step.
            *copy_keys: tensors to copy to the host.
        """
        found = list(self.replay(at, checkpoint_step, first, last).execute(self.world, copy_keys))
        release_engine()
        return found


def bisect_runs(pair: Pair, step: int) -> Bisection:
    """The first difference of two runs up to ``step``. Every rank calls this.

    Raises:
        UsageError: a run cannot be executed again with these processes.
    """
    one, other = pair.runs
    _check_layouts(one, other)
    logged = first_different_step(one, other, step)
    last = logged or step
    found = common_checkpoints(one, other, last)
    different = next((at for at, equal in found if not equal), None)
    equal = max((at for at, is_equal in found if is_equal and (different is None or at < different)), default=0)
    # A checkpoint that differs has the cause before it; a loss that differs has it in its step or before.
    end = last if different is None else different
    executed = [pair.steps(at, equal, max(equal + 1, end - 1), end) for at in (0, 1)]
    first = _first_difference(pair, equal, executed)
    mismatched = _mismatched(pair, executed)
    if first is None and different is not None:
        # The stored weights differ although both replays agree: compare what the checkpoints have.
        executed = [pair.steps(at, different, different + 1, min(different + 1, last)) for at in (0, 1)]
        first = _first_difference(pair, different, executed)
    return Bisection(
        step=step,
        logged=logged,
        equal_checkpoint=equal,
        different_checkpoint=different,
        first=first,
        nonfinite=(_first_nonfinite(executed[0]), _first_nonfinite(executed[1])),
        mismatched=mismatched,
    )


def _check_layouts(one: StoredRun, other: StoredRun) -> None:
    """Refuse runs of other layouts: one set of processes cannot execute both, and their bits differ anyway.

    Raises:
        UsageError: the runs have other parallel sizes.
    """
    layouts = one.layout(), other.layout()
    different = [name for name, value in layouts[0].items() if layouts[1][name] != value]
    if different:
        values = "; ".join(f"{name} {layouts[0][name]} and {layouts[1][name]}" for name in different)
        raise UsageError(
            f"--against {other.path}: the runs have other layouts ({values}), which have other bits; execute a step of"
            " each with --output, and compare what is comparable with compare-digests"
        )


def _first_difference(pair: Pair, loaded: int, executed: list[list[ReplayedStep]]) -> FirstTensor | None:
    """The first tensor that differs, with the number of its different elements; None without one."""
    for one, other in zip(*executed, strict=True):
        finding = first_different_tensor(one.digests, other.digests)
        if finding is not None and finding.reason == "differs":
            steps = [pair.steps(at, loaded, finding.step, finding.step, finding.key)[-1] for at in (0, 1)]
            return with_elements(finding, steps[0].copies, steps[1].copies)
        if finding is not None:
            return finding
    return None


def _first_nonfinite(steps: list[ReplayedStep]) -> FirstTensor | None:
    return next((found for each in steps if (found := first_nonfinite_tensor(each.digests)) is not None), None)


def _mismatched(pair: Pair, executed: list[list[ReplayedStep]]) -> dict[str, int]:
    """Run directory -> first executed step whose figures are not those of the metrics."""
    found: dict[str, int] = {}
    for run, steps in zip(pair.runs, executed, strict=True):
        for each in (step.digests for step in steps):
            if each.logged is not None and not each.matches:
                found.setdefault(str(run.path), each.step)
    return found
