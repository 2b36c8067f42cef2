"""Inputs of the comparison, made once for both trees: by the tree that runs the script, from seeds.

Documents and the scripts of ``bin/`` are those of the old commit: a newer document may show what the old commit lacks.
Fixtures and regressions are those of the running tree. A folder has a ``AREA.json`` per area, and the files that it
names; ``{inputs}`` in a command stands for that folder, ``{folder}`` for an empty one of the execution.
"""

from __future__ import annotations

import fnmatch
import json
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from tests.fuzz.mutations import mutate
from tests.paths import CONTRACTS, ROOT

Inputs = dict[str, Any]
Case = dict[str, Any]
SEED = 38
# Defaults of --count.
COUNTS: Mapping[str, int] = MappingProxyType({"runs": 200, "plans": 1000})
MUTATIONS_PER_FIXTURE = 10

# ---------------------------------------------------------------- runs

# Layouts that need two processes without a pipeline; their placements need four, which is affordable for some.
REPLICATED = ("replicas", "ZeRO", "tensor parallel", "sequence parallel", "context parallel", "expert parallel")
PLACED_OF_REPLICATED = 8  # of 8 replicated layouts, one is placed
# Half of the generator's own microbatches: a run takes half as long, and every schedule still has its phases.
SHORTER = {"global_batch_size": 4}


def runs(folder: Path, _old: Path, count: int | None, _scripts: Path | None) -> Inputs:
    """Command lines of the placement generator: a layout without pipeline, and on a random placement."""
    from tests.distributed.random_placements import COMMON, FEATURES, draw, write_inputs

    data = folder / "runs"
    data.mkdir()
    files = write_inputs(data)
    groups: list[Inputs] = []
    left, number = COUNTS["runs"] if count is None else count, 0
    while left > 0:
        lead = list(FEATURES)[number % len(FEATURES)]
        is_replicated = lead.startswith(REPLICATED)
        with mock.patch.dict(COMMON, SHORTER):
            drawn = draw(SEED, number, max_processes=4 if is_replicated else 2)
        number += 1
        if "compiled" in drawn.features and lead != "compiled":
            continue  # compiling takes as long as twenty other runs; its own turns suffice
        placed = drawn.placed if not is_replicated or number % PLACED_OF_REPLICATED == 0 else ()
        found = [_run(drawn, "whole", drawn.reference, files, folder, resumes=False)]
        found += [
            _run(drawn, f"placed {at}", run, files, folder, resumes=at > 0, name="placed")
            for at, run in enumerate(placed)
        ]
        groups.append({"number": number - 1, "runs": found[:left]})
        left -= len(found)
    warm_up = ["pretrain", "gpt", "--run-dir", "{folder}", "--mock-data", "--train-iters", "2", "--num-layers", "2"]
    warm_up += ["--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--lr", "1e-3"]
    warm_up += ["--micro-batch-size", "1", "--global-batch-size", "2", "--vocab-size", "97", "--eval-iters", "1"]
    return {"groups": groups, "warm_up": warm_up}


def _run(
    drawn: Any, label: str, run: Any, files: Mapping[str, Any], folder: Path, *, resumes: bool, name: str = "whole"
) -> Inputs:
    """A run of the generator as a plain list of arguments."""
    family = run.options["family"]
    given = {} if "mock_data" in run.options else files[family]
    words = ["pretrain", family, "--run-dir", f"{{folder}}/{name}"]
    for option, value in (run.options | given).items():
        if option == "family":
            continue
        flag = f"--{option.replace('_', '-')}"
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    words += ["--load", f"{{folder}}/{name}"] * resumes
    moves = {str(step): {"seed": seed, "released": []} for step, seed in run.changes.items()}
    if run.release is not None:
        step, seed = run.release
        moves[str(step)] = {"seed": seed, "released": [run.options["pipeline_model_parallel_size"] - 1]}
    if moves:
        from tests.distributed.scripted_planner import SCRIPTED_PLANNER_OPTIONS

        words += [*SCRIPTED_PLANNER_OPTIONS, "--rebalance-interval", "1", "--profile-interval", "1"]
    return {
        "name": label,
        "folder": name,
        "words": [word.replace(str(folder), "{inputs}") for word in words],
        "ranks": run.processes,
        "moves": moves,
        "cuts layers": run.options.get("granularity") == "sublayer",
    }


# ---------------------------------------------------------------- documents


def documents(folder: Path, old: Path, count: int | None, _scripts: Path | None) -> Inputs:
    """Documents of the old commit that have command blocks."""
    from tests.documents.markdown import RECORDS
    from tests.documents.test_document_runs import runnable

    names = []
    for path in sorted(old.rglob("*.md")):
        name = path.relative_to(old).as_posix()
        if name.startswith((*RECORDS, ".")) or not runnable(path.read_text(encoding="utf-8")):
            continue
        names.append(name)
    names = names[:count]
    for name in names:
        target = folder / "documents" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(old / name, target)
    return {"documents": names}


# ---------------------------------------------------------------- verdicts

# Format -> name of the file of a case, and the command that judges it.
JUDGES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "plan": (
            "plan.json",
            ("dynmo-plan", "verify", "{folder}/plan.json", "--profile", "{inputs}/profile.jsonl"),
        ),
        "profile": ("profile.jsonl", ("dynmo-plan", "profile", "check", "{folder}/profile.jsonl")),
        "checkpoint": ("manifest.json", ("dynmo-ckpt", "verify", "{folder}")),
        "dataset": ("data.dataset.json", ("dynmo-prep", "verify", "{folder}/data")),
        "indexed": ("data.idx", ("dynmo-prep", "verify", "{folder}/data")),
        "step_digests": (
            "digests.jsonl",
            ("dynmo-train", "compare-digests", "{folder}/digests.jsonl", "{inputs}/digests.jsonl"),
        ),
    }
)
SIDE = ("dataset", "indexed")
MODEL = ("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32")
DRY = (
    *("dynmo-train", "pretrain", "gpt", "--mock-data", *MODEL, "--vocab-size", "97", "--micro-batch-size", "1"),
    *("--global-batch-size", "8", "--train-iters", "4", "--lr", "1e-3", "--dry-run"),
)
JOB = ("--nproc", "2", "--dry-run", "--", "pretrain", "gpt", "--mock-data")
TOKENIZE = ("dynmo-prep", "binarize", "{inputs}/text.jsonl", "-o", "{folder}/out", "--workers", "1", "--append-eod")
# Prefix of a fuzz target -> name of the file with its input, and the command that reads it. ``{text}`` is the input.
REGRESSIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("balance.analysis.sweep_axes", "", ("dynmo-plan", "what-if", "{inputs}/profile.jsonl", "--vary", "stages={text}")),
    ("balance.costs.expert_loads", "run.jsonl", ("dynmo-plan", "experts", "{folder}/run.jsonl", "--ranks", "2")),
    (
        "balance.inputs.import_profile",
        "trace.json",
        (
            *("dynmo-plan", "profile", "import", "{folder}/trace.json", "--header", "{inputs}/profile.jsonl"),
            *("-o", "{folder}/out.jsonl"),
        ),
    ),
    (
        "balance.inputs.model_config",
        "config.json",
        ("dynmo-plan", "profile", "build", "{folder}/config.json", "-o", "{folder}/out.jsonl"),
    ),
    (
        "balance.inputs.problem_from_options.parse_bytes",
        "",
        ("dynmo-plan", "partition", "{inputs}/profile.jsonl", "--memory", "{text}"),
    ),
    ("balance.inputs.profile_source", "profile.jsonl", ("dynmo-plan", "profile", "check", "{folder}/profile.jsonl")),
    ("balance.inputs.run_history.read_history-metrics", "metrics.jsonl", ("dynmo-plan", "report", "{folder}")),
    ("balance.inputs.run_history.read_history-plan", "plans/plan-000001.json", ("dynmo-plan", "report", "{folder}")),
    ("balance.recipes", "recipe.toml", ("dynmo-plan", "recipe", "{folder}/recipe.toml")),
    (
        "ckpt.cli.options.parse_bytes",
        "",
        (
            *("dynmo-ckpt", "convert", "{inputs}/native", "{folder}/out", "--to", "hf", "--no-check-logits"),
            *("--max-shard-size", "{text}"),
        ),
    ),
    ("ckpt.converters.huggingface.read_hf-computed", "adapter/adapter_config.json", (
        *("dynmo-ckpt", "convert", "{inputs}/native", "{folder}/out", "--to", "hf", "--no-check-logits"),
        *("--adapter", "{folder}/adapter"),
    )),
    ("ckpt.converters.llama2c", "model.bin", ("dynmo-ckpt", "info", "{folder}/model.bin")),
    ("ckpt.converters.registry.open_checkpoint-dcp-metadata", ".metadata", ("dynmo-ckpt", "info", "{folder}")),
    (
        "ckpt.converters.registry.open_checkpoint-deepspeed-zero1-fp16-mp_rank",
        "mp_rank_00_model_states.pt",
        ("dynmo-ckpt", "info", "{folder}"),
    ),
    ("ckpt.huggingface.files.read_tensors-index", "model.safetensors.index.json", ("dynmo-ckpt", "info", "{folder}")),
    (
        "ckpt.torch_save.reader",
        "iter_0000001/mp_rank_00/model_optim_rng.pt",
        ("dynmo-ckpt", "info", "{folder}/iter_0000001"),
    ),
    (
        "tools.config.settings.parse_task",
        "",
        ("dynmo-prep", "decontaminate", "{inputs}/text.jsonl", "-o", "{folder}/out.jsonl", "--task", "{text}"),
    ),
    ("tools.io.jsonl.read_parquet", "rows.parquet", (
        "dynmo-prep", "merge", "{folder}/rows.parquet", "-o", "{folder}/out.jsonl"
    )),
    ("tools.runner.recipe", "recipe.toml", ("dynmo-prep", "pipeline", "{folder}/recipe.toml")),
    ("tools.tokenization.tokenizers.load_tokenizer-gpt2-vocab", "vocab.json", (
        *TOKENIZE, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "{folder}/vocab.json",
        "--merge-file", "{inputs}/merges.txt",
    )),
    ("tools.tokenization.tokenizers.load_tokenizer-words", "vocab.json", (
        *TOKENIZE, "--tokenizer-type", "WhitespaceVocab", "--vocab-file", "{folder}/vocab.json"
    )),
    ("tools.tokenization.tokenizers.load_tokenizer-hf", "tokenizer.json", (
        *TOKENIZE, "--tokenizer", "{folder}/tokenizer.json"
    )),
    ("train._common.report.run_data.read_run_files-metrics", "metrics.jsonl", (
        "dynmo-train", "compare", "{folder}", "{folder}"
    )),
    ("train._common.report.run_data.read_run_files-plan", "plans/plan-000001.json", (
        "dynmo-train", "compare", "{folder}", "{folder}"
    )),
    ("train.trainer.monitoring.compare_report", "metrics.jsonl", ("dynmo-train", "compare", "{folder}", "{folder}")),
    ("train.trainer.monitoring.run_status.read_run_status-plan", "plans/plan-000001.json", (
        "dynmo-train", "monitor", "{folder}", "--once"
    )),
    ("train.trainer.monitoring.run_status.read_run_status-profile", "profile.jsonl", (
        "dynmo-train", "monitor", "{folder}", "--once"
    )),
    ("train.config.batch_schedule", "", (*DRY, "--step-batch-size-schedule", "{text}")),
    ("train.config.compat.deepspeed", "ds.json", (*DRY, "--deepspeed", "--deepspeed_config", "{folder}/ds.json")),
    ("train.config.parse.parse_freeze_schedule", "", (*DRY, "--freeze-schedule", "{text}")),
    ("train.config.parse.parse_layers", "", (*DRY, "--early-exit-layers", "{text}")),
    ("train.config.resolve", "run.toml", (*DRY, "--config", "{folder}/run.toml")),
    ("train.data.tokenizer.open_tokenizer-bert", "vocab.txt", (
        *DRY, "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "{folder}/vocab.txt"
    )),
    ("train.data.tokenizer.open_tokenizer-hf", "tokenizer.json", (
        *DRY, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "{folder}/tokenizer.json"
    )),
    ("train.data.tokenizer.open_tokenizer-sentencepiece", "tokenizer.model", (
        *DRY, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "{folder}/tokenizer.model"
    )),
    ("train.data.tokenizer.open_tokenizer-vocab", "vocab.json", (
        *DRY, "--tokenizer-type", "WhitespaceVocab", "--vocab-file", "{folder}/vocab.json"
    )),
    ("train.pipeline.emulation_trace", "trace.jsonl", (*DRY, "--emulate", "{folder}/trace.jsonl")),
    ("train.launch.options.parse_node_range", "", ("dynmo-train", "launch", "local", "--nnodes", "{text}", *JOB)),
    ("train.launch.schedulers.slurm.parse_het_group", "", ("dynmo-train", "launch", "slurm", "--het", "{text}", *JOB)),
    ("train.launch.schedulers.kubernetes.parse_version", "", (
        "dynmo-train", "launch", "kubernetes", "--trainer-version", "{text}", *JOB
    )),
)  # fmt: skip
NO_COMMAND = "no command reads this input by itself: it passes between processes, or within a longer work"


def verdicts(folder: Path, _old: Path, count: int | None, _scripts: Path | None) -> Inputs:
    """Fixtures of the contracts, mutations of the valid ones, and the fuzzing regressions."""
    place = folder / "verdicts"
    place.mkdir()
    _common_files(place)
    cases = [*_fixtures(place), *_mutations(place)]
    excluded = {}
    for path in sorted((ROOT / "tests" / "fuzz" / "regressions").glob("*/*.input")):
        key = f"regression {path.parent.name}/{path.stem}"
        judge = next((rest for prefix, *rest in REGRESSIONS if path.parent.name.startswith(prefix)), None)
        if judge is None or path.parent.name.endswith("-repacked"):
            excluded[key] = NO_COMMAND
        else:
            cases.append(_regression(place, key, path.read_bytes(), *judge))
    cases = cases if count is None else random.Random(SEED).sample(cases, min(count, len(cases)))
    first = {case["command"][0]: case for case in reversed(cases)}
    return {"cases": cases, "excluded": excluded, "warm_up": list(first.values())}


def _common_files(place: Path) -> None:
    from tests.unit.dynmo_ckpt import native_checkpoints as native

    shutil.copy(CONTRACTS / "profile" / "valid" / "steps.jsonl", place / "profile.jsonl")
    shutil.copy(CONTRACTS / "step_digests" / "valid" / "step.jsonl", place / "digests.jsonl")
    (place / "text.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    (place / "merges.txt").write_text("#version: 0.2\na b\n")
    model = native.model(num_layers=1)
    native.save(place / "native", native.parameters(model), model)


def _fixtures(place: Path) -> Iterator[Case]:
    for name in JUDGES:
        for path in sorted((CONTRACTS / name).glob("*/*.*")):
            if path.suffix != ".bin":
                yield _case(place, f"fixture {name}/{path.parent.name}/{path.stem}", name, path.read_bytes(), path)


def _mutations(place: Path) -> Iterator[Case]:
    """Damaged copies of the valid fixtures: the corpus of the fuzzing campaign, from one seed."""
    for name in JUDGES:
        paths = [path for path in sorted((CONTRACTS / name / "valid").glob("*.*")) if path.suffix != ".bin"]
        corpus = [path.read_bytes() for path in paths]
        for path, data in zip(paths, corpus, strict=True):
            numbers = random.Random(f"{SEED}.{name}.{path.stem}")
            for number in range(MUTATIONS_PER_FIXTURE):
                damaged = mutate(corpus, numbers, data)
                yield _case(place, f"mutation {name}/{path.stem}/{number}", name, damaged, path)


def _case(place: Path, key: str, format_name: str, data: bytes, path: Path) -> Case:
    file, command = JUDGES[format_name]
    target = place / "cases" / re.sub(r"[^\w.-]", "_", key)
    target.mkdir(parents=True)
    if format_name == "checkpoint":
        data = _sealed(data)
    (target / file).write_bytes(data)
    if format_name == "indexed" and path.with_suffix(".bin").exists():
        shutil.copy(path.with_suffix(".bin"), target / "data.bin")
    if format_name == "dataset":
        for end in (".bin", ".idx"):
            shutil.copy(CONTRACTS / "indexed" / "valid" / f"mmap-u16{end}", target / f"data{end}")
    argument = {"checkpoint": ".", "dataset": "data", "indexed": "data"}.get(format_name, file)
    return {
        "key": key, "format": format_name, "folder": f"cases/{target.name}", "file": argument, "command": list(command)
    }  # fmt: skip


def _sealed(data: bytes) -> bytes:
    """A manifest with the checksum of its bytes, so that its other rules are reached."""
    blank = re.sub(rb'("manifest_crc32": *")[0-9a-f]{8}"', rb'\g<1>00000000"', data, count=1)
    return blank.replace(b'"00000000"', f'"{zlib.crc32(blank):08x}"'.encode(), 1)


def _regression(place: Path, key: str, data: bytes, file: str, command: tuple[str, ...]) -> Case:
    target = place / "cases" / re.sub(r"[^\w.-]", "_", key)
    target.mkdir(parents=True)
    if file:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes(data)
        if "plans" in file or file == "metrics.jsonl":
            shutil.copy(place / "profile.jsonl", target / "profile.jsonl")
    text = data.decode("utf-8", "surrogateescape").replace("\0", "\\0")
    words = [word.replace("{text}", text) for word in command]
    return {"key": key, "format": "", "folder": f"cases/{target.name}", "file": file, "command": words}


# ---------------------------------------------------------------- plans

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved-1f1b", "zb-v", "dualpipe-v")
BALANCERS = ("exact", "exact", "exact", "time", "parameters", "uniform", "deepspeed", "deepspeed_param", "diffusion")
CONFIGS: tuple[Callable[[random.Random], Inputs], ...] = (
    lambda chance: {
        "model_type": "gpt2", "n_layer": chance.randint(2, 12), "n_embd": 64 * chance.randint(1, 16), "n_head": 4,
        "vocab_size": chance.choice([1000, 50257]), "n_positions": 256,
    },
    lambda chance: {
        "model_type": "llama", "num_hidden_layers": chance.randint(2, 12), "hidden_size": 64 * chance.randint(1, 16),
        "num_attention_heads": 8, "num_key_value_heads": chance.choice([2, 8]), "vocab_size": 32000,
        "intermediate_size": chance.choice([128, 1024]), "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": chance.random() < 0.5, "hidden_act": "silu",
    },
    lambda chance: {
        "model_type": "mixtral", "num_hidden_layers": chance.randint(2, 8), "hidden_size": 64 * chance.randint(1, 8),
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "intermediate_size": 256,
        "max_position_embeddings": 256, "num_local_experts": chance.choice([4, 8]), "num_experts_per_tok": 2,
        "sliding_window": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    },
)  # fmt: skip


def plans(folder: Path, _old: Path, count: int | None, _scripts: Path | None) -> Inputs:
    """Random profiles and synthetic models, each with random options of the planner."""
    place = folder / "plans"
    place.mkdir()
    problems = []
    for number in range(COUNTS["plans"] if count is None else count):
        chance = random.Random(f"{SEED}.{number}")
        problems.append(_model(place, number, chance) if number % 5 == 4 else _profile(place, number, chance))
    return {"problems": problems}


def _options(chance: random.Random) -> list[str]:
    words = ["--balancer", chance.choice(BALANCERS), "--granularity", chance.choice(["layer", "sublayer"])]
    if chance.random() < 0.4:
        schedule = chance.choice(SCHEDULES)
        words += ["--schedule", schedule, "--virtual-stages", "1" if schedule in SCHEDULES[:3] else "2"]
    if chance.random() < 0.3:
        words += ["--microbatches", str(chance.randint(1, 12))]
    if chance.random() < 0.3:
        words += ["--stages", str(chance.randint(1, 5))]
    if chance.random() < 0.2:
        words += ["--memory", f"{chance.randint(1, 400)}MB"]
    if chance.random() < 0.2:
        words += ["--objective", chance.choice(["bottleneck", "simulated"])]
    return words


def _commands(source: str, chance: random.Random) -> list[list[str]]:
    """``partition`` always, and one of the other commands for every fourth problem."""
    commands = [["partition", source, "--format", "json", *_options(chance)]]
    if chance.random() < 0.25:
        other = chance.choice(["simulate", "compare", "explain", "repack", "what-if", "verify", "replay"])
        if other == "verify":
            commands[0] += ["-o", "{folder}/plan.json"]
            commands.append(["verify", "{folder}/plan.json", "--profile", source])
        else:
            more = {"what-if": ["--vary", "stages=1:3"], "repack": ["--keep", "0.8"]}.get(other, [])
            commands.append([other, source, "--format", "json", *more])
    return commands


def _model(place: Path, number: int, chance: random.Random) -> Inputs:
    config = chance.choice(CONFIGS)(chance)
    name = f"config-{number:04d}.json"
    (place / name).write_text(json.dumps(config))
    build = ["profile", "build", f"{{inputs}}/{name}", "-o", "{folder}/profile.jsonl"]
    build += ["--workers", str(chance.randint(1, 6)), "--microbatches", str(chance.randint(1, 12))]
    build += ["--device", chance.choice(["h200", "h100", "a100", "cpu"])]
    build += ["--technique", chance.choice(["static", "pruning", "freezing", "moe", "mod", "early-exit"])]
    build += ["--steps", "6", "--seed", str(chance.randrange(100)), "--noise", chance.choice(["0", "0.1"])]
    return {"key": f"model {number}", "commands": [build, *_commands("{folder}/profile.jsonl", chance)]}


def _profile(place: Path, number: int, chance: random.Random) -> Inputs:
    name = f"profile-{number:04d}.jsonl"
    records = [_header(chance)]
    items = records[0]["items"]
    # Costs of few different values have ties, whose breaking is a decision of the balancer too.
    scale = chance.choice([1, 2, 1000, 777_777])
    costs = [scale * chance.randint(1, 9 if chance.random() < 0.5 else 4000) for _ in items]
    for step in range(1, chance.randint(2, 6)):
        forward = [cost + (chance.randint(0, cost // 10) if scale > 2 else 0) for cost in costs]
        records.append(
            {
                "record": "step", "step": step, "plan_id": 0, "step_ns": 4 * sum(forward), "forward_ns": forward,
                "backward_ns": [2 * cost for cost in forward],
                "activation_bytes": [chance.randrange(1, 100_000) for _ in items],
                "busy_ns": [sum(forward)] * len(records[0]["workers"]),
                "peak_memory_bytes": [10_000_000] * len(records[0]["workers"]),
            }
        )  # fmt: skip
    (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"key": f"profile {number}", "profile": name, "commands": _commands(f"{{inputs}}/{name}", chance)}


def _header(chance: random.Random) -> Inputs:
    layers = chance.randint(2, 10)
    names = ["embedding", *(f"layers.{at}.{part}" for at in range(layers) for part in ("attention", "mlp")), "head"]
    items = []
    for name in names:
        parameters = chance.randrange(1000, 2_000_000)
        items.append(
            {
                "name": name, "layer": name.rpartition(".")[0] or name,
                "kind": name.rpartition(".")[2],
                "param_count": parameters, "param_bytes": 4 * parameters, "gradient_bytes": 4 * parameters,
                "optimizer_bytes": 8 * parameters, "boundary_bytes": chance.choice([65_536, 1 << 20]),
                "cut_before": True, "tied_to": "embedding" if name == "head" and chance.random() < 0.5 else None,
            }
        )  # fmt: skip
    workers = [
        {
            "worker": at, "ranks": [at], "hosts": ["node0"], "device": "cpu",
            "memory_bytes": chance.choice([None, None, 1 << 30]),
            "relative_speed": chance.choice([1, 1, 1, 0.5]), "releasable": chance.random() < 0.5,
        }
        for at in range(chance.randint(1, 4))
    ]  # fmt: skip
    return {
        "format": "dynmo.profile", "version": 1, "written_by": "a test", "created_utc": "2026-01-01T00:00:00Z",
        "record": "header", "run_id": "random", "segment": 0,
        "model": {"family": "gpt", "num_layers": layers, "hidden_size": 128, "sequence_length": 128},
        "schedule": "1f1b", "virtual_stages_per_worker": 1, "granularity": "layer",
        "microbatches": chance.randint(1, 12), "micro_batch_size": 4, "tensor_parallel_size": 1,
        "data_parallel_size": 1, "expert_parallel_size": 1,
        "link": {"bandwidth_bytes_per_s": chance.choice([10**9, 10**11]), "latency_ns": 20_000},
        "workers": workers, "items": items,
    }  # fmt: skip


# ---------------------------------------------------------------- checkpoints

FORMATS = ("native", "hf", "legacy", "dcp", "titan", "deepspeed")
ONLY_WRITTEN = ("gguf",)
TITAN = ("llama", "llama-f16")  # of the native models, those that torchtitan has
TOPOLOGY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {kind: ("--tp", "2") for kind in ("native", "legacy", "deepspeed")}
)
DECODER_FORMATS = ("hf", "native", "dcp", "titan")


def checkpoints(folder: Path, _old: Path, count: int | None, _scripts: Path | None) -> Inputs:
    """Small checkpoints, and the conversions between every pair of formats."""
    import numpy as np

    from tests.unit.dynmo_ckpt import families
    from tests.unit.dynmo_ckpt import native_checkpoints as native

    place = folder / "checkpoints"
    place.mkdir()
    models = {
        "gpt": (native.model(num_layers=2), native.parameters, np.float32),
        "llama": (families.llama(num_layers=2), families.parameters, np.float32),
        "llama-f16": (families.llama(num_layers=2), families.parameters, np.float16),
        "bert": (families.bert(), families.parameters, np.float32),
        "t5": (families.t5(), families.parameters, np.float32),
    }
    chains = []
    for name, (model, parameters, dtype) in models.items():
        values = native.true_rows(model["vocab_size"], parameters(model))
        values = {key: value.astype(dtype) for key, value in values.items()}
        state = {**native.optimizer_state(values), **native.masks(values)} if dtype is np.float32 else {}
        partition = None if model["family"] in ("gpt", "llama") else [list(dict.fromkeys(map(_item, values)))]
        native.save(place / name, {**values, **state}, model, partition=partition, ties=families.ties(model))
        sources = [kind for kind in FORMATS if kind != "titan" or name in TITAN]
        chains += [*_pairs(name, "native", sources, (*FORMATS, *ONLY_WRITTEN)), _topologies(name)]
    for name in _save_decoders(place):
        chains += _pairs(name, "hf", DECODER_FORMATS, DECODER_FORMATS)
    warm_up = ["convert", "{inputs}/gpt", "{folder}/warm-up", "--to", "hf"]
    return {"chains": chains[:count], "warm_up": warm_up}


def _item(tensor: str) -> str:
    """The item of a tensor of a BERT or T5: ``encoder.layers.0`` of ``encoder.layers.0.mlp.fc1.weight``."""
    found = re.match(r"((?:en|de)coder\.)?(?:layers\.\d+|\w+)", tensor)
    return found[0] if found else tensor


def _save_decoders(place: Path) -> list[str]:
    """Decoders as transformers saves them."""
    import torch
    import transformers

    from tests.cli.test_ckpt_all_pairs import DECODERS

    for kind, config in DECODERS.items():
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}Config")(**config, pad_token_id=None)
        getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(place / kind)
    return list(DECODERS)


def _pairs(name: str, first: str, sources: Sequence[str], targets: Sequence[str]) -> list[Inputs]:
    """A chain per source format: first the source itself, then each target."""
    chains = []
    for source in sources:
        at = "{inputs}/" + name
        steps = []
        if source != first:
            steps.append(_step(f"{first} to {source}", ["convert", at, "{folder}/source"], source))
            at = "{folder}/source"
        steps.append({"name": f"{source} info", "out": "none", "words": ["info", at, "--format", "json"]})
        for target in targets:
            step = _step(f"{source} to {target}", ["convert", at, f"{{folder}}/{target}"], target)
            steps.append(step | {"name": f"from {step['name']}"})
        chains.append({"name": f"{name}/{source}", "steps": steps})
    return chains


def _step(name: str, words: list[str], target: str) -> Inputs:
    # The checkpoints record no betas and epsilon, which torchtitan's optimizer state has.
    state = "--no-optimizer" if target == "titan" else "--with-optimizer-if-present"
    words = [*words, "--to", target, "--no-check-logits", state, *TOPOLOGY.get(target, ())]
    return {"name": name, "out": words[2].removeprefix("{folder}/"), "words": words}


def _topologies(name: str) -> Inputs:
    at = "{inputs}/" + name
    steps = [
        {"name": "reshard", "out": "a", "words": ["reshard", at, "{folder}/a", "--tp", "2", "--pp", "2"]},
        {"name": "merge", "out": "b", "words": ["merge", "{folder}/a", "{folder}/b"]},
        {"name": "split", "out": "c", "words": ["split", at, "{folder}/c", "--tp", "1", "--pp", "2"]},
        {"name": "diff", "out": "none", "words": ["diff", "{folder}/b", "{folder}/c", "--format", "json"]},
        {"name": "average", "out": "d", "words": ["average", at, "{folder}/b", "-o", "{folder}/d"]},
        {"name": "verify", "out": "none", "words": ["verify", "{folder}/a", "--format", "json"]},
    ]
    return {"name": f"{name}/topologies", "steps": steps}


# ---------------------------------------------------------------- dry runs

# What scripts of Megatron-LM, DeepSpeed and their users look like, in addition to those of --scripts.
SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "megatron_arrays.sh": """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=4
MODEL_ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
    --lr-warmup-fraction .001 --attention-backend auto --use-distributed-optimizer --overlap-grad-reduce
)
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \\
    "${PARALLEL_ARGS[@]}" --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --log-interval 10
""",
        "deepspeed_heredoc.sh": """#!/bin/bash
ZERO_STAGE=${1:-1}
cat <<EOT > ds_config.json
{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": $ZERO_STAGE}}
EOT
deepspeed --num_gpus 2 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 \\
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --mock-data \\
    --tokenizer-type NullTokenizer --vocab-size 99 --deepspeed --deepspeed_config ds_config.json \\
    --checkpoint-activations --DDP-impl local --no-query-key-layer-scaling
""",
        "slurm_loop.sh": """#!/bin/bash
#SBATCH --nodes=2 --gres=gpu:8
set -eu
train() { local stages=$1; shift; srun -l python pretrain_gpt.py --pipeline-model-parallel-size $stages "$@"; }
for stages in 1 2; do
    [[ $stages == 2 ]] && train $stages --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 \\
        --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size $((16 * 2)) --train-iters 2 --lr 1e-3 \\
        --data-path corpus --vocab-file ${HOME%/*}/vocab.json --merge-file merges.txt --split 949,50,1 --bf16
done
""",
        "bert.sh": """#!/bin/bash
python -m torch.distributed.launch --nproc_per_node 2 pretrain_bert.py --num-layers 2 --hidden-size 32 \\
    --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 \\
    --train-iters 2 --lr 1e-4 --data-path corpus --vocab-file vocab.txt --distributed-backend nccl --fp16 \\
    --lr-decay-iters 990000 --lr-decay-style linear --weight-decay 1e-2 --lr-warmup-fraction .01
""",
    }
)


def dry_runs(folder: Path, old: Path, count: int | None, scripts: Path | None) -> Inputs:
    """Scripts of others, and the names of the old commit's own scripts."""
    place = folder / "dry_runs"
    place.mkdir()
    for name, text in SCRIPTS.items():
        (place / name).write_text(text)
    for path in sorted(scripts.rglob("*.sh")) if scripts else ():
        target = place / "given" / path.relative_to(scripts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*.sh"))
    own = sorted(
        path.relative_to(old).as_posix()
        for path in (old / "bin").rglob("*.sh")
        if re.search(r"dynmo-(train|ckpt|prep)|trainer|train_", path.read_text(encoding="utf-8"))
    )
    return {"scripts": names[:count], "own": own[:count]}


# ---------------------------------------------------------------- help


def help_texts(_folder: Path, _old: Path, _count: int | None, _scripts: Path | None) -> Inputs:
    """The four programs."""
    from tests.documents.markdown import PROGRAMS

    return {"programs": list(PROGRAMS)}


MAKERS: Mapping[str, Callable[[Path, Path, int | None, Path | None], Inputs]] = MappingProxyType(
    {
        "help": help_texts,
        "dry_runs": dry_runs,
        "plans": plans,
        "verdicts": verdicts,
        "checkpoints": checkpoints,
        "documents": documents,
        "runs": runs,
    }
)
# List of an area's inputs that --only and --count choose from, and the field that names a member; None: itself.
CHOSEN_BY: Mapping[str, Mapping[str, str | None]] = MappingProxyType(
    {
        "help": {"programs": None},
        "dry_runs": {"scripts": None, "own": None},
        "plans": {"problems": "key"},
        "verdicts": {"cases": "key"},
        "checkpoints": {"chains": "name"},
        "documents": {"documents": None},
        "runs": {"groups": "number"},
    }
)


def make(area: str, folder: Path, old: Path, *, count: int | None, only: str | None, scripts: Path | None) -> Inputs:
    """Make the inputs of an area.

    Args:
        area: its name.
        folder: of all inputs.
        old: tree whose documents and scripts are executed.
        count: number of runs, plans, cases, documents, chains or scripts; None: the area's own.
        only: pattern of their names.
        scripts: folder of more scripts for dry runs.
    """
    given = MAKERS[area](folder, old, None if only else count, scripts)
    for name, field in CHOSEN_BY[area].items() if only else ():
        found = [each for each in given[name] if fnmatch.fnmatchcase(str(each if field is None else each[field]), only)]
        given[name] = found[:count]
    return given
