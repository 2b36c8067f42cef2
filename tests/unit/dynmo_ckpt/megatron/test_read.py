"""Legacy Megatron GPT checkpoints of every version and topology give the tensors that were written."""

import sys
import types

import numpy as np
import pytest
import torch

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.io.reading import Reader, open_sources
from dynmo_ckpt.megatron.read import open_legacy
from dynmo_ckpt.megatron.rng_state import cuda_state
from dynmo_ckpt.tensors.copy_plan import OutputTensor, sources
from dynmo_ckpt.tensors.tiled_copy import panels
from tests.tables import table
from tests.unit.dynmo_ckpt import legacy_gpt, native_checkpoints


@pytest.fixture(autouse=True)
def megatron_for_writing(monkeypatch):
    """A module under Megatron's name while files are written, as pickle asks for; reading must do without."""
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = legacy_gpt.ModelType


def numbers(tensor):
    output = OutputTensor(key="x", shape=tensor.shape, content=tensor.content)
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).copy() for panel in panels(output, Reader(files))]
    return np.concatenate(parts).view(np.float32).reshape(tensor.shape)


def read(path, **options):
    return open_legacy(path, ReadOptions(**options))


def check(found, m, p):
    assert dict(found.model) == m
    p = native_checkpoints.true_rows(found.model["vocab_size"], p)
    assert {item.name for item in found.tensors} == set(p)
    assert all(np.array_equal(numbers(item), p[item.name]) for item in found.tensors)


@table("version", [0, 1.0, 2.0, 3.0])
@table("tp", [1, 2, 4])
def test_open_legacy_versions_and_tensor_ranks(tmp_path, version, tp):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, tp=tp, version=version)
    found = read(tmp_path)
    check(found, m, p)
    assert found.step == 300
    assert found.remarks == []


@pytest.mark.parametrize(
    ("layers", "stages", "virtual"),
    [(3, [1, 2], 1), (3, [0, 3], 1), (4, [1, 1, 1, 1], 2), (6, [1, 2, 0, 3], 1), (6, [1, 2, 1, 2], 2)],
)
def test_open_legacy_even_uneven_and_virtual_stages(tmp_path, layers, stages, virtual):
    m = native_checkpoints.model(num_layers=layers)
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, tp=2, stages=stages, virtual=virtual)
    check(read(tmp_path / "iter_0000300"), m, p)


def test_open_legacy_untied_head_and_exact_gelu(tmp_path):
    m = native_checkpoints.model(tied_embeddings=False, activation="gelu")
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, tp=2, stages=[2, 1])
    found = read(tmp_path)
    check(found, m, p)
    assert found.ties == {}


def renamed(document):
    def walk(value, key=""):
        if not isinstance(value, dict):
            return value
        pairs = [("input_layernorm", "input_norm"), ("post_attention_layernorm", "post_attention_norm")]
        pairs += [("final_layernorm", "final_norm"), ("self_attention", "attention")]
        pairs += [("dense_h_to_4h", "to_4h"), ("dense_4h_to_h", "to_h")]
        result = {}
        for name, inner in value.items():
            for old, new in pairs:
                name = name.replace(old, new) if isinstance(name, str) else name
            result[name] = walk(inner)
        return result

    return walk(document)


def test_open_legacy_names_of_other_releases_and_forks(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, tp=2, rename=renamed)
    check(read(tmp_path), m, p)


def test_open_legacy_without_arguments_uses_options(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, args=False)
    with pytest.raises(UsageError, match="give --num-attention-heads"):
        read(tmp_path)
    check(read(tmp_path, num_attention_heads=4, vocab_size=29), m, p)
    found = read(tmp_path, num_attention_heads=4)
    assert found.model["vocab_size"] == 32
    assert "--vocab-size" in found.remarks[0]
    with pytest.raises(UsageError, match="between 1 and 32"):
        read(tmp_path, num_attention_heads=4, vocab_size=33)


def test_open_legacy_files_of_torch_before_1_6(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    legacy_gpt.save(tmp_path, p, m, version=0, tp=2, stages=[1, 2], is_zip=False)
    check(read(tmp_path), m, p)


def altered(path, change):
    import torch

    document = torch.load(path, weights_only=False)
    change(document)
    torch.save(document, path)


def test_open_legacy_differing_replicas_are_refused(tmp_path):
    m = native_checkpoints.model()
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m, tp=2, stages=[2, 1])

    def change(document):
        document["model"]["language_model"]["encoder"]["layers.0.input_layernorm.bias"][3] += 1

    altered(iteration / "mp_rank_01_000" / "model_optim_rng.pt", change)
    with pytest.raises(CorruptError, match=r"layers\.0\.input_layernorm\.bias of tensor-parallel ranks 0 and 1 differ"):
        read(tmp_path)


def test_open_legacy_tied_head_with_other_values_is_refused(tmp_path):
    m = native_checkpoints.model()
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m, stages=[2, 1])

    def change(document):
        document["model"]["word_embeddings_for_head"]["weight"][0, 0] += 1

    altered(iteration / "mp_rank_00_001" / "model_optim_rng.pt", change)
    with pytest.raises(CorruptError, match="word_embeddings_for_head"):
        read(tmp_path)


@pytest.mark.parametrize("field", ["swiglu", "apply_layernorm_1p", "group_query_attention"])
def test_open_legacy_unsupported_variant_is_refused(tmp_path, field):
    m = native_checkpoints.model()
    legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m, **{field: True})
    with pytest.raises(UnsupportedError, match=field):
        read(tmp_path)


def exchanged(first, second):
    """Exchange the names of two directories."""
    first.rename(first.with_name("other"))
    second.rename(first)
    first.with_name("other").rename(second)


def with_ranks(tp, workers):
    """The ``rename`` of ``legacy_gpt.save`` that records the rank of each file, in its order of files."""
    ranks = iter([stage * tp + rank for rank in range(tp) for stage in range(workers)])

    def rename(document):
        document["args"].rank, document["args"].world_size = next(ranks), tp * workers
        return document

    return rename


def with_seeds(tp, workers):
    """The same with the states of the generators of CUDA after seeding."""
    places = iter([(rank, stage) for rank in range(tp) for stage in range(workers)])

    def rename(document):
        rank, stage = next(places)
        seeds = (1234 + 100 * stage, 1234 + 100 * stage + 2718 + rank)
        states = [torch.tensor(list(cuda_state(seed)), dtype=torch.uint8) for seed in seeds]
        document["args"].seed = 1234
        document["rng_state"] = [{"cuda_rng_state": states[0], "rng_tracker_states": {"model-parallel-rng": states[1]}}]
        return document

    return rename


# Ranks, the two directories that are exchanged, and what shows it.
EXCHANGED = [
    (1, 2, ("00_000", "00_001"), None, "stages were exchanged"),
    (1, 4, ("00_001", "00_003"), None, "stages were exchanged"),
    (1, 4, ("00_001", "00_002"), with_ranks, r"pipeline rank 2 \(args.rank\)"),
    (2, 1, ("00", "01"), with_ranks, r"tensor-parallel rank 1, pipeline rank 0 \(args.rank\)"),
    (1, 4, ("00_001", "00_002"), with_seeds, r"pipeline rank 2 \(seeds"),
    (2, 1, ("00", "01"), with_seeds, r"tensor-parallel rank 1, pipeline rank 0 \(seeds"),
]


@table(("tp", "workers", "names", "facts", "message"), EXCHANGED)
def test_open_legacy_exchanged_ranks_are_refused(tmp_path, tp, workers, names, facts, message):
    m = native_checkpoints.model(num_layers=4)
    options = {"tp": tp, "stages": [4 // workers] * workers, "rename": facts and facts(tp, workers)}
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m, **options)
    assert read(tmp_path).step == 300
    exchanged(*(iteration / f"mp_rank_{name}" for name in names))
    with pytest.raises(CorruptError, match=message):
        read(tmp_path)


def test_open_legacy_last_ranks_missing_or_another_iteration_is_refused(tmp_path):
    m = native_checkpoints.model(num_layers=4)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    padded = {"padded_vocab_size": m["padded_vocab_size"]}
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m, tp=2, stages=[2, 2], **sizes, **padded)
    for rank in range(2):
        (iteration / f"mp_rank_{rank:02d}_001").rename(tmp_path / f"{rank}")
    with pytest.raises(CorruptError, match="of 2 pipeline ranks the last ones are missing"):
        read(tmp_path)
    (tmp_path / "0").rename(iteration / "mp_rank_00_001")
    (iteration / "mp_rank_01_000").rename(tmp_path / "2")
    with pytest.raises(CorruptError, match=r"has 1 of 2 tensor-parallel ranks.*mp_rank_01 missing"):
        read(tmp_path)
    (tmp_path / "1").rename(iteration / "mp_rank_01_001")
    with pytest.raises(CorruptError, match=r"1 of 4 ranks are missing: mp_rank_01_000"):
        read(tmp_path)
    (tmp_path / "2").rename(iteration / "mp_rank_01_000")
    iteration.rename(tmp_path / "iter_0000200")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(CorruptError, match="its files are of iteration 300"):
        read(tmp_path)


def test_unknown_tensor_is_refused(tmp_path):
    import torch

    m = native_checkpoints.model()
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m)

    def change(document):
        document["model"]["extra"] = {"bias": torch.zeros(32)}

    altered(iteration / "mp_rank_00" / "model_optim_rng.pt", change)
    with pytest.raises(UnsupportedError, match=r"the map has no rule for 1 tensors: extra\.bias"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "-1"])
def test_find_iteration_invalid_tracker_is_refused(tmp_path, text):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CorruptError, match="must be a number or 'release'"):
        read(tmp_path)


def shared_lists(levels):
    """Lists that share lists: small in a pickle, 2 ** levels elements where they are printed whole."""
    value = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("key", ["checkpoint_version", "iteration"])
@pytest.mark.parametrize(
    "value", ["9" * 10_000_000, list(range(1_000_000)), shared_lists(20)], ids=["text", "list", "dag"]
)
def test_open_legacy_large_value_is_shortened_in_message(tmp_path, key, value):
    m = native_checkpoints.model()
    iteration = legacy_gpt.save(tmp_path, native_checkpoints.parameters(m), m)
    altered(next(iteration.glob("mp_rank_*/model*.pt")), lambda document: document.update({key: value}))
    with pytest.raises(CorruptError, match=rf"{key} .* must be a number") as error:
        read(tmp_path)
    assert len(str(error.value)) < 1000
