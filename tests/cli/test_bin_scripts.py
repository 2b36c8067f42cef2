"""The published scripts in ``bin/``: what each of them starts, word for word, taken by the command that it is for.

The commands are stand-ins that write down how they were called; ``test_bin_runs.py`` runs the real ones.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import typer

from dynmo_train.cli import app
from dynmo_train.config import DefaultContext, config_of, option_specs, validate
from dynmo_train.config.compat.translate import translate
from tests.paths import SHARED_DATA

BIN = Path(__file__).parents[2] / "bin"
RECORD = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$PLACE/calls"\nprintf "\\1\\0" >> "$PLACE/calls"\n'
FAMILIES = typer.main.get_command(app).commands["pretrain"].commands


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("dynmo-train", "dynmo-prep", "dynmo-ckpt", "srun", "python"):
        (tmp_path / name).write_text(RECORD)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setenv("DYNMO_SETUP", "no")
    monkeypatch.setenv("PYTHON", sys.executable)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GPUS_PER_NODE",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(name, *words, code=0, **environment):
    done = subprocess.run(
        ["bash", str(BIN / name), *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def calls(place):
    """How the commands were called, each a list of words."""
    words, found = (place / "calls").read_text().split("\0")[:-1], [[]]
    for word in words:
        found.append([]) if word == "\1" else found[-1].append(word)
    (place / "calls").unlink()
    return found[:-1]


def config_from(command, world, vocab_size):
    """The checked configuration of ``dynmo-train pretrain FAMILY ...``."""
    family, words = command[2], command[3:]
    options = FAMILIES[family].params
    declared = {name: 0 if one.is_flag else one.nargs for one in options for name in (*one.opts, *one.secondary_opts)}
    made = translate(words, family, declared)
    assert not made.problems, made.problems
    params = FAMILIES[family].make_context(family, list(made.arguments)).params
    given = {name: value for name, value in params.items() if name in option_specs() and value is not None}
    config = config_of(DefaultContext(world_size=world), family=family, **given, vocab_size=vocab_size)
    assert validate(config, world) == []
    return config


def split_launch(command):
    """The arguments of a launcher, and the command after ``--``."""
    if command[1] != "launch":
        return [], command
    at = command.index("--")
    return command[1:at], ["dynmo-train", *command[at + 1 :]]


LOCAL_8 = ("launch", "local", "--nproc", "8")
BOTH_WAYS = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
MACHINES = ("--nnodes", "16", "--node-rank", "0", "--master-addr", "localhost", "--master-port", "6000")
SLURM = ("--nodes", "128", "--gpus", "8", "--sbatch=--exclusive")
BIG = {"rampup_batch_size": "16 16 5859375", "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16}
ALL_OF_CC = {"inter_grad_comp_rank": 16, "grad_comp_rank": 128, "selective_grad_comp_way": "3", "emb_comm_opt": True}
# Script: arguments, launcher, number of devices, and some values of the resulting configuration.
TRAINING = {
    "pretrain_gpt.sh": ((), (), 1, {"global_batch_size": 8, "num_layers": 24, "fp16": True}),
    "pretrain_gpt_distributed.sh": ((), LOCAL_8, 8, {"global_batch_size": 64, "DDP_impl": "torch"}),
    "pretrain_gpt_distributed_with_mp.sh": ((), LOCAL_8, 8, {**BOTH_WAYS, "global_batch_size": 16}),
    "pretrain_bert.sh": (
        *((), (), 1),
        {"seq_length": 512, "tokenizer_type": "BertWordPieceLowerCase", "activation": "gelu_tanh"},
    ),
    "pretrain_bert_distributed.sh": ((), LOCAL_8, 8, {"global_batch_size": 32, "activation": "gelu_tanh"}),
    "pretrain_bert_distributed_with_mp.sh": ((), LOCAL_8, 8, {**BOTH_WAYS, "global_batch_size": 16}),
    "pretrain_t5.sh": (
        *((), (), 1),
        {"seq_length": 512, "decoder_seq_length": 128, "vocab_extra_ids": 100, "activation": "gelu_tanh"},
    ),
    "pretrain_t5_distributed.sh": ((), LOCAL_8, 8, {"global_batch_size": 2048}),
    "pretrain_t5_distributed_with_mp.sh": ((), LOCAL_8, 8, {**BOTH_WAYS, "global_batch_size": 128}),
    "pretrain_gpt3_175B.sh": (
        (),
        ("launch", "slurm", "--job-name", "megatron_gpt3_175b", *LOCAL_8[2:], *SLURM),
        1024,
        BIG,
    ),
    "pretrain_gpt2_distributed.sh": (
        *((), ("launch", "local", "--nproc", "2"), 2),
        {"tokenizer_type": "WhitespaceVocab", "split": "900,50,50", "micro_batch_size": 8},
    ),
    "ds_pretrain_gpt2.sh": (
        *((), ("launch", "local", "--nproc", "4"), 4),
        {"tensor_model_parallel_size": 4, "micro_batch_size": 9, "save_interval": 10, "zero_stage": 0},
    ),
    "ASPLOS23/tbl2_fig9_tbl4.sh": (
        *(("2.5B", "CB-FE-SC"), ("launch", "node", "--nproc", "8", *MACHINES), 128),
        {**ALL_OF_CC, "hidden_size": 1920},
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_script_starts_the_published_configuration(place, name):
    words, launcher, world, expected = TRAINING[name]
    script(name, *words)
    (command,) = calls(place)
    began, arguments = split_launch(command)
    assert began == [*launcher]
    config = config_from(arguments, world, 30522 if "bert" in name or "t5" in name else 50257)
    values = {spec.name: getattr(config.concern(spec.concern), spec.name) for spec in option_specs().values()}
    assert {key: values[key] for key in expected} == expected
    # Arguments of the user override those of the script.
    script(name, *words, "--data-path", "other", "--seed", "7")
    changed = config_from(split_launch(calls(place)[0])[1], world, 50257)
    assert (changed.data.data_path, changed.training.seed) == ("other", 7)


SCHEMES = {
    "Baseline": (False, False, False, False, False),
    "CB-NON-LEP": (True, True, False, False, False),
    "CB": (True, True, True, False, False),
    "CB-FE": (True, True, True, True, False),
    "CB-FE-SC": (True, True, True, True, True),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_optimus_cc_scheme_sets_its_compression_options(place, name):
    for size, layers in (("335M", 24), ("2.5B", 52), ("8.3B", 72)):
        script("ASPLOS23/tbl2_fig9_tbl4.sh", size, name, "--no-fp16", GPUS_PER_NODE="64", NNODES="1", CB_RANK="12")
        launcher, arguments = split_launch(calls(place)[0])
        assert launcher == ["launch", "local", "--nproc", "64"]
        config = config_from(arguments, 64, 50257)
        found = config.compression
        assert config.model.num_layers == layers
        assert SCHEMES[name] == (
            found.inter_grad_comp,
            found.inter_grad_comp_epilogue_only,
            found.use_error_feedback,
            found.emb_comm_opt,
            found.selective_grad_comp,
        )
        assert not found.inter_grad_comp or found.inter_grad_comp_rank == 12


def test_optimus_cc_figure_scripts_set_their_options(place):
    expected = {
        ("fig10.sh", "8.3B", "CB-FE"): {"train_iters": 10, "emb_comm_opt": True},
        ("fig11.sh", "8.3B"): {"train_iters": 1000, "check_orth_error_acti": True, "use_error_feedback": True},
        ("fig12.sh", "2.5B", "CB"): {"use_error_feedback": False, "inter_grad_comp": True, "check_comp_ratio": True},
        ("fig12.sh", "2.5B", "CB-LEP"): {"use_error_feedback": True, "check_comp_ratio": True},
        ("fig12.sh", "2.5B", "Baseline"): {"inter_grad_comp": False, "check_comp_ratio": False},
    }
    for (name, *words), values in expected.items():
        script(f"ASPLOS23/{name}", *words)
        config = config_from(split_launch(calls(place)[0])[1], 128, 50257)
        given = {**vars(config.compression), **vars(config.training)}
        assert {key: given[key] for key in values} == values, name
    script("ASPLOS23/fig14.sh", "--device", "cuda")
    assert calls(place) == [["python", str(BIN.parent / "tests/benchmarks/train_lowrank.py"), "--device", "cuda"]]
    for name in ("tbl2_fig9_tbl4", "fig10", "fig11", "fig12"):
        assert "usage:" in script(f"ASPLOS23/{name}.sh", "9B", "CB", code=2)
    assert "usage:" in script("ASPLOS23/fig12.sh", "2.5B", "SC", code=2)


def test_training_script_on_several_machines_selects_the_launcher(place):
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.10.10.102", "GPUS_PER_NODE": "2"}
    script("pretrain_gpt2_distributed.sh", **several)
    launcher, _ = split_launch(calls(place)[0])
    assert launcher == [
        *("launch", "node", "--nproc", "2", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.10.10.102", "--master-port", "6000"),
    ]
    script("ds_pretrain_gpt2.sh", HOSTFILE="hostfile", INCLUDE="10.10.10.102:4,5@10.10.10.105:4,5")
    launcher, arguments = split_launch(calls(place)[0])
    assert launcher == [
        *("launch", "hostfile", "-H", "hostfile", "-i", "10.10.10.102:4,5@10.10.10.105:4,5", "--master-port", "6000"),
    ]
    assert arguments[arguments.index("--zero-stage") + 1] == "0"
    script("pretrain_gpt_distributed.sh", DYNMO_LAUNCH="slurm --nodes 4 --gpus 8", WORLD_SIZE="8")
    assert split_launch(calls(place)[0])[0] == ["launch", "slurm", "--nodes", "4", "--gpus", "8", "--nproc", "8"]
    script("pretrain_gpt_distributed.sh", "--dry-run", NNODES="4")
    assert calls(place)[0][-3:] == ["--dry-run", "--dry-run-processes", "32"]
    script("pretrain_gpt3_175B.sh", "--dry-run")
    assert calls(place)[0][-5:] == ["--dry-run", "--dry-run-processes", "1024", "--dry-run-device", "a100"]
    script("pretrain_gpt3_175B.sh", SLURM_JOB_ID="4", IMAGE="x.sqsh", MOUNTS="/fsx:/fsx")
    launcher, _ = split_launch(calls(place)[0])
    assert launcher[-5:] == ["--image", "x.sqsh", "--mount", "/fsx:/fsx", "--in-job"]


def test_lsf_job_starts_its_experiment_in_the_image(place):
    script("ASPLOS23/lsf_job_submit.sub", code=1)
    where = {"EXPERIMENT": f"{BIN}/ASPLOS23/fig10.sh 335M CB", "IMAGE": "dynmo.sif", "MOUNT": "/data:/data"}
    script("ASPLOS23/lsf_job_submit.sub", **where)
    launcher, arguments = split_launch(calls(place)[0])
    assert launcher == [
        *("launch", "lsf", "--in-job", "--gpus", "8", "--image", "dynmo.sif", "--mount", "/data:/data", "--nproc", "8"),
    ]
    assert "--inter_grad_comp" in arguments


def test_aws_batch_scripts_start_preparation_and_training(place):
    script("1.data-preprocessing.sbatch", DATA_PATH="/data", SLURM_CPUS_ON_NODE="96")
    (command,) = calls(place)
    assert command[:5] == ["srun", "-l", "--nodes=1", "--ntasks=1", "dynmo-prep"]
    assert command[command.index("--input") + 1] == "/data/gpt2/oscar-1GB.jsonl"
    assert command[-2:] == ["--workers", "96"]
    (place / "megatron-training.sqsh").touch()
    script("3.data-preproc-llama2.sbatch", DATA_PATH="/data")
    (command,) = calls(place)
    assert command[4:6] == [f"--container-image={place}/megatron-training.sqsh", "--container-mounts=/data:/data"]
    script("2.distributed-training.sbatch", MORE="--num-layers 8", DATA_PATH="/data")
    launcher, arguments = split_launch(calls(place)[0])
    assert launcher == [
        *("launch", "slurm", "--in-job", "--nproc", "8", "--image", f"{place}/megatron-training.sqsh"),
        *("--mount", "/data:/data"),
    ]
    config = config_from(arguments, 16, 50257)
    assert (config.model.num_layers, config.training.recompute_granularity) == (8, "selective")
    (place / "megatron-training.sqsh").unlink()
    for size, zero in (("7b", 0), ("13b", 1), ("70b", 1)):
        script("4.pre-train-llama2.sbatch", MODEL_SIZE=size)
        launcher, arguments = split_launch(calls(place)[0])
        assert launcher == ["launch", "slurm", "--in-job", "--nproc", "8"]
        assert ("--use-distributed-optimizer" in arguments) == bool(zero)
        assert arguments[3:5] == ["--recipe", f"llama-2-{size}"]
    assert "MODEL_SIZE is 7b, 13b or 70b" in script("4.pre-train-llama2.sbatch", code=2, MODEL_SIZE="8b")


def test_tables_of_optimus_cc_are_those_of_the_runs(place):
    def write(name, steps_ms, losses=()):
        records = [{"step": step, "step_ns": time * 10**6} for step, time in enumerate(steps_ms, 1)]
        records += [{"step": len(steps_ms), "validation_loss": loss} for loss in losses]
        (place / "runs" / name).mkdir(parents=True)
        (place / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))

    assert "no run" in script("ASPLOS23/tables.sh", "runs", code=1)
    write("GPT2-2.5B-Baseline", (9000, 1000, 1200, 1400), (3.0, 2.0))
    write("GPT2-2.5B-CB", (9000, 1000), (2.0,))
    write("GPT2-335M-CB-FE-Breakdown", (9000, 300))
    rows = [
        line.strip("| ").split(" | ") for line in script("ASPLOS23/tables.sh", "runs").splitlines() if "GPT-" in line
    ]
    assert rows[0] == ["GPT-2.5B", "Baseline", "7.39", "3.19", "1.000"]
    assert rows[1] == ["GPT-2.5B", "CB", "7.39", "2.66", "1.200"]
    assert rows[2] == ["GPT-2.5B", "CB-NON-LEP", "-", "-", "-"]
    assert rows[8] == ["GPT-335M", "CB-FE", "300.0", "-"]


def test_task_scripts_start_their_commands(place):
    script("evaluate_zeroshot_gpt.sh", VALID_DATA="lambada.jsonl")
    assert calls(place)[0][1:6] == ["tasks", "--task", "LAMBADA", "--valid-data", "lambada.jsonl"]
    script("evaluate_zeroshot_gpt.sh", TASK="WIKITEXT103", VALID_DATA="wiki.test.tokens")
    assert "--strict-lambada" not in calls(place)[0]
    assert "set VALID_DATA" in script("evaluate_zeroshot_gpt.sh", code=1)
    script("finetune_mnli_distributed.sh", TRAIN_DATA="a.tsv b.tsv")
    launcher, arguments = split_launch(calls(place)[0])
    assert (launcher, arguments[1:3]) == (["launch", "local", "--nproc", "8"], ["finetune", "mnli"])
    assert arguments[arguments.index("--train-data") + 1 : arguments.index("--valid-data")] == ["a.tsv", "b.tsv"]
    script("finetune_race_distributed.sh", WORLD_SIZE="1")
    assert calls(place)[0][1:3] == ["finetune", "race"]
    script("merge_mp_bert.sh", CHECKPOINT_PATH="c")
    assert calls(place)[0][:2] == ["dynmo-ckpt", "merge_mp_partitions"]
    script("generate_text.sh", "--sample-input-file", "prompts.txt", NUMBER_OF_SAMPLES="3")
    (command,) = calls(place)
    assert command[command.index("--num-samples") + 1] == "3"
    assert command[-2:] == ["--sample-input-file", "prompts.txt"]
    for words, samples in ((["--greedy"], "1"), ([], "2")):
        script("generate_text.sh", *words)
        (command,) = calls(place)
        assert command[command.index("--num-samples") + 1] == samples


@pytest.fixture
def server(tmp_path):
    """A web server on loopback over the folder ``site``; ``requests`` are the paths that were requests for."""
    (tmp_path / "site").mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path / "site"))
    ) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", tmp_path / "site", requests
        running.shutdown()


def pack(site, **members):
    with zipfile.ZipFile(site / "zip", "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/"), text)
    return hashlib.sha256((site / "zip").read_bytes()).hexdigest()


def test_download_ckpt_fetches_once_and_compares_the_sum(place, server):
    url, site, requests = server
    total = pack(
        site, **{"latest_checkpointed_iteration.txt": "release", "release__mp_rank_00__model_optim_rng.pt": "x"}
    )
    where = {"CKPT_URL": f"{url}/zip", "CKPT_SHA256": total}
    assert "expected 00" in script("download_ckpt.sh", "c", code=1, CKPT_URL=f"{url}/zip", CKPT_SHA256="00")
    assert not list((place / "c").iterdir())
    assert "c: iteration release" in script("download_ckpt.sh", "c", **where)
    assert (place / "c/release/mp_rank_00/model_optim_rng.pt").read_text() == "x"
    count = len(requests)
    assert "already has a checkpoint" in script("download_ckpt.sh", "c", **where)
    assert len(requests) == count
    assert "cannot download" in script("download_ckpt.sh", "d", code=1, CKPT_URL=f"{url}/none")
    (site / "zip").write_bytes((site / "zip").read_bytes()[:-40])
    assert "damaged" in script("download_ckpt.sh", "e", code=1, CKPT_URL=f"file://{site}/zip")
    pack(site, **{"other.txt": "x"})
    assert "is not a checkpoint of Megatron" in script("download_ckpt.sh", "f", code=1, CKPT_URL=f"file://{site}/zip")


def test_fetch_of_a_partial_file_resumes_where_it_stopped(place, tmp_path):
    (tmp_path / "whole").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "got.part").write_bytes((bytes(range(256)) * 40)[:5000])
    total = hashlib.sha256((tmp_path / "whole").read_bytes()).hexdigest()
    text = f". {BIN}/lib/fetch.sh && fetch file://{tmp_path}/whole got {total} && fetch file:///none got {total}"
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, check=True)
    assert "10240 bytes" in done.stdout
    assert "got exists" in done.stdout
    (tmp_path / "got").write_bytes(b"other")
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, check=False)
    assert (done.returncode, "SHA-256 is not" in done.stderr) == (1, True)


def test_download_vocab_other_sum_is_refused(place, server, monkeypatch):
    url, site, _ = server
    (site / "gpt2-vocab.json").write_text("{}")
    (site / "bert-large-cased-vocab.txt").write_text("[PAD]\n")
    assert "expected 196139668be6" in script("download_vocab.sh", "v", code=1, VOCAB_URL=url)
    assert not (place / "v" / "gpt2-vocab.json").exists()
    script("download_vocab.sh", "v", "bert-large-cased", VOCAB_URL=url)
    assert (place / "v" / "bert-large-cased-vocab.txt").exists()
    assert "must be gpt2" in script("download_vocab.sh", "v", "t5", code=2, VOCAB_URL=url)
    shared = SHARED_DATA / "tok"
    if (shared / "gpt2-vocab.json").exists():
        script("download_vocab.sh", "w", VOCAB_URL=f"file://{shared.resolve()}")
        assert (place / "w" / "gpt2-merges.txt").exists()


def test_getdata_damaged_archive_leaves_no_file(place, server):
    url, site, _ = server
    (site / "oscar-1GB.jsonl.xz").write_bytes(lzma.compress(b'{"text": "a"}\n'))
    shutil.copy(site / "oscar-1GB.jsonl.xz", place / "copy.xz")
    script("getdata.sh", "gpt2", DATA_URL=url, VOCABS="")
    assert (place / "gpt2" / "oscar-1GB.jsonl").read_text() == '{"text": "a"}\n'
    assert sorted(path.name for path in (place / "gpt2").iterdir()) == ["oscar-1GB.jsonl"]
    assert "exists" in script("getdata.sh", "gpt2", DATA_URL=url, VOCABS="")
    (site / "oscar-1GB.jsonl.xz").write_bytes((place / "copy.xz").read_bytes()[:-9])
    assert "is damaged" in script("getdata.sh", "other", code=1, DATA_URL=url, VOCABS="")
    assert not (place / "other" / "oscar-1GB.jsonl").exists()


AWS = {
    **{"DATA_PATH": "/fsx", "NUM_NODES": "2", "INSTANCE_TYPE": "p5.48xlarge", "IMAGE_URI": "registry/megatron:latest"},
    **{"GPU_PER_NODE": "8", "EFA_PER_NODE": "32", "TENSOR_PARALLEL": "8", "PIPELINE_PARALLEL": "1", "NUM_LAYERS": "36"},
    **{"HIDDEN_SIZE": "4096", "NUM_ATTENTION_HEADS": "32", "SEQ_LENGTH": "2048", "MAX_POSITION_EMBEDDINGS": "2048"},
    **{"MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "288"},
}


def filled(name, variables):
    """A template as envsubst fills it in: ``$NAME`` and ``${NAME}`` alone."""
    import yaml

    text = re.sub(
        r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}",
        lambda match: variables.get(match[1] or match[2], ""),
        (BIN / name).read_text(),
    )
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    ("name", "words", "changes"),
    [
        (
            "pytorchjob.yaml-template",
            ["--job-name", "megatron", "--nodes", "1:2", "--gpus", "8", "--claim", "fsx-pvc:/fsx"],
            {},
        ),
        ("getdata-job.yaml-template", ["--kind", "job", "--job-name", "getdata", "--claim", "fsx-pvc:/fsx"], {}),
        (
            "prepdata-job.yaml-template",
            ["--kind", "job", "--job-name", "prepdata", "--claim", "fsx-pvc:/fsx"],
            {"DATA_PATH": "/fsx/gpt2"},
        ),
    ],
)
def test_kubernetes_template_equals_the_output_of_the_launcher(monkeypatch, name, words, changes):
    import yaml
    from typer.testing import CliRunner

    made = filled(name, AWS | changes)
    worker = made[0]["spec"].get("pytorchReplicaSpecs", {}).get("Worker")
    command = (worker or made[0]["spec"])["template"]["spec"]["containers"][0]["command"]
    arguments = command[command.index("--") + 1 :] if "--" in command else command
    if name == "pytorchjob.yaml-template":
        config = config_from(["dynmo-train", *arguments], 16, 50257)
        assert (config.model.hidden_size, config.training.global_batch_size) == (4096, 288)
        for key, value in AWS.items():
            monkeypatch.setenv(key, value)
    more = [] if name == "pytorchjob.yaml-template" else ["--image", AWS["IMAGE_URI"]]
    result = CliRunner().invoke(app, ["launch", "kubernetes", *words, *more, "--dry-run", "--", *arguments])
    assert result.exit_code == 0, result.output
    ours = list(yaml.safe_load_all(result.stdout))
    if worker:  # the template has workers alone: a variable cannot be one less than another
        pods = ours[0]["spec"].pop("pytorchReplicaSpecs")
        pods["Worker"]["replicas"] += pods["Master"]["replicas"]
        shell = pods["Worker"]["template"]["spec"]["containers"][0]["command"]
        shell[2] = shell[2].replace('"$RANK"', '"${HOSTNAME##*-}"').replace("$MASTER_ADDR", "megatron-worker-0")
        ours[0]["spec"] = {"runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 3}, "pytorchReplicaSpecs": {}}
        ours[0]["spec"]["pytorchReplicaSpecs"]["Worker"] = pods["Worker"]
    assert ours == made
    kinds = pytest.importorskip("kubernetes_validate")
    if made[0]["kind"] == "Job":
        kinds.validate(made[0], "1.30", strict=True)


@pytest.mark.parametrize("name", ["download_vocab.sh", "download_ckpt.sh"])
def test_download_scripts_unknown_option_is_not_a_folder(name, tmp_path):
    for option, code, words in (("--help", 0, f"bin/{name} [FOLDER"), ("--fodler", 2, "--fodler is not a folder")):
        done = subprocess.run(
            ["bash", str(BIN / name), option], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
    assert list(tmp_path.iterdir()) == []
