"""``--selective-grad-comp-way auto``: how many workers compress between their replicas, as ``dynmo-plan`` finds it.

It knows the measured costs and links. It is asked once the warm-up is over and costs have been measured, and again when
layers have moved; training goes on meanwhile. A plan can say it as well (``x_selective_grad_comp_way``), and then
nobody is asked. Where no answer comes, all workers compress.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..._common.document import parse_any_json
from ...launch.find_command import program_path
from ...optim.compression.settings import CompressionSettings
from ...parallel.process_groups import broadcast_object
from ..engine import Engine

ANSWER_S = 120.0
PRESETS = ("h200", "h100", "a100")


def question_of(settings: CompressionSettings, device: str) -> list[str]:
    """The words behind ``dynmo-plan simulate RUN``.

    Args:
        device: ``cpu``, or the name of the accelerator.
    """
    words = ["--grad-comp-rank", str(settings.replica_rank), "--selective-grad-comp-way", "auto", "--format", "json"]
    if settings.boundary_rank is not None:
        words += ["--inter-grad-comp-rank", str(settings.boundary_rank)]
        words += ["--inter-grad-comp-epilogue-only"] if settings.epilogue_only else []
    words += ["--use-error-feedback"] if settings.feedback else []
    words += ["--emb-comm-opt"] if settings.fuse_ties else []
    known = next((name for name in PRESETS if name in device.lower()), "a100")
    return [*words, "--compression-device", "cpu" if device == "cpu" else known]


class CompressionChoice:
    """Asks for, and puts into force, the number of workers that compress. Every process has one.

    Args:
        engine: with ``choose_workers``.
        run: the run directory.
        first_costs: the first step whose costs are in the profile.
        due: whether nothing was chosen before.
        device: where factors are made.
        log_event: writes a line in ``events.jsonl``.
    """

    def __init__(
        self, engine: Engine, run: Path, *, first_costs: int, due: bool, device: str, log_event: Callable[..., None]
    ) -> None:
        self._engine, self._run, self._log_event, self._device = engine, run, log_event, device
        self._from_step = max(first_costs, engine.settings.compression.replica_warmup_steps)
        self._due = due
        self._asked: subprocess.Popen[str] | None = None
        self._said: tuple[IO[str], IO[str]] | None = None
        self._deadline = 0.0

    def boundary(self, step: int, *, moved: bool = False, planned: int | None = None) -> int | None:
        """Act at the boundary after ``step``; every process calls this after every step.

        Args:
            moved: whether a plan came into force here.
            planned: the number that it says.

        Returns:
            The number, where it was chosen here.
        """
        if moved:
            self.close()
            self._due = True
        if planned is not None:
            return self._choose(planned, step, "the plan says so")
        if not self._due or step < self._from_step:
            return None
        world = self._engine.world
        told = broadcast_object(world, self._look() if world.is_rank0 else None)
        return None if told is None else self._choose(told["workers"], step, told["reason"])

    def _choose(self, workers: int, step: int, reason: str) -> int:
        self._due = False
        self._engine.choose_replica_workers(workers)
        message = f"{workers} workers compress between their replicas: {reason}"
        self._log_event("selective_grad_comp", message, step=step, workers=workers)
        return workers

    def _look(self) -> dict[str, Any] | None:
        """On rank 0: the answer, once it is there; asks where nobody was asked yet."""
        if self._asked is None or self._said is None:
            return self._ask()
        code = self._asked.poll()
        if code is None and time.monotonic() < self._deadline:
            return None
        out, err = self._said
        for each in (out, err):
            each.seek(0)
        text, problem = out.read(), err.read().strip()
        self.close()
        if code != 0:
            return self._all(f"dynmo-plan gave no answer ({'late' if code is None else problem or f'code {code}'})")
        found = parse_any_json(text)["compression"]
        times = ", ".join(f"{way}: {ns / 1e6:.2f} ms" for way, ns in found["ways_ns"].items())
        return {"workers": found["selective_grad_comp_way"], "reason": f"dynmo-plan expects steps of {times}"}

    def _ask(self) -> dict[str, Any] | None:
        command = program_path("dynmo-plan")
        if command is None:
            return self._all("dynmo-plan is not installed beside dynmo-train")
        self._said = (tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+"))  # noqa: SIM115 - closed in close()
        words = question_of(self._engine.settings.compression, self._device)
        self._asked = subprocess.Popen(
            [command, "simulate", str(self._run), *words],
            stdin=subprocess.DEVNULL,
            stdout=self._said[0],
            stderr=self._said[1],
            text=True,
        )
        self._deadline = time.monotonic() + ANSWER_S
        return None

    def _all(self, reason: str) -> dict[str, Any]:
        return {"workers": self._engine.world.dims.pipeline, "reason": reason}

    def close(self) -> None:
        """Ask no further."""
        if self._asked is not None and self._asked.poll() is None:
            self._asked.kill()
            self._asked.wait()
        for each in self._said or ():
            each.close()
        self._asked = self._said = None
