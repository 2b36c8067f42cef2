"""Megatron's command lines of evaluation, fine-tuning and generation, on small files."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import DynmoError
from dynmo_train.cli import app
from tests.tables import table
from tests.unit.dynmo_ckpt import native_checkpoints

WORDS = [f"w{number}" for number in range(40)]
SHAPE = "--num-layers 3 --hidden-size 16 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12"
GPT = f"{SHAPE} --ffn-hidden-size 40 --vocab-file vocab.json --merge-file merges.txt"
TRAINING = "--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000"
TRAINING += " --lr-decay-style cosine --lr-warmup-fraction .01"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A native GPT with random weights, GPT-2 tokenizer files with a small vocabulary, texts, and MNLI files."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat , and the dog sat on the log ."] * 4, trainer)
    tokenizer.model.save(str(folder))
    m = native_checkpoints.model(vocab_size=280, padded_vocab_size=384)
    native_checkpoints.save(folder / "gpt", native_checkpoints.parameters(m, seed=4), m)
    (folder / "wiki.txt").write_text("the cat sat on the mat , and the dog sat on the log .\n" * 4)
    (folder / "lambada.jsonl").write_text('{"text": "the cat sat on the mat"}\n{"text": "the dog"}\n')
    (folder / "prompts.txt").write_text("the cat\nstop\nthe dog sat\n")
    (folder / "bert.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    rows = ["\t".join(f"c{at}" for at in range(12))]
    for number in range(9):
        label = ("contradiction", "entailment", "neutral")[number % 3]
        rows.append("\t".join([str(number), *["x"] * 7, f"w{number} w1", f"w{number % 3}", "x", label]))
    (folder / "train.tsv").write_text("\n".join(rows))
    return folder


@pytest.fixture
def place(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def run(line):
    done = CliRunner().invoke(app, [*line.split(), "--device", "cpu"])
    if isinstance(done.exception, DynmoError):
        return done.exception.exit_code, done.stdout, str(done.exception)
    if done.exit_code == 1 and done.exception:
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.complete
@pytest.mark.parametrize("command", ["tasks --task WIKITEXT103", "evaluate --task=WIKITEXT103", "evaluate wikitext"])
def test_wikitext_megatron_command_line_prints_result(place, command):
    line = f"{command} {GPT} --valid-data wiki.txt --tokenizer-type GPT2BPETokenizer --load gpt --micro-batch-size 8"
    code, out, err = run(f"{line} --checkpoint-activations --log-interval 10 --no-load-optim --no-load-rng --fp16")
    assert code == 0, err
    assert out.startswith(" validation results on WIKITEXT103 | avg loss: ")
    assert "token ratio: " in out
    assert "accepted for compatibility and ignored: --checkpoint-activations: no effect without training" in err


@pytest.mark.complete
def test_wikitext_legacy_megatron_checkpoint_has_same_perplexity(place, tmp_path):
    """``--load checkpoints/gpt2_345m`` in Megatron's scripts is a directory in Megatron's format."""
    from dynmo_ckpt.cli import app as ckpt

    words = ["convert", str(place / "gpt"), str(tmp_path / "megatron"), "--to", "legacy", "--tp", "2", "--pp", "2"]
    assert CliRunner().invoke(ckpt, words).exit_code == 0
    line = f"evaluate wikitext {GPT} --valid-data wiki.txt --cache-dir {tmp_path / 'cache'} --format json --load"
    expected, found = run(f"{line} gpt"), run(f"{line} {tmp_path / 'megatron'}")
    assert (expected[0], found[0]) == (0, 0), found[2]
    assert json.loads(found[1])["perplexity"] == json.loads(expected[1])["perplexity"]
    assert "is a Megatron checkpoint; dynmo-ckpt converted it" in found[2]


def test_lambada_megatron_command_line_prints_result(place):
    line = f"tasks --task LAMBADA {GPT} --valid-data lambada.jsonl --strict-lambada --load gpt --micro-batch-size 8"
    code, out, err = run(f"{line} --tokenizer-type GPT2BPETokenizer --log-interval 10 --no-load-optim --no-load-rng")
    assert code == 0, err
    assert out.startswith(" validation results on LAMBADA | number correct: ")
    assert "total examples: 2.0000E+00" in out


def test_lambada_long_passage_is_truncated_on_the_left(place, tmp_path):
    """The model has 12 positions: tokens before the last 12 have no effect, which is reported."""
    ends = [f" {first}" + f" {word}" * 10 for word in ("cat", "mat", ",") for first in ("dog", "sat", "on")]
    (tmp_path / "prompts.txt").write_text("\n".join(end.strip() for end in ends))
    line = f"generate {GPT} --load gpt --prompts {tmp_path / 'prompts.txt'} --max-new-tokens 1 --greedy --format json"
    completions = [each["completion"] for each in json.loads(run(line)[1])]
    # Random weights may generate part of a character, which no text can end with.
    end, last = next(
        (end, last) for end, last in zip(ends, completions, strict=True) if last.isascii() and last.strip()
    )
    texts = [f"{start}{end}{answer}" for start in ("the mat", "sat on " * 20) for answer in (last, " dog")]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "found.jsonl"
    line = f"evaluate lambada {GPT} --load gpt --valid-data {tmp_path / 'long.jsonl'} --predictions {out} --format json"
    code, text, err = run(line)
    assert code == 0, err
    assert "4 of 4 passages exceed 12 positions; their beginning is truncated" in err
    assert json.loads(text)["shortened"] == 4
    found = [json.loads(each)["correct"] for each in out.read_text().splitlines()]
    assert found == [True, False] * 2


def test_generate_unconditional_writes_samples(place):
    line = f"generate {GPT} {TRAINING} --load gpt --out-seq-length 12 --temperature 1.0 --genfile samples.json"
    code, out, err = run(f"{line} --num-samples 2 --top_p 0.9 --recompute")
    assert (code, out) == (0, ""), err
    samples = [json.loads(line) for line in (place / "samples.json").read_text().splitlines()]
    assert [sorted(sample) for sample in samples] == [["finished", "length", "prompt", "text"]] * 2
    assert all(sample["finished"] or sample["length"] == 12 for sample in samples)
    assert samples[0] != samples[1]


def test_generate_prompt_file_writes_samples(place):
    files = "--sample-input-file prompts.txt --sample-output-file out.json"
    code, _, err = run(f"generate {GPT} --load gpt {files} --out-seq-length 10 --top_k 0 --top_p 0.0 --temperature 1.0")
    assert code == 0, err
    samples = [json.loads(line) for line in (place / "out.json").read_text().splitlines()]
    # A prompt may be any word, and the last line counts as well.
    assert [sample["text"].startswith(p) for sample, p in zip(samples, ("the cat", "stop", "the dog sat"), strict=True)]
    assert all(sample["finished"] or sample["length"] == 10 for sample in samples)
    assert run(f"generate {GPT} --load gpt {files} --out-seq-length 10 --greedy")[0] == 0
    assert [json.loads(line) for line in (place / "out.json").read_text().splitlines()] == samples


def test_generate_long_prompt_has_an_error_in_its_line(place, tmp_path):
    """Other prompts are continued; blank prompts are reported."""
    long = "x" * 300
    (tmp_path / "prompts.txt").write_text(f"the cat\n\n{long}\n  \nthe dog\n")
    line = f"generate {GPT} --load gpt --max-new-tokens 2 --prompts {tmp_path / 'prompts.txt'}"
    code, _, err = run(f"{line} --genfile {tmp_path / 'out.json'}")
    assert code == 0, err
    assert "2 blank prompts skipped: line 2, 4" in err
    assert "1 of 3 samples failed; first error: the prompt" in err
    samples = [json.loads(each) for each in (tmp_path / "out.json").read_text().splitlines()]
    assert [sample["prompt"] for sample in samples] == ["the cat", long, "the dog"]
    assert ["error" in sample for sample in samples] == [False, True, False]
    assert "the model has 12 positions" in samples[1]["error"]
    assert samples[2]["text"].startswith("the dog")
    answers = json.loads(run(f"{line} --format json")[1])
    assert [each["finish_reason"] for each in answers] == ["length", "error", "length"]
    assert "error: the prompt" in run(line)[1]


def test_generate_stop_token_ends_the_completion(place):
    command = f"generate {GPT} --load gpt --prompt the --max-new-tokens 8 --format json --stop-token"
    whole = json.loads(run(f"{command} never")[1])[0]
    assert (whole["finish_reason"], whole["completion_tokens"]) == ("length", 8)
    # Greedy text is the same up to the stop token.
    text = whole["completion"]
    stop = next(each for each in text[1:] if each != text[0])
    ended = json.loads(run(f"{command} {stop}")[1])[0]
    assert (ended["finish_reason"], ended["completion"]) == ("stop", text[: text.index(stop)])
    assert ended["completion_tokens"] == len(ended["completion"].encode())


def test_generate_interactive_continues_each_line(place):
    words = ["generate", *GPT.split(), "--load", "gpt", "--interactive", "--max-new-tokens", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, words, input="the cat\n\nstop\n" + "the " * 40 + "\nthe dog\n")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.split("\n")
    assert [line.startswith(text) for line, text in zip(lines, ("the cat", "stop", "the dog"), strict=False)] == [
        True
    ] * 3
    assert "the model has 12 positions" in done.stderr


@pytest.mark.complete
def test_finetune_mnli_megatron_command_line_trains(place):
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    line = f"tasks --task MNLI --train-data train.tsv --valid-data train.tsv train.tsv {shape} --vocab-file bert.txt"
    line += (
        " --tokenizer-type BertWordPieceLowerCase --epochs 1 --micro-batch-size 3 --checkpoint-activations --lr 5e-5"
    )
    line += " --lr-decay-style linear --lr-warmup-fraction 0.065 --save-interval 500000 --save mnli --log-interval 10"
    line += " --eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1 --keep-last --seed 1234"
    code, out, err = run(line)
    assert code == 0, err
    assert " > |epoch: 1| metrics for train: correct / total = " in out
    assert " >> |epoch: 1| overall: correct / total = " in out
    events = [json.loads(line) for line in (place / "mnli" / "events.jsonl").read_text().splitlines()]
    assert [event["message"][:18] for event in events if event["kind"] == "checkpoint"] == ["saved step-0000000"]
    code, again, err = run("evaluate --task MNLI --load mnli --valid-data train.tsv --seq-length 16")
    assert code == 0, err
    assert again.splitlines()[0].split("metrics")[1] == out.splitlines()[-3].split("metrics")[1] or "train" in again


def test_finetune_invalid_values_are_all_reported(place):
    (place / "finetune.toml").write_text('micro_batch_size = "eight"\nglobal_batch_size = 0\n')
    code, _, err = run("finetune mnli --config finetune.toml --train-data train.tsv --epochs -1 --lr 0")
    assert code == 2
    flags = ("--epochs", "--valid-data", "--micro-batch-size", "--global-batch-size", "--lr")
    assert all(f"\n  {flag}: must be " in err or f"\n  {flag}: is required: " in err for flag in flags), err


@pytest.mark.parametrize("name", ["micro_batch_size", "global_batch_size", "pipeline_model_parallel_size"])
def test_finetune_size_of_zero_is_refused(place, name):
    line = "finetune mnli --train-data train.tsv --valid-data train.tsv --lr 1e-5"
    code, _, err = run(f"{line} --{name.replace('_', '-')} 0")
    assert code == 2
    assert f"--{name.replace('_', '-')}: must be at least 1, is 0" in err


@pytest.fixture
def race(place):
    """Folders of RACE: a line per passage with its questions."""
    for folder, first in (("RACE/train/middle", 0), ("RACE/dev/middle", 8), ("RACE/dev/high", 12)):
        (place / folder).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + 4):
            options = [[f"w{(number + turn + at) % 40}" for at in range(4)] for turn in range(2)]
            passage = {
                "article": f"w{number} w1 w2 .",
                "questions": [f"w{number} is _ .", "which is it ?"],
                "options": options,
                "answers": ["ABCD"[number % 4], "A"],
                "id": f"{folder}/{number}.txt",
            }
            (place / folder / f"{number}.txt").write_text(json.dumps(passage) + "\n")
    return place


@pytest.mark.complete
def test_finetune_race_megatron_command_line_trains(race):
    """The command line of Megatron's ``finetune_race_distributed.sh``, and an evaluation of the model."""
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
    line = "tasks --task RACE --seed 1234 --train-data RACE/train/middle --valid-data RACE/dev/middle RACE/dev/high"
    line += " --tokenizer-type BertWordPieceLowerCase --vocab-file bert.txt --epochs 3 --tensor-model-parallel-size 1"
    line += f" {shape} --micro-batch-size 4 --activations-checkpoint-method uniform --lr 1.0e-5 --lr-decay-style linear"
    line += " --lr-warmup-fraction 0.06 --save-interval 100000 --save race --log-interval 10 --eval-interval 100"
    line += " --eval-iters 50 --weight-decay 1.0e-1 --clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1"
    code, out, err = run(line)
    assert code == 0, err
    assert [f"|epoch: {epoch}| overall" in out for epoch in (1, 2, 3)] == [True] * 3
    last_epoch = [each for each in out.splitlines() if "|epoch: 3|" in each]
    assert [each.partition(":")[2].split(" = ")[1].split(" / ")[1] for each in last_epoch] == ["8", "8", "16"]
    code, again, err = run(
        "evaluate --task RACE --load race --valid-data RACE/dev/middle RACE/dev/high --micro-batch-size 4"
    )
    assert code == 0, err
    assert [each.split("| ", 1)[1] for each in again.splitlines()] == [each.split("| ", 1)[1] for each in last_epoch]


@table(
    ("line", "words"),
    [
        ("tasks --valid-data wiki.txt", "--task is required: one of WIKITEXT103, LAMBADA, MNLI, RACE"),
        ("evaluate --task QQP", "--task QQP: must be one of"),
        ("generate --load gpt --prompt x --vocab-file vocab.json --merge-file no.txt", "no tokenizer at no.txt"),
        (f"generate {GPT} --load gpt --prompt x --interactive", "--interactive: cannot be combined"),
        (f"generate {GPT} --load gpt --prompt {'x' * 300} --max-new-tokens 1", "the model has 12 positions"),
        (f"generate {GPT} --load gpt --prompt thecatsat --out-seq-length 2", "must be below --out-seq-length 2"),
        (f"generate {GPT} --load gpt --prompt x --genfile no/such", "--genfile no/such: cannot be written"),
        (
            f"generate {GPT} --hidden-size 32 --load gpt --prompt x",
            "--hidden-size: is 32; must be 16, as in",
        ),
        ("evaluate mnli --load gpt --valid-data train.tsv", "contains no model fine-tuned for mnli"),
    ],
)
def test_task_commands_invalid_input_is_refused(place, line, words):
    code, _, err = run(line)
    assert code == 2
    assert words in err, err
