"""Decoders of Megatron-core in a file of each rank: every topology has the tensors of the distributed form."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, NoOptimizerStateError, UnsupportedError
from tests.tables import table
from tests.unit.dynmo_ckpt.megatron.test_core_decoder import ARGS, EXPERTS, LAYER, LAYERS, arrays, opened, state

QKV, PROJ = (f"self_attention.linear_{name}.weight" for name in ("qkv", "proj"))
FC1, FC2 = (f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))


def slices(value, dim, ranks, halves=1):
    """The part of each rank along a dimension, in which ``halves`` are split one by one."""
    parts = [np.split(half, ranks, axis=dim) for half in np.split(value, halves, axis=dim)]
    return [np.concatenate(each, axis=dim) for each in zip(*parts, strict=True)]


def of_rank(tensors, layer, rank, tp, experts, form):
    """The module's tensors of a layer on a rank."""
    found = {}
    for name, whole in tensors.items():
        if not name.startswith(LAYER):
            continue
        part, value = name.removeprefix(LAYER), whole[layer]
        if part == QKV:
            value = slices(value, 0, tp)[rank]
        if part == PROJ:
            value = slices(value, 1, tp)[rank]
        if part not in (FC1, FC2):
            found[part] = value
            continue
        own = [
            slices(value[j], 0, tp, halves=2)[rank] if part == FC1 else slices(value[j], 1, tp)[rank] for j in experts
        ]
        projection = part.split(".")[-2]
        if form == "together":
            # One matrix of all experts, which multiplies from the right: [hidden, experts x inner] as it is in memory.
            shape = (value.shape[2], -1) if part == FC1 else (-1, value.shape[1])
            found[f"mlp.experts.weight{projection[-1]}"] = np.stack([each.T for each in own]).reshape(shape)
        for number, each in enumerate(own):
            if form == "modules":
                found[f"mlp.experts.local_experts.{number}.{projection}.weight"] = each
            if form == "grouped":
                found[f"mlp.experts.{projection}.weight{number}"] = each
    return found


def save_ranks(place, tensors, *, tp=1, pp=1, ep=1, vpp=1, form="modules", change=None, **more):
    """A file of each rank; layers are numbered within a chunk."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = argparse.Namespace(**ARGS | sizes | {"untie_embeddings_and_output_weights": True} | more)
    share, count = LAYERS // (pp * vpp), EXPERTS // ep
    for t, p, e in np.ndindex(tp, pp, ep):
        chunks = []
        for v in range(vpp):
            number = v * pp + p
            chunk = {}
            for at in range(share):
                own = of_rank(tensors, number * share + at, t, tp, range(e * count, (e + 1) * count), form)
                chunk |= {f"{LAYER}{at}.{name}": value for name, value in own.items()}
            if number == 0:
                word = "embedding.word_embeddings.weight"
                chunk[word] = slices(tensors[word], 0, tp)[t]
            if number == pp * vpp - 1:
                chunk["decoder.final_layernorm.weight"] = tensors["decoder.final_layernorm.weight"]
                chunk["output_layer.weight"] = slices(tensors["output_layer.weight"], 0, tp)[t]
            chunks.append(chunk)
        tree = {"args": args, "iteration": 5, "checkpoint_version": 3.0}
        named = {"model": chunks[0]} if vpp == 1 else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
        for chunk in named.values():
            if change is not None:
                change(chunk, (t, p, e))
        tree |= {key: {n: torch.from_numpy(v.copy()) for n, v in chunk.items()} for key, chunk in named.items()}
        numbers = [f"{t:02d}", *([f"{p:03d}"] if pp > 1 else []), *([f"{e:03d}"] if ep > 1 else [])]
        folder = place / "iter_0000005" / f"mp_rank_{'_'.join(numbers)}"
        folder.mkdir(parents=True)
        torch.save(tree, folder / "model_optim_rng.pt")
    (place / "latest_checkpointed_iteration.txt").write_text("5")


def read(place, **options):
    return open_checkpoint(place, options=ReadOptions(**options))[0]


@table("form", ["modules", "grouped", "together"])
@table(
    "sizes",
    [
        {},
        {"tp": 2},
        {"pp": 2},
        {"ep": 3},
        {"pp": 2, "ep": 3},
        {"tp": 2, "pp": 2, "ep": 3},
        {"vpp": 2},
    ],
    ids=str,
)
def test_ranks_have_the_tensors_of_the_distributed_form(tmp_path, sizes, form):
    tensors = state()
    expected = opened(tmp_path / "whole", tensors)
    save_ranks(tmp_path / "ranks", tensors, form=form, **sizes)
    found = read(tmp_path / "ranks")
    assert found.manifest["model"] == expected.manifest["model"]
    assert found.manifest["step"] == 5
    reference, values = arrays(expected), arrays(found)
    assert values.keys() == reference.keys()
    assert [name for name in reference if not np.array_equal(values[name], reference[name])] == []


def test_tied_copy_on_the_last_stage_is_compared(tmp_path):
    tensors = state()
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"]
    tied = {"untie_embeddings_and_output_weights": False}
    save_ranks(tmp_path / "a", tensors, pp=2, **tied)
    assert read(tmp_path / "a").manifest["model"]["tied_embeddings"]
    assert not read(tmp_path / "a", untie=True).manifest["model"]["tied_embeddings"]
    save_ranks(tmp_path / "b", state(), pp=2, **tied)
    with pytest.raises(CorruptError, match="word table and its copy on the last stage differ"):
        read(tmp_path / "b")


def without(name):
    return lambda chunk, key: chunk.pop(name, None) if key == (1, 0, 0) else None


def negated(name):
    def change(chunk, key):
        if key != (0, 0, 0) and name in chunk:
            chunk[name] = -chunk[name]

    return change


@pytest.mark.parametrize(
    ("built", "message"),
    [
        ({"tp": 2, "change": without(f"{LAYER}0.{QKV}")}, r"tensor-parallel ranks of stage 0 differ in .*linear_qkv"),
        ({"tp": 2, "change": negated(f"{LAYER}1.mlp.router.weight")}, "router.weight of tensor-parallel ranks 0 and 1"),
        (
            {"ep": 3, "change": negated(f"{LAYER}1.{PROJ}")},
            "linear_proj.weight of expert-parallel ranks 0 and 1 differ",
        ),
        ({"pp": 2, "pipeline_model_parallel_size": 1}, "files of 2 ranks, expected 1 x 1 x 1"),
        ({"tp": 2, "num_experts": 5, "form": "together"}, r"weight1: \[.*\] does not fit 5 experts"),
        ({"pipeline_model_parallel_size": "two"}, "must be a positive integer"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(tmp_path, built, message):
    save_ranks(tmp_path / "c", state(), **built)
    with pytest.raises(CorruptError, match=message):
        read(tmp_path / "c")


def test_missing_rank_and_another_iteration_are_refused(tmp_path):
    for place in ("missing", "older"):
        save_ranks(tmp_path / place, state(), ep=3)
        path = tmp_path / place / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt"
        if place == "missing":
            path.unlink()
        else:
            torch.save({**torch.load(path, weights_only=False), "iteration": 4}, path)
    with pytest.raises(CorruptError, match=r"files of 2 ranks, expected 1 x 1 x 3 .*; \(0, 0, 1\) missing"):
        read(tmp_path / "missing")
    with pytest.raises(CorruptError, match=r"mp_rank_00_001.*iteration must be those of"):
        read(tmp_path / "older")


def test_state_and_other_ranks_of_experts_are_refused_with_a_remedy(tmp_path):
    save_ranks(tmp_path / "c", state())
    with pytest.raises(NoOptimizerStateError, match="has no optimizer state"):
        read(tmp_path / "c", with_optimizer=True)
    (path,) = (tmp_path / "c").glob("iter_*/mp_rank_00/*.pt")
    torch.save({**torch.load(path, weights_only=False), "optimizer": {}}, path)
    with pytest.raises(UnsupportedError, match=r"--ckpt-format torch_dist, or .* --no-optimizer"):
        read(tmp_path / "c", with_optimizer=True)
    save_ranks(tmp_path / "d", state(), tp=2, expert_tensor_parallel_size=1)
    with pytest.raises(UnsupportedError, match=r"expert_tensor_parallel_size = 1\) are not supported"):
        read(tmp_path / "d")


def test_llama_under_the_same_names_is_read_as_before(tmp_path):
    """Its sizes are those of the directories, whatever a converter recorded."""
    tensors = {name: value for name, value in state().items() if "experts" not in name and "router" not in name}
    rng = np.random.default_rng(1)
    for name, shape in {"mlp.linear_fc1": (LAYERS, 24, 16), "mlp.linear_fc2": (LAYERS, 16, 12)}.items():
        tensors[f"{LAYER}{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    save_ranks(tmp_path / "c", tensors, num_experts=None, moe_router_topk=None, rotary_base=10000)
    plain = read(tmp_path / "c")
    save_ranks(
        tmp_path / "d",
        tensors,
        num_experts=None,
        moe_router_topk=None,
        rotary_base=10000,
        **{"pipeline_model_parallel_size": 8},
    )
    assert arrays(read(tmp_path / "d")).keys() == arrays(plain).keys()
    assert plain.manifest["model"]["family"] == "llama"
