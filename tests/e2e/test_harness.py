"""``evaluate lm-eval``: local data in the harness's form, and all six tasks on an exported model."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.evaluation.lm_eval_data import TASKS, find_data, parse_tasks, read_rows, write_task
from tests.unit.dynmo_ckpt import native_checkpoints

pytestmark = pytest.mark.complete

QUESTION = {"question": "What sat?", "options": ["a cat", "a log", "a mat", "a dog"], "answer": "A"}
ROWS = {
    "lambada": {"text": "the cat sat on the mat"},
    "hellaswag": {
        "ctx_a": "the cat sat.",
        "ctx_b": "the dog",
        "activity_label": "Sitting",
        "endings": ["sat", "ran", "lay", "fell"],
        "label": 0,
    },
    "piqa": {"goal": "sit", "sol1": "on the mat", "sol2": "on the dog", "label": 0},
    "mathqa": {"Problem": "1 + 1", "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5", "correct": "b"},
    "winogrande": {"sentence": "the _ sat", "option1": "cat", "option2": "log", "answer": "1"},
    "race": {
        "article": "The cat sat.",
        "questions": [QUESTION["question"]],
        "options": [QUESTION["options"]],
        "answers": [QUESTION["answer"]],
    },
}


@pytest.fixture
def data(tmp_path):
    for task, row in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    return tmp_path


def test_find_data_every_name_is_converted_for_the_harness(data):
    for task in ROWS:
        rows = read_rows(task, find_data(task, data))
        assert len(rows) == 3
    assert ast.literal_eval(read_rows("race", data / "race.jsonl")[0]["problems"]) == [QUESTION]
    assert read_rows("hellaswag", data / "hellaswag.jsonl")[0]["label"] == "0"
    (data / "mathqa.jsonl").unlink()
    (data / "mathqa.json").write_text(json.dumps([ROWS["mathqa"]]))
    assert len(read_rows("mathqa", find_data("mathqa", data))) == 1
    (data / "race.jsonl").unlink()
    (data / "RACE/test/high").mkdir(parents=True)
    (data / "RACE/test/high/1.txt").write_text(json.dumps(ROWS["race"]))
    assert len(read_rows("race", find_data("race", data))) == 1


def test_write_task_includes_the_task_of_the_harness(tmp_path):
    name = write_task("piqa", [ROWS["piqa"]], tmp_path, Path("/harness"))
    text = (tmp_path / f"{name}.yaml").read_text()
    assert 'include: "/harness/piqa/piqa.yaml"' in text
    assert f'dataset_kwargs: {{"data_files": {{"validation": "{tmp_path / "piqa.jsonl"}"}}}}' in text


def test_harness_invalid_data_is_refused(data):
    assert parse_tasks("piqa, race,piqa") == ["piqa", "race"]
    with pytest.raises(UsageError, match="--tasks 'piqa,arc': unknown arc; the tasks are lambada"):
        parse_tasks("piqa,arc")
    with pytest.raises(UsageError, match=r"contains no data of piqa; add piqa\.jsonl or"):
        find_data("piqa", data / "none")
    (data / "piqa.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(UsageError, match=r"piqa\.jsonl:1: piqa needs goal, sol1, sol2, label; lacks sol1, sol2"):
        read_rows("piqa", data / "piqa.jsonl")
    (data / "race.jsonl").write_text('{"article": "x"}\n')
    with pytest.raises(UsageError, match=r"race\.jsonl:1: is not a row of race: 'questions'"):
        read_rows("race", data / "race.jsonl")
    (data / "lambada.jsonl").write_text("")
    with pytest.raises(UsageError, match="contains no rows; lambada needs text"):
        read_rows("lambada", data / "lambada.jsonl")


def model_of(folder):
    """A native GPT of random weights with GPT-2's tokenizer files of a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log."] * 4, trainer)
    folder.mkdir()
    tokenizer.model.save(str(folder))
    files = {f"tokenizer/{name}": (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    m = native_checkpoints.model(vocab_size=280, padded_vocab_size=384, max_position_embeddings=96)
    native_checkpoints.save(folder / "native", native_checkpoints.parameters(m, seed=4), m, files=files)
    return folder / "native"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_lm_eval_missing_harness_names_its_extra(data):
    done = CliRunner().invoke(app, ["evaluate", "lm-eval", "--load", "x", "--tasks", "piqa", "--task-data", str(data)])
    assert "pip install 'dynmo-toolkit[lm-eval]'" in str(done.exception)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.timeout(900)
def test_lm_eval_all_six_tasks_run_offline(data, tmp_path):
    options = ["--load", str(model_of(tmp_path / "model")), "--tasks", ",".join(TASKS), "--task-data", str(data)]
    done = CliRunner().invoke(app, ["evaluate", "lm-eval", *options, "--format", "json", "--limit", "2"])
    if done.exception:
        raise done.exception
    found = json.loads(done.stdout)
    assert {task: figures["items"] for task, figures in found.items()} == dict.fromkeys(TASKS, 2)
    assert all("acc" in figures for figures in found.values())
    assert "perplexity" in found["lambada"]
