"""Generated text is identical in every parallel layout and for every batch size."""

from __future__ import annotations

import os

import pytest

from tests.distributed.ports import free_port
from tests.distributed.workers import run_workers
from tests.unit.dynmo_ckpt import native_checkpoints

pytestmark = [pytest.mark.complete, pytest.mark.distributed]
WORDS = [f"w{number}" for number in range(29)]
PROMPTS = ["w1 w2 w3", "w7", "w9 w8", "w3 w1 w4 w1 w5", "w20 w21"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A native checkpoint of random weights with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("generate")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    m = native_checkpoints.model(num_layers=4, padded_vocab_size=36, max_position_embeddings=24)
    files = {"tokenizer/tokenizer.json": tokenizer.to_str().encode()}
    native_checkpoints.save(folder / "native", native_checkpoints.parameters(m, seed=4), m, files=files)
    return folder


def write(folder, pipeline, tensor, batch, temperature, recompute):
    from dynmo_train.config.fields import values_of
    from dynmo_train.config.sections.evaluation import GenerateConfig, InferenceConfig
    from dynmo_train.evaluation.model_checkpoint import evaluation_world
    from dynmo_train.evaluation.sampling import Sampling
    from dynmo_train.evaluation.text_generator import GenerationSettings, TextGenerator

    options = {
        "load": str(folder / "native"),
        "device": "cpu",
        "pipeline_model_parallel_size": pipeline,
        "tensor_model_parallel_size": tensor,
    }
    place = values_of(InferenceConfig, options)
    settings = GenerationSettings(
        max_new_tokens=9,
        sampling=Sampling(temperature=temperature),
        seed=3,
        num_samples=2 if temperature else 1,
        batch_size=batch,
        recompute=recompute,
        stops=("w11",),
    )
    with evaluation_world(place, GenerateConfig(), int(os.environ["WORLD_SIZE"])) as world:
        return [each.to_document() for each in TextGenerator(place, settings, world, {}).generate(PROMPTS)]


def both(folder, port, pipeline, tensor, batch):
    """Greedy and sampled text, in separate worlds; the second world uses ``port``, as the first may still be open."""
    texts = [write(folder, pipeline, tensor, batch, 0.0, batch == 1)]
    os.environ["MASTER_PORT"] = str(port)
    return [*texts, write(folder, pipeline, tensor, batch, 1.0, False)]


@pytest.fixture(scope="module")
def alone(folder):
    greedy, drawn = run_workers(both, 1, folder, free_port(), 1, 1, 8, joins=False)[0]
    assert len(greedy) == len(drawn) / 2 == len(PROMPTS)
    assert len({each["completion"] for each in drawn}) > 5
    return greedy, drawn


@pytest.mark.parametrize(
    ("processes", "pipeline", "tensor", "batch"),
    [(1, 1, 1, 1), (2, 2, 1, 2), (2, 1, 2, 8), (2, 1, 1, 3), (4, 2, 2, 2), (3, 3, 1, 1)],
    ids=["batch-1", "PP2", "TP2", "DP2", "PP2-TP2", "PP3"],
)
def test_generation_is_identical_in_every_layout(folder, alone, processes, pipeline, tensor, batch):
    for greedy, drawn in run_workers(both, processes, folder, free_port(), pipeline, tensor, batch, joins=False):
        assert greedy == alone[0]
        assert drawn == alone[1]
