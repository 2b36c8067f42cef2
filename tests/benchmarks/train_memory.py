"""Peak memory of training on CPU against the figure that ``--dry-run`` prints.

Each case runs some whole steps of the engine in processes of its own. Measured is the peak resident memory of a process
above what it held before the model was built (resident memory; freed memory is returned at once). Goal: within 10 %.

    python tests/benchmarks/train_memory.py [--case NAME ...] [--repeats 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = 3
MIB = 1 << 20
PLAIN: dict[str, Any] = {
    "num_attention_heads": 6,
    "hidden_size": 384,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 6e-4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "data_path": "-",
}
SMALL = PLAIN | {"num_layers": 4, "seq_length": 512, "vocab_size": 8192}
MIDDLE = PLAIN | {"num_layers": 6, "seq_length": 256, "vocab_size": 50304}
LONG = MIDDLE | {"seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 2}
LARGE = PLAIN | {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 512,
    "vocab_size": 32768,
}
LARGE |= {"micro_batch_size": 1, "global_batch_size": 2}
LLAMA = {"family": "llama", "num_query_groups": 2, "hidden_dropout": 0.0}
DROPOUT = {"attention_dropout": 0.1}
# Attention that no kernel of torch computes, in two chunks of queries; and that of DeepSeek.
EAGER = SMALL | LLAMA | {"seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 4}
LATENT = EAGER | {"num_query_groups": 6, "multi_latent_attention": True, "q_lora_rank": 96, "kv_lora_rank": 64}
LATENT |= {"qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
# Options of the run, and how many processes.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "10M": (SMALL, 1),
    "10M, dropout": (SMALL | {"hidden_dropout": 0.1, "attention_dropout": 0.1}, 1),
    "10M, full recomputation": (SMALL | {"recompute_granularity": "full"}, 1),
    "10M, selective recomputation": (SMALL | {"recompute_granularity": "selective"}, 1),
    "10M, bf16": (SMALL | {"bf16": True}, 1),
    "10M, two stages": (SMALL | {"pipeline_model_parallel_size": 2, "global_batch_size": 16}, 2),
    "10M, two stages, full recomputation": (
        SMALL | {"pipeline_model_parallel_size": 2, "global_batch_size": 16, "recompute_granularity": "full"},
        2,
    ),
    "10M, two replicas": (SMALL | {"pipeline_model_parallel_size": 1, "global_batch_size": 16}, 2),
    "10M, two replicas, ZeRO 2": (
        SMALL | {"pipeline_model_parallel_size": 1, "global_batch_size": 16, "zero_stage": 2},
        2,
    ),
    "10M, two replicas, ZeRO 3": (
        SMALL | {"pipeline_model_parallel_size": 1, "global_batch_size": 16, "zero_stage": 3},
        2,
    ),
    "10M, two tensor ranks": (SMALL | {"tensor_model_parallel_size": 2, "vocab_size": 8192}, 2),
    "10M, two replicas, ZeRO 1": (
        SMALL | {"pipeline_model_parallel_size": 1, "global_batch_size": 16, "zero_stage": 1},
        2,
    ),
    "10M, two tensor ranks, sequence parallel": (
        SMALL | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        2,
    ),
    "llama": (SMALL | LLAMA, 1),
    "llama, two stages": (SMALL | LLAMA | {"pipeline_model_parallel_size": 2, "global_batch_size": 16}, 2),
    "mixtral": (SMALL | LLAMA | {"num_experts": 4, "ffn_hidden_size": 768}, 1),
    "bert": (SMALL | {"family": "bert"}, 1),
    "bert, two tensor ranks": (SMALL | {"family": "bert", "tensor_model_parallel_size": 2}, 2),
    "t5": (SMALL | {"family": "t5", "decoder_seq_length": 128}, 1),
    "t5, two stages": (
        SMALL | {"family": "t5", "decoder_seq_length": 128, "pipeline_model_parallel_size": 2, "global_batch_size": 16},
        2,
    ),
    "sinks": (EAGER | {"attention_sinks": True}, 1),
    "sinks, dropout": (EAGER | DROPOUT | {"attention_sinks": True}, 1),
    "sinks, window": (EAGER | {"attention_sinks": True, "attention_window": 128}, 1),
    "sinks, window, dropout": (EAGER | DROPOUT | {"attention_sinks": True, "attention_window": 128}, 1),
    "soft cap, dropout": (EAGER | DROPOUT | {"attn_logit_softcapping": 50.0}, 1),
    "sinks, dropout, bf16": (EAGER | DROPOUT | {"attention_sinks": True, "bf16": True}, 1),
    "sinks, dropout, full recomputation": (
        EAGER | DROPOUT | {"attention_sinks": True, "recompute_granularity": "full"},
        1,
    ),
    "window": (EAGER | {"attention_window": 128}, 1),
    "window, dropout": (EAGER | DROPOUT | {"attention_window": 128}, 1),
    "latent": (LATENT, 1),
    "latent, dropout": (LATENT | DROPOUT, 1),
    "latent, two stages": (LATENT | {"pipeline_model_parallel_size": 2, "global_batch_size": 16}, 2),
    "30M": (MIDDLE, 1),
    "30M, 1024 tokens": (LONG, 1),
    "30M, two stages": (MIDDLE | {"pipeline_model_parallel_size": 2, "global_batch_size": 16}, 2),
    "110M": (LARGE, 1),
    "110M, bf16, full recomputation": (LARGE | {"bf16": True, "recompute_granularity": "full"}, 1),
}


def config_of_case(case: str, **other: Any) -> Any:
    from dynmo_train.config import DefaultContext, config_of

    options, processes = CASES[case]
    return config_of(DefaultContext(world_size=processes), **options | other)


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def _values(name: str, like: Any, rows: int, config: Any, generator: Any) -> Any:
    """Random values for a batch's tensor, of the share of hidden words that the configuration has."""
    import torch

    shape = (rows, *like.shape[1:])
    if like.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if name == "loss_mask":
        return (torch.rand(shape, generator=generator) < config.data.mask_prob).long()
    return torch.randint(0, 2 if name in ("types", "order") else config.model.vocab_size, shape, generator=generator)


def _train(config: Any, world: Any) -> None:
    """Some steps from fresh weights."""
    import torch

    from dynmo_train.data.batch import Batch
    from dynmo_train.data.registry import zero_microbatch
    from dynmo_train.models.registry import family_of
    from dynmo_train.trainer.engine import Engine
    from dynmo_train.trainer.settings_from_config import engine_settings, initial_partition

    family = family_of(config)
    engine = Engine(family, engine_settings(config), initial_partition(config, family, None), world)
    engine.build()
    rows = config.training.global_batch_size
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        inputs = {name: _values(name, each, rows, config, generator) for name, each in zero_microbatch(config).items()}
        first = (step - 1) * rows // config.training.micro_batch_size
        engine.train_step(Batch(inputs=inputs, first_microbatch=first, step=step), sampled=False)


def measure(case: str) -> None:
    """In one process of a case: train, and print the worker and its bytes."""
    import torch

    from dynmo_train.parallel.dims import ParallelDims
    from dynmo_train.parallel.process_groups import destroy_world, init_world

    torch.set_num_threads(1)
    config = config_of_case(case)
    parallel = config.parallel
    dims = ParallelDims(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        data=parallel.data_parallel_size,
    )
    world = init_world("cpu", dims=dims)
    # The figure excludes what libraries allocate at first use.
    _train(config_of_case(case, num_layers=2, hidden_size=48, vocab_size=128, seq_length=16), world)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _train(config, world)
    sys.stdout.write(json.dumps({"worker": world.pipeline_rank, "bytes": resident("VmHWM") - before}) + "\n")
    sys.stdout.flush()
    destroy_world()


def peaks_of(case: str) -> list[int]:
    """The bytes of each worker, at its highest process."""
    processes = CASES[case][1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Freed memory goes back at once, so that what is resident is what is held.
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    running = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        there = {name: str(value) for name, value in place.items()} if processes > 1 else {}
        there |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
        environment = os.environ | fixed | there | {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--run", case]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    peaks: dict[int, int] = {}
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{case}: a process ended with {process.returncode}")
        predicted_bytes = json.loads(output.splitlines()[-1])
        peaks[predicted_bytes["worker"]] = max(peaks.get(predicted_bytes["worker"], 0), predicted_bytes["bytes"])
    return [peaks[worker] for worker in sorted(peaks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        measure(options.run)
        return
    from dynmo_train.trainer.dryrun.report import dry_run

    sys.stdout.write("| case | worker | measured MiB | --dry-run MiB | dry run / measured |\n|---|---|---|---|---|\n")
    for case in options.case:
        predicted = dry_run(config_of_case(case), "cpu").peak_memory_bytes
        rounds = [peaks_of(case) for _ in range(options.repeats)]
        for worker, predicted_bytes in enumerate(predicted):
            measured = [peaks[worker] for peaks in rounds]
            ratios = ", ".join(f"{predicted_bytes / each:.3f}" for each in measured)
            figures = ", ".join(f"{each / MIB:.0f}" for each in measured)
            sys.stdout.write(f"| {case} | {worker} | {figures} | {predicted_bytes / MIB:.0f} | {ratios} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
