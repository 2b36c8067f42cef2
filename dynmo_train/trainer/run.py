"""Runs a training in the processes of a launcher: joins them, and trains until the end.

A rollback (``loss_spikes.py``) is a resume without leaving the processes: engine and data are built again from the last
checkpoint, as at a start, and a new segment of the run begins.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from dataclasses import replace
from functools import partial

import torch

from .._common.errors import EXIT_USAGE
from .._common.streams import keep_running
from ..config import Config
from ..data.sample_format import SampleError
from ..launch.failure_record import recording_failure
from ..launch.watch.flight_recorder import enable_recorder
from ..launch.watch.heartbeat import HeartbeatWriter, Phase, open_heartbeat
from ..parallel.consensus import is_reporting_rank
from ..parallel.process_groups import World, destroy_world
from .failures import lost_another_rank, naming_causes
from .fingerprint import config_properties, join_same
from .garbage_collection import freeze_imports, release_engine
from .loop import Trainer
from .loss_spikes import Rollback
from .recovery.survivor import Survivor
from .settings_from_config import parallel_dims
from .setup import setup_run


def run_pretrain(config: Config) -> int:
    """Train as ``config`` specifies, together with the other processes of the launcher; the exit code.

    Raises:
        DynmoError: this rank ran out of memory.
    """
    freeze_imports()
    keep_running("stdout")  # the training log is a message: a full disk or a closed pipe must not end the run
    torch.set_num_threads(config.training.num_threads)
    # torch prints this once per process. The tests of linear layers cover the sparse products that are used here.
    warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta state")
    enable_recorder(os.environ, "cuda" if config.training.device != "cpu" and torch.cuda.is_available() else "cpu")
    heartbeat = open_heartbeat(os.environ, 60.0 * config.training.distributed_timeout_minutes)
    survivor = Survivor.of(config, os.environ)
    if survivor is None:
        return _train_world(config, heartbeat, None)
    with recording_failure(os.environ, lost_another_rank):
        return survivor.run(lambda current: _train_world(current, heartbeat, survivor), config)


def _train_world(config: Config, heartbeat: HeartbeatWriter, survivor: Survivor | None) -> int:
    """Join the processes of the environment and train with them; the exit code.

    Args:
        config: configuration of the run.
        heartbeat: heartbeat of this process.
        survivor: copies that a run with fewer ranks continues from; None without such copies.

    Raises:
        DynmoError: this rank ran out of memory, or lost another rank.
    """
    heartbeat.enter(Phase.START)
    if survivor is not None:
        survivor.begin()
    timeout_s = 60.0 * config.training.distributed_timeout_minutes
    properties = partial(config_properties, config)
    with naming_causes(int(os.environ.get("RANK", "0")), socket.gethostname()):
        world = join_same(config.training.device, parallel_dims(config), properties, timeout_s=timeout_s)
    try:
        # Before ``destroy_world``, which ends the connections of the other ranks.
        with recording_failure(os.environ, lost_another_rank, is_final=survivor is None):
            return _run(config, world, heartbeat, survivor)
    finally:
        destroy_world()


def _run(config: Config, world: World, heartbeat: HeartbeatWriter, survivor: Survivor | None) -> int:
    """Train until the end, and name the causes of failures; the exit code. Every rank calls this.

    Raises:
        SampleError: on one rank, if all ranks raise it.
        LostRankError: another rank has ended or hangs.
        DynmoError: this rank is out of memory, or lost a process that builds batches.
    """
    try:
        with naming_causes(world.rank, world.host):
            return _train(config, world, heartbeat, survivor)
    # All ranks raise this in the same step: one of them reports it.
    except SampleError:
        if is_reporting_rank(first=world.is_rank0):
            raise
        return EXIT_USAGE


def _train(config: Config, world: World, heartbeat: HeartbeatWriter, survivor: Survivor | None) -> int:
    """Train until the end, through rollbacks; the exit code."""
    began = time.monotonic()
    rollback: Rollback | None = None
    memory = survivor.join(config, world) if survivor is not None else None
    while True:
        start = setup_run(config, world, rollback, memory)
        start.engine.profiler.heartbeat = heartbeat
        if survivor is not None:
            survivor.watch(start.directory.path)
        exit_code, rollback = _train_segment(Trainer(start, time.monotonic() - began, survivor))
        if rollback is None:
            return exit_code
        config, memory = _resumed(config, str(start.directory.path)), None
        if survivor is not None:
            survivor.roll_back()
        # Before the next one is built: else two engines would be on the device for a while.
        del start
        release_engine()


def _train_segment(trainer: Trainer) -> tuple[int, Rollback | None]:
    """Train to the end or the next rollback; the exit code, and the rollback that ended the segment."""
    exit_code = None
    try:
        exit_code = trainer.evaluate() if trainer.config.training.skip_train else trainer.train()
    finally:
        trainer.close(exit_code)
    return exit_code, trainer.rollback


def _resumed(config: Config, run: str) -> Config:
    """The configuration that resumes the run of the directory ``run``, with its optimizer state."""
    options = replace(config.run, load=run, run_dir=run, save=run, finetune=False, no_load_optim=False)
    return replace(config, run=options, ict=replace(config.ict, bert_load=None))
