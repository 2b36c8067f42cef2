"""Random layouts from the command line, each on a random placement: the proof that placement changes no bit.

    python -m tests.distributed.random_placements [--seed S] [--number N | --layouts N | --minutes M] [--compiler]

A layout is what fixes the mathematics: model family, data, optimizer, precision, compiler, techniques, and the tensor-,
context-, expert- and data-parallel sizes with the ZeRO stage. It is trained twice. The reference has no pipeline. The
placement has pipeline ranks, a schedule, a unit of placement, recomputation and emulated CUDA graphs of its own, moves
layers to random partitions, moves experts, releases workers, and is stopped, or killed between two checkpoints, and
resumed on another placement. Losses, norms, metrics, validation losses and the last checkpoint must be the same bits::

    seed, number ──> pair of labels ──> layout with both, and others by chance ──> reference ────────> values ──┐
                                                        └──> placement: run, kill or stop, run ─────> values ──┴─> same?

Everything follows from a seed and a number. The rules of the configuration reject what cannot be combined; this module
has no list of exclusions. Each number has a pair of labels drawn from all pairs, so that pairs of which few layouts are
valid come up as well.

Progress is on stderr; stdout has a table of labels and a JSON object. A layout that differs prints its command lines.
The exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynmo_train._common.document import Problem
from dynmo_train.config import Config, DefaultContext, config_of, validate
from dynmo_train.models.registry import family_of
from tests.distributed import decoder_options
from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS, ScriptedPlanner
from tests.distributed.sentences import write_sentences
from tests.distributed.static_memory import on_static_memory
from tests.distributed.whole_runs import events, lines, manifest_of, run_command, write_data
from tests.distributed.workers import kill_workers, run_workers
from tests.paths import ROOT

Options = dict[str, Any]
STEPS, STOP = 6, 3
COMMON: Options = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "micro_batch_size": 1,
    "microbatches": 4,
    "train_iters": STEPS,
    "lr": 2e-3,
    # 18 samples to train on, which come again: the cache of frozen outputs needs that.
    "split": "20,40,40",
    "eval_iters": 1,
    "eval_interval": STOP,
    "log_interval": STOP,
    "clip_grad": 0.3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_workers": 0,
}
EXPERTS: Options = {"num_experts": 4, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
EXPERT_RANKS: Options = {**EXPERTS, "replicas": 2, "expert_model_parallel_size": 2}
PRUNED: Options = {
    "sparsify": True,
    "pruning_start_iter": 1,
    "pruning_end_iter": 5,
    "pruning_freq": 2,
    "final_sparsity": 0.5,
}
CACHED: Options = {"freeze_schedule": "1:1,3:2", "freeze_cache_activations": 4}
UNTIED: Options = {"untie_embeddings_and_output_weights": True}
# With weights of this size a part of the tokens exits at these thresholds; a tied and scaled embedding needs less.
EXITS: Options = {"early_exit_layers": "0", "early_exit_threshold": 0.03}
WIDE: Options = {"init_method_std": 0.15}
# Options that fix the mathematics, by feature; of several alternatives one is drawn.
FEATURES: dict[str, tuple[Options, ...]] = {
    "dropout": ({"hidden_dropout": 0.1}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "eight microbatches": ({"microbatches": 8},),
    "replicas": ({"replicas": 2}, {"replicas": 2, "DDP_impl": "torch"}, {"replicas": 2, "grad_reduce_in_bf16": True}),
    "ZeRO 1": ({"replicas": 2, "zero_stage": 1},),
    "ZeRO 2": ({"replicas": 2, "zero_stage": 2}, {"replicas": 2, "zero_stage": 2, "zero_gradient_sync": "step"}),
    "ZeRO 3": ({"replicas": 2, "zero_stage": 3}, {"replicas": 2, "zero_stage": 3, "DDP_impl": "torch"}),
    "tensor parallel": ({"tensor_model_parallel_size": 2},),
    "sequence parallel": ({"tensor_model_parallel_size": 2, "sequence_parallel": True},),
    "context parallel": ({"context_parallel_size": 2},),
    "vocabulary parallel": ({"vocabulary_parallel": 4}, {"vocabulary_parallel": 7}),
    "experts": (EXPERTS,),
    "expert choice": ({**EXPERTS, "moe_routing": "expert-choice"},),
    "balanced experts": ({**EXPERTS, "moe_routing": "balanced", "moe_router_topk": 1},),
    "biased router": (
        {
            **{**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            "moe_router_bias_update_rate": 0.01,
        },
    ),
    "expert parallel": (EXPERT_RANKS,),
    "expert slots": ({**EXPERT_RANKS, "moe_expert_slots": 4, "moe_expert_chunk_rows": 3},),
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
    "multi-token prediction": ({"family": "llama", "mtp_num_layers": 1}, {"family": "llama", "mtp_num_layers": 2}),
    "attention window": ({"attention_window": 5},),
    "document masks": (
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "mock_data": True},
        {"reset_attention_mask": True, "mock_data": True},
    ),
    "curriculum": ({"curriculum_shortest": 8, "curriculum_steps": 4},),
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
    "untied": (UNTIED,),
    "pruning": ({**PRUNED, "pruning_scope": "global"}, {**PRUNED, "pruning_scope": "layer"}),
    "2:4 pruning": ({**PRUNED, "pruning_mode": "2:4"}, {**PRUNED, "pruning_mode": "2:4-transposable"}),
    "block pruning": ({**PRUNED, "pruning_mode": "block", "pruning_block_size": 16},),
    "structured pruning": ({**PRUNED, "pruning_mode": "structured"},),
    "freezing": ({"freeze_schedule": "2:1,4:2"}, {"freeze_schedule": "3:2", "freeze_tied": True}),
    "cached freezing": ({**CACHED, "freeze_tied": True}, {**CACHED, **UNTIED}),
    "adaptive freezing": (
        {
            **{"freeze_adaptive": True, "freeze_interval": 1, "freeze_window": 2},
            **{"freeze_tolerance": 0.9, "freeze_patience": 1},
        },
    ),
    "mixture of depths": ({"mod_capacity": 0.5},),
    "early exit": (
        EXITS,
        {**EXITS, "early_exit_layers": "0,1", "early_exit_threshold": 0.015},
        {**EXITS, "early_exit_key_values": "skip"},
    ),
    "saturation exits": ({**EXITS, "early_exit_measure": "saturation", "early_exit_threshold": 0.9},),
    "classified exits": (
        {**EXITS, "early_exit_measure": "classifier", "early_exit_threshold": 0.047, "early_exit_loss_tokens": 0.5},
    ),
    "sampled exits": (
        {
            **{**EXITS, "early_exit_loss_tokens": 0.5, "early_exit_loss_vocabulary": 16},
            "exit_layer_weight": "depth",
        },
    ),
    "sparse attention": ({"sparse_attention": True, "sparse_attention_buckets": 4, "sparse_attention_block": 4},),
}
SENTENCES: Options = {"tokenizer_type": "BertWordPieceLowerCase"}
T5: Options = {
    "family": "t5",
    "num_layers": None,
    "encoder_num_layers": 2,
    "decoder_num_layers": 2,
    "decoder_seq_length": 8,
    "vocab_extra_ids": 10,
    **SENTENCES,
}
DECODER: Options = {
    name: value for name, value in decoder_options.COMMON.items() if name not in COMMON and "vocab" not in name
} | {"vocab_size": 97, "max_position_embeddings": None}
FAMILIES: dict[str, Options] = {
    "bert": {"family": "bert", **WIDE, **SENTENCES},
    "ict": {
        "family": "ict",
        "num_layers": 2,
        "micro_batch_size": 2,
        "biencoder_projection_dim": 8,
        "retriever_report_topk_accuracies": "1 2",
        "query_in_block_prob": 0.5,
        **SENTENCES,
    },
    "t5": T5,
    "relative t5": {**T5, "position_embedding_type": "relative"},
} | {name: {**DECODER, **each.options} for name, each in decoder_options.FAMILIES.items()}
# Metrics of frozen items are of the microbatches that the cache does not serve, which a move empties.
OF_CACHED_ITEMS = ("load_balancing_loss", "z_loss", "expert_load", "expert_tokens", "depth_share", "exit_share")
SCHEDULES: dict[str, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved-1f1b": (2, 3),
    "zero-bubble": (1, 2),
    "zb-v": (2,),
    "dualpipe-v": (2,),
}
MAX_PROCESSES = 4
SIZES = {f"{size} pipeline rank{'s' if size > 1 else ''}": size for size in range(1, MAX_PROCESSES + 1)}
RECOMPUTED, GRAPHED = "recompute ", "CUDA graphs, emulated"
# What a run of the placement has.
RUN_LABELS = (
    *SCHEDULES,
    *SIZES,
    *(f"{RECOMPUTED}{part}" for part in ("none", "selective", "full")),
    *(GRAPHED, "sublayers", "moves", "expert moves", "release"),
)
# How one run of the placement follows another.
RESUMED, KILLED = "resume", "kill"
PLACEMENT_LABELS = {*RUN_LABELS, RESUMED, KILLED}
LABELS = (*FAMILIES, *FEATURES, *RUN_LABELS, RESUMED, KILLED)
PLANNED: Options = {"balance": "online", "planner": "external", "balance_lockstep": True}
TRIES = 8
# Family, features, pipeline ranks of the two runs, and what is between them, by schedule; see ``canonical``.
CANONICAL: dict[str, tuple[str, tuple[str, ...], tuple[int, int], str]] = {
    "gpipe": ("gpt2", ("dropout", "pruning", "freezing"), (2, 3), RESUMED),
    "1f1b": ("qwen2", ("fp16", "untied", "cached freezing", "vocabulary parallel"), (2, 3), "release"),
    "interleaved-1f1b": ("bert", ("replicas", "structured pruning"), (2, 2), RESUMED),
    "zero-bubble": ("gpt2", ("dropout", "early exit", "adaptive freezing"), (3, 4), KILLED),
    "zb-v": ("deepseek_v3, further tokens", ("vocabulary parallel", "mixture of depths"), (3, 2), RESUMED),
    "dualpipe-v": ("t5", ("ZeRO 3", "bf16", "freezing"), (2, 2), KILLED),
}
Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command of the placement.

    Attributes:
        processes: number of processes.
        options: its options, those of the layout included.
        is_graphed: whether items run on static memory, as CUDA graphs do.
        changes: step -> seed of the partition to which layers move after it.
        release: step after which a pipeline rank but 0 is released, and the seed of it and of the others' partition.
        kill: step after which all processes get SIGKILL, with the last checkpoint one step back.
    """

    processes: int
    options: Options
    is_graphed: bool = False
    changes: dict[int, int] = field(default_factory=dict)
    release: tuple[int, int] | None = None
    kill: int | None = None

    @property
    def is_planned(self) -> bool:
        """Whether the test plays the planner of the run."""
        return bool(self.changes or self.release or self.kill)

    @property
    def labels(self) -> set[str]:
        """Labels of ``RUN_LABELS``."""
        found = {self.options["schedule"], f"{RECOMPUTED}{self.options.get('recompute_granularity', 'none')}"}
        found |= {name for name, size in SIZES.items() if size == self.options["pipeline_model_parallel_size"]}
        conditions = {
            GRAPHED: self.is_graphed,
            "sublayers": self.options.get("granularity") == "sublayer",
            "moves": bool(self.changes),
            "expert moves": "expert_rebalance_interval" in self.options,
            "release": self.release is not None,
        }
        return found | {name for name, holds in conditions.items() if holds}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A layout with its placement.

    Attributes:
        number: of the layout in the matrix.
        family: model family, by its name in ``FAMILIES``.
        features: names of the features that it has.
        reference: the run without a pipeline.
        placed: runs of the placement; each resumes the one before it.
    """

    number: int
    family: str
    features: tuple[str, ...]
    reference: Run
    placed: tuple[Run, ...]

    @property
    def labels(self) -> set[str]:
        """Everything that the layout and its placement have."""
        return {self.family, *self.features, *self._between}.union(*(run.labels for run in self.placed))

    @property
    def _between(self) -> set[str]:
        return {KILLED if run.kill else RESUMED for run in self.placed[:-1]}

    def pairs(self) -> set[Pair]:
        """Pairs of labels that come together: of placements those of the same run."""
        fixed = {self.family, *self.features, *self._between}
        return {pair for run in self.placed for pair in itertools.combinations(sorted(fixed | run.labels), 2)}


def _words(options: Options) -> list[str]:
    words = []
    for name, value in options.items():
        if name != "family" and value is not None:
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return words


def _pretrain(run: Run, folder: Path | str) -> list[str]:
    return ["pretrain", run.options["family"], "--run-dir", str(folder)]


def command_line(run: Run) -> str:
    """The command that a user would give, with what no command line has in parentheses."""
    data = [] if "mock_data" in run.options else ["--data-path", "DATA"]
    words = [*_pretrain(run, "RUN"), *data, *_words(run.options)]
    launch = ["dynmo-train", "launch", "local", "--nproc", str(run.processes), "--", *words]
    notes = ["CUDA graphs are emulated"] * run.is_graphed
    notes += [f"random moves after steps {', '.join(map(str, sorted(run.changes)))}"] * bool(run.changes)
    notes += [f"a worker is released after step {run.release[0]}"] if run.release else []
    notes += [f"killed after step {run.kill}"] if run.kill else []
    return shlex.join(launch) + (f"  ({'; '.join(notes)})" if notes else "")


def _config_of(run: Run) -> Config:
    files = {"vocab_size": 97, "data_path": None if "mock_data" in run.options else "-"}
    values = files | {name: value for name, value in run.options.items() if value is not None}
    values |= PLANNED if run.is_planned else {}
    # Who releases workers has no option with a planner of its own.
    values |= {"planner": "internal", "pack_to": 1} if run.release else {}
    # The rule of --cuda-graph on the CPU is for devices; what it can be combined with is checked here as well.
    return config_of(DefaultContext(world_size=run.processes), **values, cuda_graph=run.is_graphed)


def problems_of(run: Run) -> list[Problem]:
    """Why the configuration's rules refuse a run."""
    return validate(_config_of(run), run.processes)


def _is_valid(run: Run) -> bool:
    return not problems_of(run)


def reference_of(chosen: Options) -> Run:
    """The run without a pipeline; the numbers of replicas and of microbatches become processes and samples."""
    options = COMMON | chosen
    replicas, microbatches = options.pop("replicas", 1), options.pop("microbatches")
    options["global_batch_size"] = microbatches * replicas * options["micro_batch_size"]
    processes = replicas * options.get("tensor_model_parallel_size", 1) * options.get("context_parallel_size", 1)
    return Run(processes=processes, options=options | {"pipeline_model_parallel_size": 1, "schedule": "gpipe"})


def _with(chance: random.Random, chosen: Options, name: str, most: int) -> Options | None:
    """The options with one form of a feature or a family, valid on that number of processes; None: it has none."""
    forms = FEATURES.get(name) or (FAMILIES[name],)
    for form in chance.sample(forms, len(forms)):
        if all(chosen.get(key, value) == value for key, value in form.items()):
            run = reference_of(chosen | form)
            if run.processes <= most and _is_valid(run):
                return chosen | form
    return None


def _layout(chance: random.Random, leads: Sequence[str], names: Sequence[str], most: int) -> tuple[str, Options] | None:
    """Family and options of a layout with the leading labels, and with others by chance; None: it is not valid."""
    families = [name for name in leads if name in FAMILIES]
    if len(families) > 1:
        return None
    family = families[0] if families else chance.choice(list(FAMILIES))
    chosen: Options | None = dict(FAMILIES[family])
    # Features that need each other's options, such as replicas, may be valid in one order only.
    for name in chance.sample(leads, len(leads)):
        chosen = chosen if chosen is None or name not in FEATURES else _with(chance, chosen, name, most)
    if chosen is None:
        return None
    # One process per pipeline rank leaves room for four pipeline ranks, two for two.
    few = chance.choice([1, 1, 1, 2, 2, 4])
    for name in chance.sample(names, chance.randint(3, 8)):
        more = _with(chance, chosen, name, min(most, max(few, reference_of(chosen).processes)))
        chosen = chosen if more is None else more
    return family, chosen


def _pick(chance: random.Random, leads: Sequence[str], choices: Sequence[str]) -> str:
    return chance.choice([name for name in choices if name in leads] or list(choices))


def _placement(
    chance: random.Random,
    reference: Run,
    leads: Sequence[str],
    most: int,
    *,
    stop: int | None = None,
    kill: int | None = None,
) -> Run | None:
    """One run of a layout on pipeline ranks, without moves; None: it is not valid."""
    schedule = _pick(chance, leads, list(SCHEDULES))
    # More pipeline ranks are valid for fewer layouts, and come up less often by themselves.
    size = SIZES[_pick(chance, leads, [name for name, size in SIZES.items() for _ in range(size)])]
    options = reference.options | {
        "pipeline_model_parallel_size": size,
        "schedule": schedule,
        "virtual_stages_per_worker": chance.choice(SCHEDULES[schedule]),
        "granularity": "sublayer" if "sublayers" in leads or chance.random() < 0.5 else "layer",
    }
    # Compiled items of a block that is recomputed in parts are other graphs: settings of the compiler.
    parts = [f"{RECOMPUTED}{part}" for part in ("none", "full", *(["selective"] * ("torch_compile" not in options)))]
    options["recompute_granularity"] = _pick(chance, leads, parts).removeprefix(RECOMPUTED)
    if "expert moves" in leads or (options.get("expert_model_parallel_size", 1) > 1 and chance.random() < 0.5):
        options["expert_rebalance_interval"] = 2
    options |= {"exit_interval": stop} if stop else {"save_interval": kill - 1} if kill else {}
    is_graphed = GRAPHED in leads or chance.random() < 0.2
    run = Run(processes=reference.processes * size, options=options, is_graphed=is_graphed, kill=kill)
    # A planner, which is where a run waits for the kill, is asked from two pipeline ranks on.
    has_planner = size > 1 or not kill
    return run if has_planner and run.processes <= most and _is_valid(run) else None


def _planned(chance: random.Random, run: Run, steps: range, leads: Sequence[str]) -> Run:
    """The run with moves and a release, where they are valid."""
    if run.options["pipeline_model_parallel_size"] == 1 or (
        {"moves", "release"}.isdisjoint(leads) and chance.random() < 0.3
    ):
        return run
    changes = {step: chance.randrange(2**32) for step in steps if chance.random() < 0.6}
    changes = changes or {steps[0]: chance.randrange(2**32)}
    moving = replace(run, changes=changes)
    *others, last = changes.items()
    if ("release" in leads and not (others or "moves" not in leads)) or not _is_valid(moving):
        return moving if _is_valid(moving) else run
    releasing = replace(run, changes=dict(others), release=last)
    wants = "release" in leads or chance.random() < 0.3
    return releasing if wants and _is_valid(releasing) else moving


def valid_pair(pair: Pair, tries: int, *, compiler: bool = False) -> bool:
    """Whether a layout with a pair of labels is found in that number of tries."""
    chance = random.Random(str(pair))
    names = [name for name in FEATURES if compiler or name != "compiled"]
    drawn = (_attempt(chance, 0, pair, names, MAX_PROCESSES) for _ in range(tries))
    return any(each is not None and pair in each.pairs() for each in drawn)


def canonical(schedule: str) -> Drawn:
    """A small layout for a schedule, with a technique, moves of layers and a resume on other pipeline ranks."""
    family, features, sizes, between = CANONICAL[schedule]
    chosen = dict(FAMILIES[family])
    for name in features:
        chosen |= next(form for form in FEATURES[name] if _is_valid(reference_of(chosen | form)))
    reference = reference_of(chosen)
    placed = []
    for at, size in enumerate(sizes):
        options = reference.options | {
            **{"pipeline_model_parallel_size": size, "schedule": schedule, "granularity": "sublayer"},
            **{"virtual_stages_per_worker": SCHEDULES[schedule][0], "recompute_granularity": ("none", "full")[at]},
        }
        more: dict[str, Any] = {"changes": {4: 7}} if at else {"changes": {1: 5, 2: 6}}
        if at and between == "release":
            more["release"] = (5, 8)
        if not at:
            options |= {"save_interval": STOP - 1} if between == KILLED else {"exit_interval": STOP}
            more["kill"] = STOP if between == KILLED else None
        placed.append(Run(processes=reference.processes * size, options=options, **more))
    return Drawn(number=0, family=family, features=features, reference=reference, placed=tuple(placed))


def _attempt(chance: random.Random, number: int, leads: Sequence[str], names: Sequence[str], most: int) -> Drawn | None:
    laid_out = _layout(chance, [name for name in leads if name in FAMILIES or name in FEATURES], names, most)
    if laid_out is None:
        return None
    family, chosen = laid_out
    reference = reference_of(chosen)
    # A kill costs the processes of its world, and is drawn less often.
    between = _pick(chance, leads, [RESUMED, RESUMED, RESUMED, KILLED])
    is_whole = {RESUMED, KILLED}.isdisjoint(leads) and chance.random() < 0.15
    parts = [range(1, STEPS)] if is_whole else [range(1, STOP), range(STOP + 1, STEPS)]
    # Where the leading labels are those of one run, it is the first or the last one.
    leading = chance.randrange(len(parts))
    placed = []
    for at, steps in enumerate(parts):
        own = leads if at == leading else ()
        more: dict[str, Any] = {}
        if len(parts) > 1 and not at:
            more = {"kill": STOP} if between == KILLED else {"stop": STOP}
        tried = (_placement(chance, reference, own, most, **more) for _ in range(4 * TRIES))
        run = next(filter(None, tried), None)
        if run is None:
            return None
        placed.append(_planned(chance, run, steps, own))
    features = tuple(name for name, forms in FEATURES.items() if any(form.items() <= chosen.items() for form in forms))
    return Drawn(number=number, family=family, features=features, reference=reference, placed=tuple(placed))


def draw(
    seed: str, number: int, *, max_processes: int = MAX_PROCESSES, compiler: bool = False, leads: Pair | None = None
) -> Drawn:
    """The layout of a seed and a number.

    Args:
        seed: of the matrix.
        number: of the layout, from 0.
        max_processes: most processes of a run.
        compiler: whether layouts may be compiled.
        leads: labels that it has; None: a pair that the seed and the number choose.
    """
    chance = random.Random(f"{seed}.{number}")
    labels = [name for name in LABELS if compiler or name != "compiled"]
    names = [name for name in labels if name in FEATURES]
    while True:
        pair = leads or tuple(chance.sample(labels, 2))
        for _ in range(TRIES):
            drawn = _attempt(chance, number, pair, names, max_processes)
            if drawn is not None and tuple(sorted(pair)) in drawn.pairs():
                return drawn


def write_inputs(folder: Path) -> dict[str, Options]:
    """Data sets of all families in a folder; options that name them, by ``--family``."""
    sentences, vocabulary = write_sentences(folder)
    causal: Options = {"data_path": str(write_data(folder / "causal", documents=20, lengths=(60, 90)))}
    masked: Options = {"data_path": str(sentences), "vocab_file": str(vocabulary)}
    return {"gpt": causal, "llama": causal, "bert": masked, "ict": masked, "t5": masked}


def play_command(words: list[str]) -> tuple[int, str]:
    """Run the command; its parser is built once in a process, which takes a third of the time of a small run."""
    import typer.main

    if not hasattr(typer.main.get_command, "cache_info"):
        typer.main.get_command = functools.lru_cache(64)(typer.main.get_command)  # type: ignore[assignment]
    return run_command(words)


def run_graphed(words: list[str]) -> tuple[int, str]:
    """Run the command with ``--cuda-graph`` on static memory, without a device."""
    from dynmo_train.pipeline import graphed_items
    from dynmo_train.trainer import setup

    graphed_items.make_graphed_callables = on_static_memory
    setup.check_graph_device = lambda _device: None
    return play_command([*words, "--cuda-graph"])


def _partition(planner: ScriptedPlanner, run: Run, seed: int, num_fewer: int = 0) -> list[list[str]]:
    """A random partition of the layers over the stages of the active plan; a stage may be empty."""
    chance, items = random.Random(seed), planner.items()
    stages = len(planner.active()["stages"]) - num_fewer
    specs = {item.name: item for item in family_of(_config_of(run)).items}
    allowed = [at for at in range(1, len(items)) if specs[items[at]].cut_before]
    if run.options["granularity"] == "layer":
        allowed = [at for at in allowed if specs[items[at]].layer != specs[items[at - 1]].layer]
    cuts = sorted(chance.choice(allowed) for _ in range(stages - 1))
    return [items[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(items)])]


def _answer(planner: ScriptedPlanner, run: Run, step: int) -> None:
    """The answer at the boundary after ``step``, at which the trainer waits."""
    if step in run.changes:
        planner.answer(_partition(planner, run, run.changes[step]))
    elif run.release is not None and step == run.release[0]:
        leaving = random.Random(run.release[1]).randrange(1, run.options["pipeline_model_parallel_size"])
        lost = sum(stage["worker"] == leaving for stage in planner.active()["stages"])
        planner.answer(_partition(planner, run, run.release[1], lost), released=[leaving])
    else:
        planner.answer()


def _answer_until(ended: threading.Event, planner: ScriptedPlanner, run: Run) -> None:
    while not ended.is_set():
        try:
            if (waiting := planner.pending()) is not None:
                if waiting[1] == run.kill:
                    kill_workers(run.processes)
                    return
                _answer(planner, run, waiting[1])
        except Exception:
            # The run would wait for its answer until the planner's timeout.
            kill_workers(run.processes)
            raise
        time.sleep(0.005)


def _train(run: Run, folder: Path, inputs: Options, *, resumes: bool) -> str | None:
    """Run a command to its end; what failed, if anything."""
    files = {} if "mock_data" in run.options else inputs
    words = [*_pretrain(run, folder), *_words(run.options | files)]
    words += ["--load", str(folder)] if resumes else []
    words += [*SCRIPTED_PLANNER_OPTIONS, "--rebalance-interval", "1"] if run.is_planned else []
    ended, planner = threading.Event(), ScriptedPlanner(folder)
    planner.skip_pending()  # the question of a run that was killed
    thread = threading.Thread(target=_answer_until, args=(ended, planner, run), daemon=True)
    if run.is_planned:
        thread.start()
    try:
        play = run_graphed if run.is_graphed else play_command
        results = run_workers(play, run.processes, words, joins=False)
    except AssertionError as error:
        return None if run.kill and (folder / "checkpoints" / "LATEST").exists() else str(error)[-1500:]
    finally:
        ended.set()
        if run.is_planned:
            thread.join()
    failed = [f"exit code {code}: {talk[-1500:]}" for code, talk in results if code]
    failed += ["it was not killed"] if run.kill else []
    return failed[0] if failed else None


def _values(folder: Path, unequal: Sequence[str]) -> dict[str, Any]:
    """What must be the same bits: losses, norms and metrics but ``unequal`` ones, validation losses, the checkpoint."""
    manifest = manifest_of(folder, STEPS)
    trained, evaluated = {}, {}
    for line in lines(folder / "metrics.jsonl"):
        if "lm_loss" in line:  # a step that is trained again counts once
            trained[line["step"]] = {name: line[name] for name in line if name not in unequal}
        else:
            evaluated[line["step"], "test_loss" in line] = line
    return {
        "losses, norms and metrics": trained,
        "validation losses": evaluated,
        "tensors": {
            name: sorted((str(shard["index"]), shard["crc32"]) for shard in entry["shards"])
            for name, entry in manifest["tensors"].items()
        },
        "steps of the optimizer": manifest["optimizer"]["steps"],
        "frozen and pruned items": manifest["dynamic"],
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
        failed = _train(run, target, inputs[run.options["family"]], resumes=number > 1)
        if failed:
            yield f"{'placement' if number else 'reference'}: {failed}"
            return
    is_cached = "freeze_cache_activations" in drawn.reference.options
    unequal = ("step_ns", "plan_id", "compiled_graphs", *(OF_CACHED_ITEMS if is_cached else ()))
    expected, found = _values(whole, unequal), _values(placed, unequal)
    if len(expected["losses, norms and metrics"]) != STEPS:
        yield f"the reference has {len(expected['losses, norms and metrics'])} of {STEPS} steps"
    yield from (f"other {name}" for name in expected if found[name] != expected[name])
    counts = counts_of(folder)
    planned = {
        "moves": sum(len(run.changes) + bool(run.release) for run in drawn.placed),
        "releases": sum(bool(run.release) for run in drawn.placed),
    }
    yield from (f"{counts[name]} of {number} {name}" for name, number in planned.items() if counts[name] != number)


def counts_of(folder: Path) -> dict[str, int]:
    """Moves of layers and of experts, and releases, in the placement's runs."""
    placed = folder / "placed"
    results = [line for line in lines(placed / "profile.jsonl") if line["record"] == "plan_result"]
    return {
        "moves": sum(line["result"] == "applied" for line in results),
        "moves of experts": len(events(placed, "experts_moved")),
        "releases": len(events(placed, "released")),
    }


def report_of(drawn: Drawn, problems: Sequence[str], again: str) -> str:
    """The command that repeats a layout that differs, its commands, and what differs.

    Args:
        drawn: the layout.
        problems: of ``differences``.
        again: options of this program with which ``draw`` gives the layout.
    """
    runs = [drawn.reference, *drawn.placed]
    text = f"layout {drawn.number}: {'; '.join(problems)}"
    return "\n".join([text, f"python -m tests.distributed.random_placements {again}", *map(command_line, runs)])


def log(line: str) -> None:
    """A line of progress."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(kw_only=True)
class Matrix:
    """Layouts that were trained.

    Attributes:
        seed: of the layouts.
        max_processes: most processes of a run.
        compiler: whether layouts may be compiled.
        reports: of those that differ.
        layouts: label -> number of layouts, and of those that are equal.
        pairs: pairs of labels that came up.
        counts: moves and releases.
    """

    seed: str
    max_processes: int = MAX_PROCESSES
    compiler: bool = False
    reports: list[str] = field(default_factory=list)
    layouts: dict[str, Counter[bool]] = field(default_factory=dict)
    pairs: set[Pair] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    num_drawn: int = 0

    def draw(self, number: int) -> Drawn:
        """The layout of a number."""
        return draw(self.seed, number, max_processes=self.max_processes, compiler=self.compiler)

    def train(self, drawn: Drawn, folder: Path, inputs: dict[str, Options], arguments: str | None = None) -> str | None:
        """Train a layout; its report where it differs, with the arguments of this program that repeat it."""
        number, begin = drawn.number, time.monotonic()
        problems = list(differences(drawn, folder, inputs))
        self.num_drawn += 1
        self.pairs |= drawn.pairs()
        for name in drawn.labels:
            self.layouts.setdefault(name, Counter())[not problems] += 1
        log(
            f"[{time.monotonic() - begin:4.1f} s] layout {number}: {'differs' if problems else 'equal'};"
            f" {', '.join([drawn.family, *drawn.features])} on {', '.join(sorted(drawn.labels & PLACEMENT_LABELS))}"
        )
        if not problems:
            self.counts.update(counts_of(folder))
            shutil.rmtree(folder)
            return None
        more = [f"--processes {self.max_processes}"] if self.max_processes != MAX_PROCESSES else []
        drawn_by = " ".join([f"--seed {self.seed} --number {number}", *more, *["--compiler"] * self.compiler])
        self.reports.append(report_of(drawn, problems, arguments or drawn_by))
        log(self.reports[-1])
        return self.reports[-1]

    def train_for(self, seconds: float, folder: Path, inputs: dict[str, Options]) -> None:
        """Train layouts from number 0 on until the time is over or one differs; one that has begun is completed."""
        end = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() >= end or self.train(self.draw(number), folder / str(number), inputs):
                return

    def summary(self) -> str:
        """What came up, for a person."""
        labels = len(LABELS) - (not self.compiler)
        return (
            f"{self.num_drawn} layouts of seed {self.seed}: {len(self.layouts)} of {labels} labels and"
            f" {len(self.pairs)} pairs of them, {', '.join(f'{count} {name}' for name, count in self.counts.items())};"
            f" {len(self.reports)} differ"
        )


def commit() -> str:
    """The commit's hash; outside a repository ``0``."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()[:12] or "0"
    return "0"


def main() -> int:
    """Run the matrix; 1 if a layout differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=31, help="layouts to draw")
    parser.add_argument("--minutes", type=float, help="draw layouts for this time, until one differs")
    parser.add_argument("--number", type=int, help="number of the one layout to run")
    parser.add_argument("--canonical", choices=CANONICAL, help="the canonical layout of a schedule")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--processes", type=int, default=MAX_PROCESSES, help="most processes of a run")
    parser.add_argument("--compiler", action="store_true", help="draw layouts that are compiled, too")
    options = parser.parse_args()
    matrix = Matrix(seed=options.seed, max_processes=options.processes, compiler=options.compiler)
    with tempfile.TemporaryDirectory(prefix="dynmo-exact-") as folder:
        inputs = write_inputs(Path(folder))
        if options.canonical is not None:
            drawn = canonical(options.canonical)
            matrix.train(drawn, Path(folder) / "0", inputs, f"--canonical {options.canonical}")
        elif options.minutes is not None:
            matrix.train_for(60 * options.minutes, Path(folder), inputs)
        else:
            for number in range(options.layouts) if options.number is None else [options.number]:
                matrix.train(matrix.draw(number), Path(folder) / str(number), inputs)
    sys.stdout.write("| label | layouts | equal |\n|---|---|---|\n")
    for name in LABELS:
        found = matrix.layouts.get(name, Counter())
        sys.stdout.write(f"| {name} | {found.total()} | {found[True]} |\n")
    equal = matrix.num_drawn - len(matrix.reports)
    totals = {"layouts": matrix.num_drawn, "equal": equal, "pairs": len(matrix.pairs), **matrix.counts}
    sys.stdout.write(json.dumps(totals) + "\n")
    log(matrix.summary())
    return int(bool(matrix.reports))


if __name__ == "__main__":
    sys.exit(main())
