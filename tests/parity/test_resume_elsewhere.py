"""A run goes through each foreign format and back, and continues with the losses that it would have had.

Ours: three steps, out to the format, in again, three more: every loss, norm, rate and loss scale is the same to the
last bit. DeepSpeed: its checkpoints in ``tests/unit/dynmo_ckpt/converters/fixtures`` continue with its own losses.
"""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app as ckpt
from dynmo_train.cli import app as train
from dynmo_train.formats.checkpoint import find_checkpoint, open_checkpoint
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.trainer.checkpoint.engine_checkpoint import state_reader
from tests.benchmarks import plain_engine
from tests.levels import complete_but
from tests.paths import extract

TESTS = Path(__file__).parents[1]
FIXTURES = TESTS / "unit" / "dynmo_ckpt" / "converters" / "fixtures" / "deepspeed"
SIZES = ("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16")
SIZES += ("--vocab-size", "40", "--make-vocab-size-divisible-by", "8")
STEPS = ("--micro-batch-size", "2", "--global-batch-size", "4", "--eval-iters", "0", "--device", "cpu", "--seed", "77")
RATES = ("--lr", "0.01", "--min-lr", "0.001", "--lr-decay-style", "cosine", "--lr-decay-iters", "20")
RATES += ("--lr-warmup-iters", "4", "--weight-decay", "0.1", "--adam-beta2", "0.95", "--hidden-dropout", "0.1")
HALF = ("--fp16", "--initial-loss-scale", "4096", "--loss-scale-window", "5")


def invoke(app, *arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def write_corpus(prefix):
    source = np.random.default_rng(0)
    documents = [source.integers(0, 40, source.integers(20, 60)).astype(np.uint16) for _ in range(60)]
    sizes = np.array([len(document) for document in documents], np.int32)
    begins = np.concatenate([[0], np.cumsum(sizes[:-1].astype(np.int64) * 2)]).astype(np.int64)
    prefix.with_suffix(".bin").write_bytes(b"".join(document.tobytes() for document in documents))
    head = b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8) + struct.pack("<QQ", len(documents), len(documents) + 1)
    numbers = np.arange(len(documents) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(head + sizes.tobytes() + begins.tobytes() + numbers.tobytes())


def pretrain(folder, save, *more, steps=6):
    options = (*SIZES, *STEPS, *RATES, *HALF, "--data-path", folder / "corpus", "--cache-dir", folder / "cache")
    return invoke(train, "pretrain", "gpt", *options, "--train-iters", steps, "--save", folder / save, *more)


def numbers(run, begin=4):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fields = ("step", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_train_samples")
    return [[line[field] for field in fields] for line in lines if "lm_loss" in line and line["step"] >= begin]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a corpus and a run of six steps with a checkpoint after the third."""
    folder = tmp_path_factory.mktemp("original")
    write_corpus(folder / "corpus")
    pretrain(folder, "run", "--save-interval", 3)
    return folder


FORMATS = {
    "legacy": ("--to", "legacy"),
    "legacy-fp16": ("--to", "legacy", "--dtype", "fp16", "--tp", 2, "--pp", 2),
    "deepspeed": ("--to", "deepspeed"),
    "deepspeed-fp16": ("--to", "deepspeed", "--dtype", "fp16", "--tp", 2),
    "dcp": ("--to", "dcp"),
    "dcp-bf16": ("--to", "dcp", "--dtype", "bf16"),
}


@pytest.mark.parametrize("name", complete_but(FORMATS, next(iter(FORMATS))))
def test_resume_through_a_format_is_bit_identical(original, tmp_path, name):
    step = original / "run" / "checkpoints" / "step-00000003"
    invoke(ckpt, "convert", step, tmp_path / "out", *FORMATS[name], "--with-optimizer")
    stderr = pretrain(original, tmp_path / "resumed", "--load", tmp_path / "out")
    assert "resumes from step 3, 12 samples consumed; with optimizer state" in stderr
    assert "warning: the checkpoint was trained with" not in stderr
    assert numbers(tmp_path / "resumed") == numbers(original / "run")
    assert len(numbers(original / "run")) == 3
    assert len({scale for *_, scale, _ in numbers(original / "run")}) == 2  # it grew, so its count went along


@pytest.mark.complete
@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_resume_without_optimizer_state_starts_moments_at_zero(original, tmp_path, flag):
    step = original / "run" / "checkpoints" / "step-00000003"
    invoke(ckpt, "convert", step, tmp_path / "out", "--to", "legacy", "--with-optimizer")
    stderr = pretrain(original, tmp_path / "resumed", "--load", tmp_path / "out", flag)
    first = 1 if flag == "--finetune" else 4
    assert ("the moments start from zero" in stderr) is (flag == "--no-load-optim")
    assert numbers(tmp_path / "resumed", 1)[0][0] == first
    assert numbers(tmp_path / "resumed", 1)[-1] != numbers(original / "run")[-1]


@pytest.mark.complete
def test_resume_with_another_schedule_warns(original, tmp_path):
    step = original / "run" / "checkpoints" / "step-00000003"
    invoke(ckpt, "convert", step, tmp_path / "out", "--to", "dcp", "--with-optimizer")
    stderr = pretrain(original, tmp_path / "resumed", "--load", tmp_path / "out", "--min-lr", "0.002")
    assert "the checkpoint was trained with min_lr 0.001; this run continues with 0.002" in stderr


OTHER_RATES = ("--lr", "0.5", "--min-lr", "0.1", "--lr-decay-style", "linear", "--lr-decay-iters", "9")
OTHER_RATES += ("--lr-warmup-iters", "0", "--weight-decay", "0.7")


@pytest.mark.complete
@pytest.mark.parametrize("form", ["native", "legacy"])
def test_resume_with_the_schedules_of_the_checkpoint(original, tmp_path, form):
    """Megatron's flag: the options of the schedules give way to what the checkpoint records."""
    step = original / "run" / "checkpoints" / "step-00000003"
    invoke(ckpt, "convert", step, tmp_path / "out", "--to", form, "--with-optimizer")
    flags = (*OTHER_RATES, "--load", tmp_path / "out", "--use-checkpoint-opt_param-scheduler")
    stderr = pretrain(original, tmp_path / "resumed", *flags)
    assert "uses max_lr 0.01 of the checkpoint, not 0.5" in stderr
    assert numbers(tmp_path / "resumed") == numbers(original / "run")


def test_first_step_has_the_schedules_of_the_options(original, tmp_path):
    """A checkpoint of which only the weights are loaded does not set the schedules."""
    flags = ("--lr-warmup-iters", "0", "--load", original / "run", "--finetune", "--use-checkpoint-opt_param-scheduler")
    pretrain(original, tmp_path / "tuned", *flags, steps=1)
    assert numbers(tmp_path / "tuned", 1)[0][3] == pytest.approx(0.01)


@pytest.fixture(scope="module")
def engines():
    yield vars(plain_engine) | {"world": init_world("cpu")}
    destroy_world()


# DeepSpeed computes norms and residual sums in the half type as well, where our engine here computes in float32.
TOLERANCE = {"fp32": 2e-6, "fp16": 3e-3, "bf16": 3e-2}
CONTINUED = ("zero0-fp32", "zero1-fp32", "zero3-fp32", "zero1-fp16", "zero2-fp16", "zero1-bf16", "zero3-bf16")


@pytest.mark.complete
@pytest.mark.parametrize("name", CONTINUED)
def test_resume_of_a_deepspeed_run_continues_its_losses(engines, tmp_path, name):
    about = json.loads((FIXTURES / f"{name}.json").read_text())
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        extract(archive, tmp_path / "in")
    # All 24 rows occur in the batches, though the arguments call the last one padding.
    invoke(ckpt, "convert", tmp_path / "in", tmp_path / "out", "--to", "native", "--with-optimizer", "--vocab-size", 24)
    checkpoint = open_checkpoint(find_checkpoint(tmp_path / "out"))
    shape = {field: checkpoint.manifest["model"][field] for field in ("num_layers", "hidden_size")}
    model = engines["GptShape"](
        **shape,
        ffn_hidden_size=6,
        num_attention_heads=2,
        max_position_embeddings=8,
        vocab_size=24,
        padded_vocab_size=24,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    world = engines["world"]
    engine = engines["engine_of"](
        engines["Gpt"](model), world, microbatches=4, boundary=(1, 8, 4), rate=engines["constant"](0.01), build=False
    )
    engine.restore(state_reader(checkpoint, engine.item_store, world), 3)
    losses = []
    for step in (3, 4):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 24, (4, 9)))
        rows = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        losses.append(engine.train_step(engines["engine_batch"](rows, step + 1, 4), sampled=False).loss)
    assert losses == pytest.approx(about["losses"], rel=TOLERANCE[about["case"]["precision"]])
