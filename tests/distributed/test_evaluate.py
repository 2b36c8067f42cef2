"""Evaluations give identical results in every parallel layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.distributed.workers import run_workers
from tests.unit.dynmo_ckpt import native_checkpoints

pytestmark = [pytest.mark.complete, pytest.mark.distributed]
WORDS = [f"w{number}" for number in range(29)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A native checkpoint of random weights with its tokenizer, a text and passages."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    m = native_checkpoints.model(num_layers=4, padded_vocab_size=36)
    files = {"tokenizer/tokenizer.json": tokenizer.to_str().encode()}
    native_checkpoints.save(folder / "native", native_checkpoints.parameters(m, seed=4), m, tp=2, files=files)
    text = [WORDS[number * number % 29] for number in range(70)]
    (folder / "text").write_text(" ".join(text))
    passages = [{"text": " ".join(text[at : at + 3 + at % 9])} for at in range(11)]
    (folder / "passages").write_text("\n".join(map(json.dumps, passages)))
    return folder


def evaluate(folder, pipeline, tensor):
    from dynmo_train.config.fields import values_of
    from dynmo_train.config.sections.evaluation import InferenceConfig, LambadaConfig, WikitextConfig
    from dynmo_train.evaluation.lambada import evaluate_lambada
    from dynmo_train.evaluation.model_checkpoint import evaluation_world
    from dynmo_train.evaluation.wikitext import evaluate_wikitext

    options = {
        "load": str(folder / "native"),
        "device": "cpu",
        "micro_batch_size": 2,
        "pipeline_model_parallel_size": pipeline,
        "tensor_model_parallel_size": tensor,
    }
    place = values_of(InferenceConfig, options)
    with evaluation_world(
        place, values_of(WikitextConfig, {"valid_data": str(folder / "text")}), int(os.environ["WORLD_SIZE"])
    ) as world:
        task = values_of(WikitextConfig, {"valid_data": str(folder / "text"), "overlapping_eval": 4})
        wikitext = evaluate_wikitext(place, task, world, {}).document()
        out = str(folder / f"items-{world.size}-{pipeline}-{tensor}")
        task = values_of(LambadaConfig, {"valid_data": str(folder / "passages"), "predictions": out})
        lambada = evaluate_lambada(place, task, world, {}).document()
        return wikitext, lambada, Path(out).read_text() if world.is_rank0 else None


@pytest.fixture(scope="module")
def alone(folder):
    return run_workers(evaluate, 1, folder, 1, 1, joins=False)[0]


@pytest.mark.parametrize(
    ("processes", "pipeline", "tensor"),
    [(2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1)],
    ids=["PP2", "DP2", "TP2", "PP2-TP2", "PP2-DP2"],
)
def test_evaluation_is_identical_in_every_layout(folder, alone, processes, pipeline, tensor):
    results = run_workers(evaluate, processes, folder, pipeline, tensor, joins=False)
    assert results[0][2] == alone[2]
    for wikitext, lambada, _ in results:
        assert lambada == alone[1]
        if tensor == 1:
            assert wikitext == alone[0]
        else:
            assert wikitext == pytest.approx(alone[0], rel=1e-6)
