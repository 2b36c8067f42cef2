"""``--selective-grad-comp-way auto``: ``dynmo-plan`` chooses how many pipeline ranks compress between replicas.

``dynmo-plan simulate`` predicts the step time for each number, from the measured costs and links in the profile. It
runs in the background once the warm-up of the compression is over and costs are measured, and again after layers have
moved; training continues meanwhile. A plan can set the number itself (``x_selective_grad_comp_way``), and then nothing
is simulated. If the simulation fails, all pipeline ranks compress.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ..._common.document import parse_any_json
from ...launch.find_command import program_path
from ...optim.compression.settings import CompressionSettings
from ...parallel.process_groups import broadcast_object
from ..engine import Engine

SIMULATION_TIMEOUT_S = 120.0
# Devices that ``dynmo-plan`` has figures of, as they occur in the name of a CUDA device.
PRESETS = ("h200", "h100", "a100")


def simulate_arguments(settings: CompressionSettings, device: str) -> list[str]:
    """The arguments of ``dynmo-plan simulate RUN``, after the run directory.

    Args:
        settings: compression of the run.
        device: ``cpu``, or the name of the accelerator.
    """
    arguments = ["--grad-comp-rank", str(settings.replica_rank), "--selective-grad-comp-way", "auto"]
    arguments += ["--format", "json"]
    if settings.boundary_rank is not None:
        arguments += ["--inter-grad-comp-rank", str(settings.boundary_rank)]
        arguments += ["--inter-grad-comp-epilogue-only"] if settings.epilogue_only else []
    arguments += ["--use-error-feedback"] if settings.feedback else []
    arguments += ["--emb-comm-opt"] if settings.fuse_ties else []
    preset = next((name for name in PRESETS if name in device.lower()), "a100")
    return [*arguments, "--compression-device", "cpu" if device == "cpu" else preset]


@dataclass
class _Simulation:
    """A running ``dynmo-plan simulate``, its temporary output files, and the time after which it is given up."""

    process: subprocess.Popen[str]
    stdout: IO[str]
    stderr: IO[str]
    deadline_s: float

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.stdout.close()
        self.stderr.close()


class CompressionChoice:
    """Sets the number of pipeline ranks that compress between replicas. Every rank has one.

    Args:
        engine: engine whose settings have ``choose_workers``.
        run: run directory.
        first_costs: first step whose costs are in the profile.
        is_due: whether no number was chosen before.
        device: device that computes the low-rank factors: ``cpu``, or the name of the accelerator.
        log_event: appends a line to ``events.jsonl``.
    """

    def __init__(
        self, engine: Engine, run: Path, *, first_costs: int, is_due: bool, device: str, log_event: Callable[..., None]
    ) -> None:
        self._engine, self._run, self._log_event, self._device = engine, run, log_event, device
        self._from_step = max(first_costs, engine.settings.compression.replica_warmup_steps)
        self._is_due = is_due
        self._simulation: _Simulation | None = None

    def at_boundary(self, step: int, *, has_moved: bool = False, planned: int | None = None) -> int | None:
        """Act at the boundary after ``step``. Every rank calls this after every step.

        Args:
            step: number of completed steps.
            has_moved: whether a plan became active at this boundary.
            planned: number of compressing pipeline ranks that this plan sets.

        Returns:
            The number of compressing pipeline ranks, if it was chosen at this boundary.
        """
        # The number was chosen for the stages of the old partition.
        if has_moved:
            self.close()
            self._is_due = True
        if planned is not None:
            return self._choose(planned, step, "set by the plan")
        if not self._is_due or step < self._from_step:
            return None
        world = self._engine.world
        # Broadcast at every boundary until there is an answer: all ranks must change the number after the same step.
        answer = broadcast_object(world, self._poll() if world.is_rank0 else None)
        return None if answer is None else self._choose(answer["workers"], step, answer["reason"])

    def _choose(self, workers: int, step: int, reason: str) -> int:
        self._is_due = False
        self._engine.choose_replica_workers(workers)
        message = f"{workers} workers compress between their replicas: {reason}"
        self._log_event("selective_grad_comp", message, step=step, workers=workers)
        return workers

    def _poll(self) -> dict[str, Any] | None:
        """On rank 0: start the simulation, or return its result once it has ended."""
        simulation = self._simulation
        if simulation is None:
            return self._start()
        code = simulation.process.poll()
        if code is None and time.monotonic() < simulation.deadline_s:
            return None
        for stream in (simulation.stdout, simulation.stderr):
            stream.seek(0)
        text, problem = simulation.stdout.read(), simulation.stderr.read().strip()
        self.close()
        if code != 0:
            cause = f"no result within {SIMULATION_TIMEOUT_S:g} s" if code is None else problem or f"exit code {code}"
            return self._all_workers(f"dynmo-plan simulate failed ({cause})")
        found = parse_any_json(text)["compression"]
        times = ", ".join(f"{workers}: {ns / 1e6:.2f} ms" for workers, ns in found["ways_ns"].items())
        return {"workers": found["selective_grad_comp_way"], "reason": f"dynmo-plan predicts step times of {times}"}

    def _start(self) -> dict[str, Any] | None:
        command = program_path("dynmo-plan")
        if command is None:
            return self._all_workers("dynmo-plan is not installed next to dynmo-train")
        # Files, not pipes: nobody reads while the process runs, and a full pipe would block it.
        stdout, stderr = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        process = subprocess.Popen(
            [command, "simulate", str(self._run), *simulate_arguments(self._engine.settings.compression, self._device)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        deadline_s = time.monotonic() + SIMULATION_TIMEOUT_S
        self._simulation = _Simulation(process=process, stdout=stdout, stderr=stderr, deadline_s=deadline_s)
        return None

    def _all_workers(self, reason: str) -> dict[str, Any]:
        return {"workers": self._engine.world.dims.pipeline, "reason": reason}

    def close(self) -> None:
        """End a simulation that is running."""
        if self._simulation is not None:
            self._simulation.close()
        self._simulation = None


def compression_choice(
    engine: Engine, run_dir: Path, *, step: int, profile_interval: int, log_event: Callable[..., None]
) -> CompressionChoice | None:
    """What asks ``dynmo-plan`` which ranks compress between replicas; None where the number is fixed.

    Args:
        engine: the engine of this rank.
        run_dir: run directory.
        step: step that the run starts or resumes from.
        profile_interval: steps between two profiled ones.
        log_event: writes an event of the run.
    """
    if not engine.chooses_replica_workers:
        return None
    device = engine.world.device
    # The first step after the start is not profiled.
    first_profiled = step + 2
    return CompressionChoice(
        engine,
        run_dir,
        first_costs=first_profiled + -first_profiled % profile_interval,
        is_due=engine.replica_workers is None,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        log_event=log_event,
    )
