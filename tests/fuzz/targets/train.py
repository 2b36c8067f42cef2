"""Parsers of ``dynmo_train``: command lines of Megatron and DeepSpeed, configurations, data, records of a run."""

# Seeds are lines as other programs write them.
# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target, bytes_target, file_target, fixtures, text_target
from tests.fuzz.targets.balance import EXPERT_PLAN, RUN_LINES
from tests.fuzz.targets.ckpt import _native, _safetensors
from tests.fuzz.targets.common import (
    click_command,
    click_errors,
    constant,
    document_targets,
    folder_target,
    pack_header,
    repacked,
    resealed,
    split_words,
    unpack_header,
)
from tests.fuzz.targets.tools import HTML, _sentence_piece, _tokenizer_json  # noqa: F401
from tests.paths import CONTRACTS, ROOT

P = "dynmo_train"
PLANS = fixtures(CONTRACTS, "plan/valid/*.json")
PROFILES = fixtures(CONTRACTS, "profile/valid/*.jsonl")
PROFILE = CONTRACTS / "profile" / "valid" / "steps.jsonl"
SCRIPTS = fixtures(
    ROOT, "bin/pretrain_*.sh", "bin/ds_*.sh", "bin/evaluate_*.sh", "bin/finetune_*.sh", "bin/ASPLOS23/**/*.sh"
)
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --global-batch-size 8 --train-iters 50 --lr 0.001 --min-lr 1e-5 --lr-decay-style cosine"
    " --data-path corpus --vocab-size 1000 --split 949,50,1 --pipeline-model-parallel-size 2 --fp16 --clip-grad 1.0"
    " --balancer exact"
)
FLAGS = [
    GPT,
    GPT + " --num-experts 4 --moe-router-topk 2 --zero-stage 1 --deepspeed --deepspeed_config ds.json",
    GPT + " --DDP-impl local --no-query-key-layer-scaling --checkpoint-activations --distributed-backend nccl",
    "--recipe gpt-345m --mock-data --dry-run --dry-run-processes 4 --vocab-size 1000 --early-exit-layers 3,7",
]
SHELL = [
    "A=(--lr 1 \"--split '9,1'\")\nfor i in 1 2; do [[ $i == 2 ]] && torchrun --nproc_per_node $((i*2)) pretrain_gpt.py ${A[@]} $@; done\n",
    'cat <<EOF > c.json\n{"train_batch_size": ${1:-4}}\nEOF\ncase $1 in a) X=`dirname $0`;; *) X=${2%.*};; esac\nsrun -l bash -c "python pretrain_bert.py --save $X"\n',
    '#SBATCH --nodes=2 --gres=gpu:8\nset -eu\nf() { local n=$1; shift; deepspeed --num_gpus $n pretrain_gpt.py "$@" | tee log; }\nf ${SLURM_GPUS_PER_NODE:-1} --lr $(echo 1 | head -n 1)\n',
]
TOMLS = [
    'num_layers = 4\nhidden_size = 64\nlr = 1e-4\n[data]\ndata_path = "x"\n[parallel]\npipeline_model_parallel_size = 2\n',
    "[optimizer]\nlr = 0.001\nadam_beta1 = 0.9\n[model]\nnum_layers = 2\nseq_length = 32\n[balance]\nbalancer = 'exact'\n",
]
TORCHTITAN = [
    '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nname = "AdamW"\nlr = 3e-4\n[training]\nlocal_batch_size = 8\n'
    "seq_len = 2048\nmax_norm = 1.0\nsteps = 1000\n[parallelism]\ndata_parallel_shard_degree = -1\n"
    "pipeline_parallel_degree = 2\n[checkpoint]\nenable = true\n"
]
DEEPSPEED = [
    {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}},
        "wall_clock_breakdown": False,
    },
    {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
]  # fmt: skip


def _resolve(data: bytes, folder: Path) -> None:
    """A command line of ``pretrain gpt``, parsed, resolved and checked; nothing is trained."""
    from dynmo_train.config import DefaultContext, dry_run_values, resolve_checked

    with PRETRAIN().make_context("gpt", split_words(data)) as context:
        flags = {name: value for name, value in context.params.items() if name not in ("config", "recipe")}
        from dynmo_train.config.presets import read_recipe

        recipe = context.params["recipe"]
        values = read_recipe(recipe, "gpt") if recipe else {}
        defaults = {**dry_run_values("gpt", flags, values), **values}
        resolve_checked(
            flags=flags,
            file=defaults,
            command={"family": "gpt"},
            context=DefaultContext(world_size=4, tokenizer_vocab_size=lambda _: 1000),
        )


PRETRAIN = click_command(f"{P}.cli.pretrain", "pretrain", "gpt")


def _explain(parse: Any, text: str) -> None:
    from dynmo_train.cli.explain_flags.script_commands import explain

    for command in parse(text):
        explain(command, {"--num-layers": 1, "--lr": 1, "--fp16": 0}, {})


def _python_configs(_folder: Path) -> list[bytes]:
    """Configurations of Megatron-Bridge and torchtitan."""
    return [
        b"def f() -> ConfigContainer:\n cfg = ConfigContainer(a=T(b=1))\n cfg.train.lr = 2 * N\n return cfg\nN = -1e-3\n",
        b"def f(x=3) -> Trainer.Config:\n c = g(x)\n c.a = [x, 'b']\n return c\n"
        b"def g(y) -> Trainer.Config:\n return Trainer.Config(t=T.Config(steps=y))\n",
    ]


def _titan(parse: Any, text: str) -> None:
    from dynmo_train._common.document import parse_toml
    from dynmo_train.cli.explain_flags.script_commands import explain, read_torchtitan

    explain(read_torchtitan(parse_toml(text)), {"--num-layers": 1}, {})


def _python_config(read: Any, text: str) -> None:
    """A recipe of the first function of a file, and its command."""
    from dynmo_train.cli.explain_flags.python_commands import command_of_config
    from dynmo_train.cli.explain_flags.python_config import config_functions
    from dynmo_train.config.compat.flags import FLAGS

    names = config_functions(text)
    command_of_config(read(text, names[0] if names else None), FLAGS.__contains__, FLAGS)


def _resolve_file(parse: Any, text: str) -> None:
    """The values of a file, resolved as those of ``--config``."""
    from dynmo_train.config import DefaultContext, resolve_checked

    flags = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 1000,
        "micro_batch_size": 2, "train_iters": 50, "lr": 0.001, "mock_data": True,
    }  # fmt: skip
    file = parse(text, "run.toml")
    resolve_checked(
        flags={},
        file={**flags, **file},
        command={"family": "gpt"},
        context=DefaultContext(world_size=4, tokenizer_vocab_size=lambda _: 1000),
    )


def _interpret(data: bytes, folder: Path) -> None:
    """A script, interpreted in a folder of its own; its commands are not executed."""
    from dynmo_train.cli.run_script.interpreter import interpret_script
    from dynmo_train.cli.run_script.slurm_header import slurm_directives, slurm_variables

    text = data.decode("utf-8", "surrogateescape")
    environment = {"PATH": "/bin", **slurm_variables(slurm_directives(text))}
    interpret_script(text, str(folder / "run.sh"), ["a", "b c"], environment, folder)


def _run_documents(_folder: Path) -> list[bytes]:
    from dynmo_train.config import DefaultContext
    from dynmo_train.config.resolve import config_document, config_of

    values = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 1000,
        "micro_batch_size": 2, "train_iters": 50, "lr": 0.001, "data_path": "corpus", "family": "gpt",
    }  # fmt: skip
    resolved = config_document(config_of(DefaultContext(world_size=2), **values))
    head = {"format": "dynmo.run", "version": 1, "written_by": "x", "created_utc": "2026-01-01T00:00:00Z"}
    rest = {
        "run_id": "r", "command_line": ["dynmo-train"], "world_size": 2, "hosts": ["h"], "segment": 0,
        "versions": {"python": "3.11"}, "engine": {},
    }  # fmt: skip
    return [json.dumps({**head, **rest, **resolved}).encode()]


def _digests(folder: Path) -> list[bytes]:
    return fixtures(CONTRACTS, "step_digests/valid/*")(folder)


def _checkpoint_weights(read: Any, place: Path) -> None:
    checkpoint = read(place)
    checkpoint.load(list(checkpoint.manifest["tensors"])[:3])


def _shard_header(decode: Any, data: bytes) -> None:
    size = int.from_bytes(data[:8], "little")
    decode(data[:8], data[8 : 8 + min(size, len(data))], len(data))


def _indexed(read: Any, path: Path) -> None:
    from dynmo_train._common.errors import DynmoError

    content = path.read_bytes()
    for size in (0, 6, 12, 24, 48, len(content) % 64):
        path.with_suffix(".bin").write_bytes(bytes(size))
        try:
            data = read(str(path.with_suffix("")))
        except DynmoError:
            continue
        for number in range(min(len(data.lengths), 20)):
            data.tokens[data.starts[number] : data.starts[number] + data.lengths[number]].sum()


def _tokenizer(kind: str, **names: str) -> Callable[[Any, Path], None]:
    def call(read: Any, path: Path) -> None:
        from dynmo_train.data.tokenizer import TokenizerFiles

        for name in names:
            if not (path.parent / name).exists():
                (path.parent / name).write_text(names[name])
        tokenizer = read(TokenizerFiles(kind=kind, files={name: path.parent / name for name in (path.name, *names)}))
        tokenizer.encode("a ab b x")
        tokenizer.vocabulary()
        tokenizer.decode([0, 1])

    return call


def _vocab_size(kind: str, flag: str, **more: str) -> Callable[[Any, Path], None]:
    def call(read: Any, path: Path) -> None:
        names = {"tokenizer_type": kind, "tokenizer_model": None, "vocab_file": None, "merge_file": None}
        read({**names, flag: str(path), **more})

    return call


def _records(kind: str) -> list[bytes]:
    from dynmo_train.launch.elastic import continuation, coordinator, growth, membership
    from dynmo_train.launch.watch import flight_recorder, heartbeat, node_watch, watchdog

    if kind == "notice":
        notice = continuation.Notice(generation=1, ranks=(0, 1), lost=(2,), sizes=(1, 1), cause="killed", since=1.5)
        return [continuation.encode_notice(notice).encode()]
    if kind == "proposal":
        return [growth.encode_proposal(growth.Proposal(attempt=1, ranks=(2, 3), processes=4, workers=4)).encode()]
    if kind == "outcome":
        grown = continuation.Notice(
            generation=1, ranks=(0, 1), lost=(), sizes=(1, 1), cause="x", since=1.5, joined=(1,), workers=2
        )
        outcomes = growth.Outcome(notice=grown), growth.Outcome(notice=None, reason="x")
        return [growth.encode_outcome(each).encode() for each in outcomes]
    if kind in STORE_VALUES:
        return [STORE_VALUES[kind]]
    if kind == "traces":
        last = flight_recorder.LastCollective(number=3, name="nccl:all_reduce", sizes="[[4]]", members=(0, 1))
        return [node_watch.encode_traces({1: {"0": last}}).encode()]
    if kind == "round":
        found = coordinator.Round(
            number=1, members=(0, 1), names=("a", "b"), processes=(2, 2), port=1234, extra_flags=("--x",)
        )
        return [json.dumps(asdict(found)).encode()]
    if kind == "record":
        record = membership.Record(
            kind=next(iter(membership.RecordKind)), state=next(iter(membership.NodeState)), **RECORD
        )
        return [coordinator.encode_record(record).encode()]
    beat = heartbeat.Heartbeat(
        pid=1,
        step=2,
        phase=heartbeat.Phase(1),
        microbatch=0,
        since_ns=5,
        is_cold=False,
        limit_s=60.0,
        median_step_s=0.5,
    )
    state = watchdog.RankState(rank=0, beat=beat, **STATE)
    return [node_watch.encode_states([state], 1).encode()]


STORE_VALUES = {
    "properties": b'{"--lr": "0.1", "--x": ""}',
    "deaths": b'{"1": -9, "2": 1}',
    "collectives": b'{"0": "all_reduce", "12": ""}',
    "end": b'{"code": 1, "message": "x"}',
}
RECORD: dict[str, Any] = {"name": "a", "rank": 1, "processes": 2, "round": 1, "failures": ((0, 1),)}
STATE: dict[str, Any] = {"host": "h", "age_s": 1.5, "process": "R"}


def _trace(read: Any, path: Path) -> None:
    names = [item["name"] for item in json.loads(PROFILE.read_bytes().splitlines()[0])["items"]]
    read(path, names)


def _status(name: str, reader: str) -> Target:
    """A file of a run directory, read by a command that reports on a run."""

    def run(data: bytes, folder: Path) -> None:
        from tests.fuzz.target import function

        place = folder / "run"
        if not place.exists():
            (place / "plans").mkdir(parents=True)
            (place / "profile.jsonl").write_bytes(PROFILE.read_bytes())
            (place / "plans" / "plan-000000.json").write_bytes((CONTRACTS / "plan/valid/initial.json").read_bytes())
            for file, text in RUN_LINES.items():
                (place / file).write_text(text, encoding="utf-8")
            (place / "run.json").write_bytes(_run_documents(folder)[0])
        (place / name).write_bytes(data)
        function(reader)(place)

    def seeds(folder: Path) -> list[bytes]:
        if name in RUN_LINES:
            return [RUN_LINES[name].encode()]
        return (_run_documents if name == "run.json" else PROFILES if name == "profile.jsonl" else PLANS)(folder)

    label = name.rpartition("/")[2].partition(".")[0]
    return Target(
        name=f"{reader.removeprefix('dynmo_').replace(':', '.')}-{label}", run=run, seeds=seeds, readers=(reader,)
    )


def _page(parse: Any, data: bytes) -> None:
    parse(data)
    parse(data.ljust(8192, b"\1")[:8192])


def _state_copy(read: Any, data: bytes) -> None:
    import torch

    copy = read(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))
    for item in list(copy.header.get("items", {}) if isinstance(copy.header, dict) else ()):
        copy.entry(item)


def _read_rows(task: str, read: Any, path: Path) -> None:
    read(task, path)


def _record_seeds(kind: str, _folder: Path) -> list[bytes]:
    return _records(kind)


def _race_folder(read: Any, path: Path) -> None:
    read(path.parent)


STATUS_FILES = ("run.json", "profile.jsonl", "metrics.jsonl", "events.jsonl", "plans/plan-000001.json")
HOSTS = [b"host1 slots=4 # c\nhost2 slots=8\n\n# x\n10.0.0.1 slots=1\n"]
MNLI = (
    b"index\tpromptID\tpairID\tgenre\ta\tb\tc\td\tsentence1\tsentence2\tlabel1\tgold_label\n"
    b"0\t1\t2\tx\ta\tb\tc\td\tA man . \tA woman\tneutral\tneutral\n"
)
RACE = b'{"article": "a b", "questions": ["q _ ?", "r"], "options": [["a","b","c","d"],["a","b","c","d"]], "answers": ["A", "B"]}\n'
TASK_ROWS = {
    "lambada": b'{"text": "a b c"}\n{"text": "d e"}\n',
    "hellaswag": b'{"ctx_a": "a", "ctx_b": "b", "activity_label": "x", "endings": ["a", "b"], "label": 1}\n',
    "piqa": b'{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n',
    "race": RACE,
}

TEXTS: list[tuple[str, list[str], Any]] = [
    ("config.parse:parse_split", ["969,30,1", "1", "90, 5, 5"], None),
    ("config.parse:parse_blend", ["0.3 A 0.7 B", "A", "1 'a b' 2 c"], lambda p, t: p("--data-path", t)),
    ("config.parse:parse_freeze_schedule", ["10:2,20:4"], None),
    ("config.parse:parse_counts", ["1 5 20"], lambda p, t: p("--x", t)),
    ("config.parse:parse_weights", ["0.1,0.2", "equal"], lambda p, t: p("--x", t, words=("equal",))),
    ("config.parse:parse_layers", ["3,7"], lambda p, t: p("--x", t)),
    ("config.parse:parse_balance", ["aux_loss", "sinkhorn", "seq_aux_loss"], lambda p, t: p(t, "0.01")),
    ("config.layer_freq:parse_layer_freq", ["2", "[0]*3+[1]*5", "([1]*3+[0])*2", "[0,1]*4"], lambda p, t: p(t, 8)),
    ("config.layer_freq:parse_no_rope_freq", ["2", "[0]*3+[1]*5", "([1]*3+[0])*2", "[0,1]*4"], lambda p, t: p(t, 8)),
    ("config.parse:parse_rotary_scaling", ['{"rope_type": "linear", "factor": 2}'], None),
    ("config.parse:parse_layer_types", ["sliding,full", "full_attention sliding_attention"], None),
    ("config.parse:parse_fractions", ["0.5,0.7,0.9"], lambda p, t: p("--x", t)),
    ("config.batch_schedule:parse_batch_size_schedule", ["0:16 2.4B:320", "0:8,1e6:.5K"], lambda p, t: p(t, 2048)),
    ("config.batch_schedule:parse_ranges", ["64:96 128:256", "0:1"], lambda p, t: p("--x", t)),
    ("pipeline.emulation_trace:parse_slow_worker", ["1:5:20:60"], None),
    ("launch.schedulers.slurm:parse_het_group", ["2:gpu", "2:gpu:4"], None),
    ("launch.schedulers.kubernetes:parse_claim", ["name:/path"], None),
    ("launch.schedulers.kubernetes:parse_version", ["1.30", "v1.29.3"], lambda p, t: p("--x", t)),
    ("launch.schedulers.job_script:parse_exports", ["A=1 B=x"], lambda p, t: p(t.split(" "))),
    ("launch.options:parse_node_range", ["1:4", "2"], lambda p, t: p("--nnodes", t)),
    ("evaluation.lm_eval_data:parse_tasks", ["lambada,piqa"], None),
    (
        "cli.explain_flags.command_help:parse_help",
        ["Usage: x\n  --num-layers INTEGER  Layers.\n  -p, --port N  Port.\n"],
        None,
    ),
]

_MANIFEST = bytes_target(
    f"{P}.formats.checkpoint.document:parse_manifest",
    lambda folder: [_manifest_of(folder)],
    call=lambda parse, data: parse(data, "m"),
)


def _manifest_of(folder: Path) -> bytes:
    _native(folder / "c")
    return (folder / "c" / "manifest.json").read_bytes()


_HEADER = bytes_target(
    f"{P}.formats.checkpoint.shards:decode_header", _safetensors, call=_shard_header, errors=(ValueError,)
)
TARGETS = [
    *document_targets(P),
    file_target(f"{P}.formats.plan:read_plan", PLANS, file="plan.json"),
    file_target(f"{P}.formats.run:read_run", _run_documents, file="run.json"),
    file_target(f"{P}.formats.run:read_resize_request", lambda _: [b'{"workers": 2}'], file="resize.json"),
    file_target(
        f"{P}.formats.run:read_join_request", lambda _: [b'{"processes": 4, "workers": null}'], file="join.json"
    ),
    file_target(
        f"{P}.formats.expert_plan:read_placements",
        lambda _: [json.dumps(EXPERT_PLAN).encode()],
        file="experts.json",
        call=lambda read, path: read(path, {"layers.0.mlp": 3}, 2, 2),
    ),
    file_target(f"{P}.formats.step_digests:read_step_digests", _digests, file="digests.jsonl"),
    file_target(
        f"{P}.formats.dataset:read_sidecar",
        fixtures(CONTRACTS, "dataset/valid/*.json"),
        file="data.json",
        call=lambda read, path: read(str(path.with_suffix(""))),
    ),
    file_target(
        f"{P}.formats.indexed:open_indexed", fixtures(CONTRACTS, "indexed/valid/*.idx"), file="data.idx", call=_indexed
    ),
    file_target(f"{P}.formats.profile:next_segment", PROFILES, file="profile.jsonl"),
    file_target(
        f"{P}.formats.checkpoint.writer:read_latest",
        lambda _: [b"step-00000008\n"],
        file="LATEST",
        call=lambda read, path: read(path.parent),
    ),
    _MANIFEST,
    resealed(_MANIFEST),
    _HEADER,
    repacked(_HEADER, pack_header, unpack_header),
    *(
        target
        for file, label in (("manifest.json", "manifest"), ("model-p000-t00.safetensors", "shard"))
        for target in [
            folder_target(
                f"{P}.formats.checkpoint.reader:open_checkpoint",
                _native,
                file=file,
                label=label,
                call=_checkpoint_weights,
            )
        ]
    ),
    resealed(
        folder_target(
            f"{P}.formats.checkpoint.reader:open_checkpoint",
            _native,
            file="manifest.json",
            label="weights",
            call=_checkpoint_weights,
        )
    ),
    *(_status(name, f"{P}.trainer.monitoring.run_status:read_run_status") for name in STATUS_FILES),
    *(_status(name, f"{P}.trainer.monitoring.compare_report:read_run_data") for name in STATUS_FILES),
    *(_status(name, f"{P}._common.report.run_data:read_run_files") for name in STATUS_FILES),
    *(_status(name, f"{P}.launch.incident_log:read_progress") for name in ("metrics.jsonl",)),
    file_target(
        f"{P}.trainer.monitoring.compare_runs:read_records",
        lambda _: [text.encode() for text in RUN_LINES.values()],
        file="metrics.jsonl",
        call=lambda read, path: list(read(path)),
    ),
    file_target(f"{P}.pipeline.emulation_trace:read_trace", PROFILES, file="profile.jsonl", call=_trace),
    file_target(
        f"{P}.dynamics.tuning:read_sparse_table",
        lambda _: [b'{"thresholds": {"csr": 0.85, "block32": 0.5}}'],
        file="t.json",
    ),
    text_target(f"{P}.config.resolve:parse_config_file", TOMLS, call=_resolve_file),
    text_target(
        f"{P}.cli.explain_flags.script_commands:read_torchtitan", TORCHTITAN, call=_titan, errors=(ValueError,)
    ),
    text_target(f"{P}.cli.explain_flags.python_config:read_python_config", _python_configs, call=_python_config),
    text_target(
        f"{P}.config.layer_freq:parse_layer_list", lambda _: [b"[0]*3+[1]*58", b"([1,1,0])*2"], errors=(ValueError,)
    ),
    text_target(f"{P}.cli.explain_flags.script_commands:read_script", SCRIPTS, call=_explain),
    Target(
        name="train.run-script",
        run=_interpret,
        seeds=lambda folder: [*SCRIPTS(folder), *(text.encode() for text in SHELL)],
        readers=(f"{P}.cli.run_script.parser:parse_script",),
    ),
    text_target(
        f"{P}.config.pipeline_layout:parse_layout", lambda _: [b"Ettt|(tt|)*29,tL", b"Et*3|t|(t|)*2L", b"E|t|L"]
    ),
    file_target(
        f"{P}.config.compat.deepspeed:read_deepspeed",
        lambda _: [json.dumps(document).encode() for document in DEEPSPEED],
        file="ds.json",
    ),
    Target(
        name="train.flags-pretrain-gpt",
        run=_resolve,
        seeds=lambda _: [line.encode() for line in FLAGS],
        readers=(f"{P}.config.resolve:resolve",),
        errors=click_errors(),
    ),
    *(text_target(f"{P}.{reader}", seeds, call=call) for reader, seeds, call in TEXTS),
    file_target(f"{P}.launch.schedulers.hostfile:read_hostfile", lambda _: HOSTS, file="hostfile"),
    text_target(
        f"{P}.launch.schedulers.hostfile:parse_hostfile", HOSTS, call=lambda parse, text: parse(text, "hostfile")
    ),
    *(
        bytes_target(f"{P}.launch.{module}", partial(_record_seeds, kind), call=call, errors=(ValueError,))
        for module, kind, call in (
            ("elastic.continuation:decode_notice", "notice", None),
            ("elastic.growth:decode_proposal", "proposal", None),
            ("elastic.growth:decode_outcome", "outcome", None),
            ("elastic.growth:decode_properties", "properties", None),
            ("elastic.node_continuation:decode_deaths", "deaths", None),
            ("watch.node_watch:decode_collectives", "collectives", None),
            ("elastic.rendezvous:decode_end", "end", None),
            ("elastic.coordinator:decode_record", "record", None),
            ("elastic.coordinator:decode_round", "round", None),
            (
                "watch.node_watch:decode_traces",
                "traces",
                lambda parse, data: parse(data.decode("utf-8", "surrogateescape")),
            ),
            (
                "watch.node_watch:decode_states",
                "states",
                lambda parse, data: parse(data.decode("utf-8", "surrogateescape")),
            ),
        )
    ),
    bytes_target(f"{P}.launch.watch.heartbeat:parse_page", [bytes(range(256)) * 16], call=_page),
    file_target(
        f"{P}.launch.failure_record:read_failure",
        lambda _: [b'{"message": "x", "time_ns": 5, "is_consequence": false}'],
        file="failure.json",
    ),
    *(
        file_target(f"{P}.data.tokenizer:open_tokenizer", seeds, file=file, label=label, call=_tokenizer(kind, **more))
        for kind, label, file, seeds, more in (
            ("HuggingFaceTokenizer", "hf", "tokenizer.json", _tokenizer_json, {}),
            (
                "GPT2BPETokenizer",
                "vocab",
                "vocab.json",
                lambda _: [b'{"a": 0, "b": 1, "ab": 2}'],
                {"merges.txt": "a b\n"},
            ),
            (
                "GPT2BPETokenizer",
                "merges",
                "merges.txt",
                lambda _: [b"#version: 0.2\na b\n"],
                {"vocab.json": '{"a": 0, "b": 1, "ab": 2}'},
            ),
            ("BertWordPieceCase", "bert", "vocab.txt", lambda _: [b"[UNK]\n[SEP]\na\n##b\n"], {}),
            ("WhitespaceVocab", "words", "words.json", lambda _: [b'{"a": 0, "<unk>": 1, "<eod>": 2}'], {}),
            ("SentencePieceTokenizer", "sentencepiece", "tokenizer.model", _sentence_piece, {}),
        )
    ),
    file_target(
        f"{P}.data.tokenizer:read_vocab_size",
        _sentence_piece,
        file="tokenizer.model",
        label="sentencepiece",
        call=_vocab_size("SentencePieceTokenizer", "tokenizer_model"),
    ),
    bytes_target(f"{P}.data.tokenizer:count_pieces", _sentence_piece, errors=(ValueError,)),
    file_target(f"{P}.data.tokenizer:read_vocabulary", lambda _: [b'{"a": 0, "b": 1}'], file="vocab.json"),
    file_target(f"{P}.data.finetune_dataset:read_mnli", lambda _: [MNLI], file="train.tsv"),
    file_target(f"{P}.data.finetune_dataset:read_race", lambda _: [RACE], file="a.txt", call=_race_folder),
    file_target(f"{P}.evaluation.lambada:read_passages", lambda _: [TASK_ROWS["lambada"]], file="lambada.jsonl"),
    *(
        file_target(
            f"{P}.evaluation.lm_eval_data:read_rows",
            constant(rows),
            file="rows.jsonl",
            label=task,
            call=partial(_read_rows, task),
        )
        for task, rows in TASK_ROWS.items()
    ),
    file_target(f"{P}.evaluation.wikitext:read_text", lambda _: [b" = A = \n\n a @-@ b <unk> \n"], file="wiki.tokens"),
    file_target(f"{P}.formats.input_text:read_input", lambda _: [b"a\r\nb"], file="input.txt"),
    bytes_target(
        f"{P}.trainer.recovery.state_copy:read_copy",
        [(27).to_bytes(8, "little") + b'{"tag":[0,1],"items":{}}   ' + bytes(64)],
        call=_state_copy,
        errors=(ValueError,),
    ),
]
