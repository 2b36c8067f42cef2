"""Fine-tuning is bit-identical on any partition, starts from a pretrained model, and resumes."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from tests.distributed.whole_runs import run_command
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed]
WORDS = [f"w{number}" for number in range(24)]
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 24 --vocab-file vocab.txt"
SHAPE += " --tokenizer-type BertWordPieceLowerCase --micro-batch-size 4 --global-batch-size 8 --lr 2e-3"
LABELS = ("contradiction", "entailment", "neutral")


def write_mnli(path, count):
    drawn = random.Random(path.name)
    rows = ["\t".join(f"c{at}" for at in range(12))]
    for number in range(count):
        label = drawn.randrange(3)
        pair = [f"w{drawn.randrange(24)} w4", f"{WORDS[label]} {WORDS[drawn.randrange(24)]}"]
        rows.append("\t".join([str(number), *["x"] * 7, *pair, "x", LABELS[label]]))
    path.write_text("\n".join(rows) + "\n")


def write_race(folder, count):
    folder.mkdir(parents=True)
    drawn = random.Random(folder.name)
    lines = []
    for _ in range(count):
        answer = drawn.randrange(4)
        options = [f"w{drawn.randrange(8, 24)}" for _ in range(4)]
        options[answer] = "w7"
        document = {"article": "w1 w2 w3", "questions": ["w5 _"], "options": [options], "answers": ["ABCD"[answer]]}
        lines.append(json.dumps(document))
    (folder / "1.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    (folder / "MNLI").mkdir()
    for name, count in (("train", 28), ("dev_matched", 9), ("dev_mismatched", 5)):
        write_mnli(folder / "MNLI" / f"{name}.tsv", count)
    for name in ("train", "dev"):
        write_race(folder / "RACE" / name / "middle", 12)
    return folder


def command_line(folder, task, run, *extra, train=True):
    names = {"mnli": ("MNLI/train.tsv", "MNLI/dev_matched.tsv", "MNLI/dev_mismatched.tsv")}
    names["race"] = ("RACE/train/middle", "RACE/dev/middle")
    first, *valid = (str(folder / name) for name in names[task])
    shape = [str(folder / word) if word == "vocab.txt" else word for word in SHAPE.split()]
    data = ["--train-data", first] if train else []
    return ["finetune", task, *data, "--valid-data", *valid, *shape, "--save", str(folder / run), *extra]


def tune(arguments):
    code, output = run_command(arguments)
    assert code == 0, output
    return output


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("step_ns", None)
    return lines


@pytest.fixture(scope="module", params=["mnli", "race"])
def alone(request, folder):
    run_workers(tune, 1, command_line(folder, request.param, f"{request.param}-1", "--epochs", "3"), joins=False)
    return request.param, metrics(folder / f"{request.param}-1")


def test_finetune_on_two_stages_is_bit_identical(folder, alone):
    task, expected = alone
    run_workers(tune, 2, command_line(folder, task, f"{task}-2", "--epochs", "3"), joins=False)
    assert metrics(folder / f"{task}-2") == expected
    assert expected[-1]["epoch"] == 3
    steps = [line for line in expected if "lm_loss" in line]
    assert len(steps) == (10 if task == "mnli" else 4)
    if task == "mnli":
        assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]


def test_evaluation_is_reproduced_and_a_stopped_run_resumes(folder, alone):
    from typer.testing import CliRunner

    from dynmo_train.cli import app

    task, expected = alone
    valid = command_line(folder, task, "x")[4 : command_line(folder, task, "x").index("--num-layers")]
    run = folder / f"{task}-1"
    common = ["--load", str(run), *valid, "--seq-length", "24", "--num-threads", "1"]
    done = CliRunner().invoke(app, ["evaluate", task, *common, "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == expected[-1]["validation"]
    from dynmo_ckpt.cli import app as ckpt

    verified = CliRunner().invoke(ckpt, ["verify", str(run), "--level", "full"])
    assert verified.exit_code == 0, verified.output
    # After resuming, the losses are bit-identical.
    half = folder / f"{task}-half"
    options = ("--epochs", "3", "--save-interval", "2")
    run_workers(tune, 1, command_line(folder, task, half.name, *options), joins=False)
    for step in (half / "checkpoints").glob("step-*"):
        if step.name != "step-00000002":
            shutil.rmtree(step)
    (half / "checkpoints" / "LATEST").unlink()
    run_workers(tune, 1, command_line(folder, task, half.name, *options, "--load", str(half)), joins=False)
    again = metrics(half)[len(expected) :]
    assert [line for line in again if "lm_loss" in line] == [line for line in expected if "lm_loss" in line][2:]


def test_finetune_with_a_config_file_gives_the_same_run(folder, alone):
    task, expected = alone
    words = command_line(folder, task, f"{task}-file", "--epochs", "3")
    train_data, lr = words[3], words[words.index("--lr") + 1]
    (folder / f"{task}.toml").write_text(f'train_data = "{train_data}"\nepochs = 3\n[optimizer]\nlr = {lr}\n')
    dropped = {2, 3, *(words.index(flag) + n for flag in ("--lr", "--epochs") for n in (0, 1))}
    rest = [word for at, word in enumerate(words) if at not in dropped]
    run_workers(tune, 1, [*rest, "--config", str(folder / f"{task}.toml")], joins=False)
    assert metrics(folder / f"{task}-file") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [("train_iters = 3", "train_iters: not supported by finetune"), ("epoch = 3", "epoch: unknown option")],
)
def test_config_file_of_another_command_is_refused(folder, text, words):
    (folder / "bad.toml").write_text(text)
    extra = ("--config", str(folder / "bad.toml"))
    (code, output), *_ = run_workers(run_command, 1, command_line(folder, "mnli", "bad", *extra), joins=False)
    assert code == 2
    assert words in output, output


def test_exported_classifier_has_class_names(folder, alone, tmp_path):
    from typer.testing import CliRunner

    from dynmo_ckpt.cli import app as ckpt

    task, _ = alone
    (written,) = (folder / f"{task}-1" / "checkpoints").glob("step-*/manifest.json")
    names = json.loads(written.read_text()).get("x_class_names")
    assert names == (list(LABELS) if task == "mnli" else None)
    to = ["--to", "hf"]
    done = CliRunner().invoke(ckpt, ["convert", str(written.parent), str(tmp_path / "hf"), *to])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    named = {"id2label": dict(zip("012", LABELS, strict=True)), "label2id": {name: n for n, name in enumerate(LABELS)}}
    assert {key: config.get(key) for key in named} == (named if task == "mnli" else dict.fromkeys(named))
    back = CliRunner().invoke(ckpt, ["convert", str(tmp_path / "hf"), str(tmp_path / "native"), "--to", "native"])
    assert back.exit_code == 0, back.output


def test_finetune_starts_from_a_pretrained_model(folder, alone):
    task, expected = alone
    start = ("--pretrained-checkpoint", str(folder / f"{task}-1"), "--epochs", "0")
    run_workers(tune, 1, command_line(folder, task, f"{task}-from", *start), joins=False)
    assert metrics(folder / f"{task}-from")[-1]["validation"] == expected[-1]["validation"]


def test_finetune_keeps_the_source_of_its_model(folder, alone, tmp_path):
    from typer.testing import CliRunner

    from dynmo_ckpt.cli import app as ckpt

    task, _ = alone
    for begin, end, kind in ((folder / f"{task}-1", "hf", "hf"), (tmp_path / "hf", "native", "native")):
        done = CliRunner().invoke(ckpt, ["convert", str(begin), str(tmp_path / end), "--to", kind])
        assert done.exit_code == 0, done.output
    source = json.loads((tmp_path / "native" / "manifest.json").read_text())["source"]
    start = ("--pretrained-checkpoint", str(tmp_path / "native"), "--epochs", "1")
    run_workers(tune, 1, command_line(folder, task, f"{task}-sourced", *start), joins=False)
    written = sorted((folder / f"{task}-sourced" / "checkpoints").glob("step-*/manifest.json"))[-1]
    assert json.loads(written.read_text())["source"] == source


@pytest.mark.parametrize(
    ("task", "extra", "words"),
    [
        ("mnli", ("--valid-data", "no.tsv"), "no.tsv: cannot be read"),
        ("race", ("--valid-data", "vocab.txt"), "must be a directory of RACE"),
        ("mnli", ("--pretrained-checkpoint", "none"), "--pretrained-checkpoint: none: no checkpoint here"),
        ("mnli", ("--vocab-file", "none"), "no tokenizer at none"),
        ("mnli", ("--vocab-size", "20"), "must be at least 29, the number of ids"),
        ("mnli", ("--train-iters", "3"), "No such option"),
    ],
)
def test_finetune_with_bad_input_is_refused(folder, task, extra, words):
    (code, output), *_ = run_workers(run_command, 1, command_line(folder, task, "bad", *extra), joins=False)
    assert code == 2
    assert words in output, output


def test_options_of_pretraining_are_refused():
    from dynmo_train._common.errors import UsageError
    from dynmo_train.cli.finetune import check_supported
    from dynmo_train.config.resolve import config_of

    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 9}
    common = {**shape, "micro_batch_size": 1, "lr": 0.1, "train_iters": 1, "data_path": "x"}
    check_supported(config_of(**common))
    with pytest.raises(UsageError, match="--balance: not supported by finetune"):
        check_supported(config_of(**common, balance="online"))
    with pytest.raises(UsageError, match="--use-checkpoint-args: not supported by finetune"):
        check_supported(config_of(**common, use_checkpoint_args=True))
    with pytest.raises(UsageError, match="--zero-stage: not supported by finetune"):
        check_supported(config_of(**common, zero_stage=3))
