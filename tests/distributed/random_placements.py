"""Random layouts from the command line, each on a random placement: the generator of the placement matrix.

A layout is what fixes the mathematics: model, data, optimizer, precision, compiler, techniques, and the tensor-,
context-, expert- and data-parallel sizes with the ZeRO stage. It is trained twice. The reference has no pipeline. The
placement has pipeline ranks, a schedule, a unit of placement, recomputation and emulated CUDA graphs of its own, moves
layers to random partitions, releases workers, and is stopped and resumed on another placement. Losses, norms,
validation losses and all tensors of the last checkpoint must be the same bits.

Everything follows from a seed and a number. The configuration's own rules reject what cannot be combined, so that this
module has no list of its own. Each number has a leading feature, in turn, so that a matrix of ``len(FEATURES)`` layouts
has them all; other features join by chance.
"""

from __future__ import annotations

import itertools
import random
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynmo_train.config import DefaultContext, config_of, validate
from dynmo_train.formats.plan import V_SCHEDULES
from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.sentences import write_sentences
from tests.distributed.static_memory import on_static_memory
from tests.distributed.whole_runs import events, figures, lines, manifest_of, run_command, write_data
from tests.distributed.workers import run_workers

Options = dict[str, Any]
STEPS, STOP = 6, 3
COMMON: Options = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 2e-3,
    "eval_iters": 1,
    "eval_interval": STOP,
    "log_interval": STOP,
    "clip_grad": 0.3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_workers": 0,
}
EXPERTS: Options = {"num_experts": 4, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
LATENT: Options = {
    "family": "llama",
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
PRUNED: Options = {"sparsify": True, "pruning_start_iter": 1, "pruning_end_iter": 5, "pruning_freq": 2}
# Options that fix the mathematics, by feature; of several alternatives one is drawn.
FEATURES: dict[str, tuple[Options, ...]] = {
    "dropout": ({"hidden_dropout": 0.1}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "replicas": ({"replicas": 2}, {"replicas": 2, "DDP_impl": "torch"}, {"replicas": 2, "grad_reduce_in_bf16": True}),
    "ZeRO 1": ({"replicas": 2, "zero_stage": 1},),
    "ZeRO 2": ({"replicas": 2, "zero_stage": 2}, {"replicas": 2, "zero_stage": 2, "zero_gradient_sync": "step"}),
    "ZeRO 3": ({"replicas": 2, "zero_stage": 3}, {"replicas": 2, "zero_stage": 3, "DDP_impl": "torch"}),
    "tensor parallel": ({"tensor_model_parallel_size": 2},),
    "sequence parallel": ({"tensor_model_parallel_size": 2, "sequence_parallel": True},),
    "context parallel": ({"context_parallel_size": 2},),
    "vocabulary parallel": ({"vocabulary_parallel": 4}, {"vocabulary_parallel": 7}),
    "experts": (EXPERTS, {**EXPERTS, "moe_routing": "expert-choice"}),
    "expert parallel": ({**EXPERTS, "replicas": 2, "expert_model_parallel_size": 2},),
    "expert capacity": (
        {**EXPERTS, "moe_expert_capacity_factor": 1.0},
        {**EXPERTS, "moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True},
        {**EXPERTS, "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
    ),
    "shared experts": (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 24},
        {**EXPERTS, "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    ),
    "dense blocks": ({**EXPERTS, "moe_layer_freq": "[0]+[1]*3", "moe_ffn_hidden_size": 24},),
    "latent attention": (LATENT, {**LATENT, "q_lora_rank": 12}),
    "multi-token prediction": ({"family": "llama", "mtp_num_layers": 1}, {"family": "llama", "mtp_num_layers": 2}),
    "attention window": ({"attention_window": 8},),
    "document masks": (
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "mock_data": True},
        {"reset_attention_mask": True, "mock_data": True},
    ),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "aot_eager"},),
    "bf16": ({"bf16": True},),
    "fp16": ({"fp16": True, "initial_loss_scale": 2.0**16}, {"fp16": True, "initial_loss_scale": 2.0**24}),
    "bf16 moments": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    ),
    "muon": ({"optimizer": "muon"},),
    "adafactor": ({"optimizer": "adafactor"},),
    "sgd": ({"optimizer": "sgd"},),
    "decoupled rate": ({"decoupled_lr": 1e-3},),
    "untied": ({"untie_embeddings_and_output_weights": True},),
    "pruning": ({**PRUNED, "final_sparsity": 0.8}, {**PRUNED, "pruning_mode": "2:4", "final_sparsity": 0.5}),
    "freezing": ({"freeze_schedule": "2:1,4:2"}, {"freeze_schedule": "3:2", "freeze_tied": True}),
    "mixture of depths": ({"mod_capacity": 0.5},),
    "early exit": ({"early_exit_layers": "1", "early_exit_threshold": 0.05},),
    "bert": ({"family": "bert"},),
    "t5": ({"family": "t5"},),
    "sparse attention": ({"sparse_attention": True, "sparse_attention_buckets": 4, "sparse_attention_block": 4},),
}
FAMILIES: dict[str, Options] = {
    "gpt": {"vocab_size": 97},
    "llama": {"vocab_size": 97, "num_query_groups": 2},
    "bert": {"tokenizer_type": "BertWordPieceLowerCase", "split": "70,15,15"},
    "t5": {
        "num_layers": None,
        "encoder_num_layers": 2,
        "decoder_num_layers": 2,
        "decoder_seq_length": 16,
        "vocab_extra_ids": 10,
        "position_embedding_type": "relative",
        "tokenizer_type": "BertWordPieceLowerCase",
        "split": "70,15,15",
    },
}
SCHEDULES: dict[str, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved-1f1b": (2, 3),
    "zero-bubble": (1, 2),
    "zb-v": (2,),
    "dualpipe-v": (2,),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command of the placement.

    Attributes:
        processes: number of processes.
        options: its options, those of the layout included.
        is_graphed: whether items run on static memory, as CUDA graphs do.
        changes: step -> seed of the partition to which layers move after it.
        release: step after which the last pipeline rank is released, and the seed of the others' partition.
    """

    processes: int
    options: Options
    is_graphed: bool = False
    changes: dict[int, int] = field(default_factory=dict)
    release: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A layout with its placement.

    Attributes:
        number: of the layout in the matrix.
        family: model family, as in the command line.
        features: names of the features that it has.
        reference: the run without a pipeline.
        placed: runs of the placement; each resumes the one before it.
    """

    number: int
    family: str
    features: tuple[str, ...]
    reference: Run
    placed: tuple[Run, ...]


def _words(options: Options) -> list[str]:
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    return words


def command_line(drawn: Drawn, run: Run) -> str:
    """The command that a user would give, with what no command line has in parentheses."""
    data = [] if "mock_data" in run.options else ["--data-path", "DATA"]
    words = ["pretrain", drawn.family, "--run-dir", "RUN", *data, *_words(run.options)]
    launch = ["dynmo-train", "launch", "local", "--nproc", str(run.processes), "--", *words]
    notes = ["CUDA graphs are emulated"] * run.is_graphed
    notes += [f"random moves after steps {', '.join(map(str, sorted(run.changes)))}"] * bool(run.changes)
    notes += [f"a worker is released after step {run.release[0]}"] if run.release else []
    return shlex.join(launch) + (f"  ({'; '.join(notes)})" if notes else "")


def _is_valid(family: str, run: Run) -> bool:
    context = DefaultContext(world_size=run.processes)
    given = {"vocab_size": 97, "data_path": None if "mock_data" in run.options else "-"} | {
        name: value for name, value in run.options.items() if value is not None
    }
    # The rule of --cuda-graph on the CPU is for devices; what it can be combined with is checked here as well.
    config = config_of(context, family=family, **given, cuda_graph=run.is_graphed)
    return not validate(config, run.processes)


def _ranks(options: Options) -> tuple[int, Options]:
    """Processes of a pipeline rank, and the options without the number of replicas, which follows from the others."""
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "replicas")
    count = 1
    for name in sizes:
        count *= options.get(name, 1)
    return count, {name: value for name, value in options.items() if name != "replicas"}


def _layout(chance: random.Random, lead: str, max_processes: int) -> tuple[str, tuple[str, ...], int, Options]:
    """Family, features, processes of a pipeline rank and options of a valid layout."""
    while True:
        others = [name for name in FEATURES if name != lead and chance.random() < 0.12]
        drawn: Options = {"family": chance.choice(["gpt", "llama"])}
        for name in (*others, lead):  # the leading feature has the last word
            drawn |= chance.choice(FEATURES[name])
        family = drawn["family"]
        options = COMMON | FAMILIES[family] | drawn
        features = tuple(
            name for name in (lead, *others) if any(each.items() <= options.items() for each in FEATURES[name])
        )
        ranks, options = _ranks({name: value for name, value in options.items() if name != "family"})
        options |= {"pipeline_model_parallel_size": 1, "schedule": "gpipe"}
        if 2 * ranks <= max_processes and _is_valid(family, Run(processes=ranks, options=options)):
            return family, features, ranks, options


def _placement(chance: random.Random, family: str, ranks: int, options: Options, max_processes: int) -> Run:
    """One run of a layout on pipeline ranks, valid, not stopped, without moves."""
    while True:
        schedule = chance.choice(list(SCHEDULES))
        pipeline = chance.randint(1 if schedule in V_SCHEDULES else 2, max_processes // ranks)
        placed = options | {
            "pipeline_model_parallel_size": pipeline,
            "schedule": schedule,
            "virtual_stages_per_worker": chance.choice(SCHEDULES[schedule]),
            "granularity": chance.choice(["layer", "sublayer"]),
        }
        # Compiled items of a block that is recomputed in parts are other graphs: settings of the compiler.
        recompute = ["none", "full"] if "torch_compile" in options else ["none", "selective", "full"]
        placed["recompute_granularity"] = chance.choice(recompute)
        run = Run(processes=ranks * pipeline, options=placed, is_graphed=chance.random() < 0.3)
        if _is_valid(family, run):
            return run


def draw(seed: int, number: int, *, max_processes: int = 4, lead: str | None = None) -> Drawn:
    """The layout of a seed and a number.

    Args:
        seed: of the matrix.
        number: of the layout, from 0; it also chooses the leading feature.
        max_processes: most processes of a run.
        lead: leading feature; None: that of the number.
    """
    chance = random.Random(f"{seed}.{number}")
    lead = lead or list(FEATURES)[number % len(FEATURES)]
    family, features, ranks, options = _layout(chance, lead, max_processes)
    parts = [range(1, STEPS)] if chance.random() < 0.4 else [range(1, STOP), range(STOP + 1, STEPS)]
    placed = []
    for steps in parts:
        run = _placement(chance, family, ranks, options, max_processes)
        more: dict[str, Any] = {}
        pipeline = run.options["pipeline_model_parallel_size"]
        if pipeline > 1 and chance.random() < 0.7:
            more["changes"] = {step: chance.randrange(2**32) for step in steps if chance.random() < 0.6}
            loses = run.options["schedule"] not in V_SCHEDULES and not run.is_graphed
            if loses and more["changes"] and chance.random() < 0.3:
                *others, last = more["changes"].items()
                more |= {"changes": dict(others), "release": last}
        stops = {"exit_interval": STOP} if steps.stop == STOP else {}
        placed.append(Run(processes=run.processes, options=run.options | stops, is_graphed=run.is_graphed, **more))
    reference = Run(processes=ranks, options=options)
    return Drawn(number=number, family=family, features=features, reference=reference, placed=tuple(placed))


def write_inputs(folder: Path) -> dict[str, Options]:
    """Data sets of all families in a folder; options that name them."""
    sentences, vocabulary = write_sentences(folder)
    causal: Options = {"data_path": str(write_data(folder / "causal"))}
    masked: Options = {"data_path": str(sentences), "vocab_file": str(vocabulary)}
    return {family: masked if family in ("bert", "t5") else causal for family in FAMILIES}


def run_graphed(words: list[str]) -> tuple[int, str]:
    """Run the command with ``--cuda-graph`` on static memory, without a device."""
    from dynmo_train.pipeline import graphed_items
    from dynmo_train.trainer import setup

    graphed_items.make_graphed_callables = on_static_memory
    setup.check_graph_device = lambda _device: None
    return run_command([*words, "--cuda-graph"])


def _partition(planner: ScriptedPlanner, run: Run, seed: int, num_fewer: int = 0) -> list[list[str]]:
    """A random partition of the layers over the stages of the active plan; a stage may be empty."""
    chance, items = random.Random(seed), planner.items()
    stages = len(planner.active()["stages"]) - num_fewer
    allowed = range(1, len(items))
    if run.options["granularity"] == "layer":
        allowed = [at for at in allowed if _layer_of(items[at]) != _layer_of(items[at - 1])]
    cuts = sorted(chance.choice(allowed) for _ in range(stages - 1))
    return [items[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(items)])]


def _layer_of(item: str) -> str:
    """``layers.3`` of ``layers.3.mlp``; other items are layers by themselves."""
    return item.rpartition(".")[0] if "layers." in item else item


def _answer(planner: ScriptedPlanner, run: Run) -> None:
    """The answer at the boundary at which the trainer waits."""
    _, step = planner.pending() or (0, 0)
    if step in run.changes:
        planner.answer(_partition(planner, run, run.changes[step]))
    elif run.release is not None and step == run.release[0]:
        leaving = run.options["pipeline_model_parallel_size"] - 1
        lost = sum(stage["worker"] == leaving for stage in planner.active()["stages"])
        planner.answer(_partition(planner, run, run.release[1], lost), released=[leaving])
    else:
        planner.answer()


def _answer_until(ended: threading.Event, planner: ScriptedPlanner, run: Run) -> None:
    while not ended.is_set():
        if planner.pending() is not None:
            _answer(planner, run)
        time.sleep(0.01)


def _train(drawn: Drawn, run: Run, folder: Path, inputs: Options, *, resumes: bool) -> str | None:
    """Run a command to its end; what failed, if anything."""
    files = {} if "mock_data" in run.options else inputs
    words = ["pretrain", drawn.family, "--run-dir", str(folder), *_words(run.options | files)]
    words += ["--load", str(folder)] if resumes else []
    planned = bool(run.changes or run.release)
    words += [*SCRIPTED_PLANNER_OPTIONS, "--rebalance-interval", "1", "--profile-interval", "1"] if planned else []
    ended = threading.Event()
    thread = threading.Thread(target=_answer_until, args=(ended, ScriptedPlanner(folder), run), daemon=True)
    if planned:
        thread.start()
    try:
        play = run_graphed if run.is_graphed else run_command
        results = run_workers(play, run.processes, words, joins=False)
    finally:
        ended.set()
        if planned:
            thread.join()
    failed = [f"exit code {code}: {talk[-1500:]}" for code, talk in results if code]
    return failed[0] if failed else None


def _values(folder: Path) -> dict[str, Any]:
    """What must be the same bits: losses and norms, validation losses, all tensors of the last checkpoint."""
    shards = manifest_of(folder, STEPS)["tensors"]
    return {
        "losses and norms": figures(folder),
        "validation losses": [
            {name: value for name, value in line.items() if name.startswith(("validation", "test", "step"))}
            for line in lines(folder / "metrics.jsonl")
            if "lm_loss" not in line
        ],
        "tensors": {
            name: sorted((str(shard["index"]), shard["crc32"]) for shard in entry["shards"])
            for name, entry in shards.items()
        },
    }


def differences(drawn: Drawn, folder: Path, inputs: dict[str, Options]) -> Iterator[str]:
    """Train a layout and its placement; yields what differs or fails.

    Args:
        drawn: the layout.
        folder: an empty folder for both runs.
        inputs: of ``write_inputs``.
    """
    whole, placed = folder / "whole", folder / "placed"
    for number, (target, run) in enumerate([(whole, drawn.reference), *((placed, run) for run in drawn.placed)]):
        failed = _train(drawn, run, target, inputs[drawn.family], resumes=number > 1)
        if failed:
            yield failed
            return
    expected, found = _values(whole), _values(placed)
    if len(expected["losses and norms"]) != STEPS:
        yield f"the reference has {len(expected['losses and norms'])} of {STEPS} steps"
    yield from (f"other {name}" for name in expected if found[name] != expected[name])


def report_of(drawn: Drawn, problems: Sequence[str]) -> str:
    """The commands of a layout that differs, and what differs."""
    runs = [drawn.reference, *drawn.placed]
    return "\n".join([f"layout {drawn.number}: {'; '.join(problems)}", *(command_line(drawn, run) for run in runs)])


def counts_of(folder: Path) -> dict[str, int]:
    """Moves and releases of the placement's runs."""
    placed = folder / "placed"
    results = [line for line in lines(placed / "profile.jsonl") if line["record"] == "plan_result"]
    return {
        "moves": sum(line["result"] == "applied" for line in results),
        "releases": len(events(placed, "released")),
    }
