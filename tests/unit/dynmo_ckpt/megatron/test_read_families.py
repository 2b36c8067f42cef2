"""Legacy Megatron BERT, T5 and Llama of every version and topology give the tensors that were written."""

import numpy as np
import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.converters.legacy_megatron import stage_layer_counts
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.megatron.model_sizes import MEGATRON_SCALING, legacy_args, llama_args
from dynmo_ckpt.megatron.read import open_legacy
from dynmo_ckpt.megatron.write import split_stage
from dynmo_ckpt.operations.reference_model import load_array
from tests.tables import table
from tests.unit.dynmo_ckpt import families, legacy_families, native_checkpoints

NOTHING = range(0)
CASES = {
    "bert": [[(range(3), NOTHING)], [(range(2), NOTHING), (range(2, 3), NOTHING)]],
    "llama": [[(range(3), NOTHING)], [(range(1), NOTHING), (range(1, 3), NOTHING)]],
    "t5": [
        [(range(2), range(3))],
        [(range(2), NOTHING), (NOTHING, range(3))],
        [(range(1), NOTHING), (range(1, 2), NOTHING), (NOTHING, range(1)), (NOTHING, range(1, 3))],
    ],
}


def check(path, m, p):
    found, _ = open_checkpoint(path, "legacy")
    model = dict(found.manifest["model"])
    assert model == m
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert set(found.tensors) == set(p)
    assert all(np.array_equal(load_array(found, name), value) for name, value in p.items())
    assert dict(found.manifest["ties"]) == families.ties(m)


@table("tp", [1, 2])
@table(("family", "case"), [(f, i) for f, cases in CASES.items() for i in range(len(cases))])
def test_open_legacy_of_any_topology_has_all_tensors(tmp_path, family, case, tp):
    m = getattr(families, family)()
    p = families.parameters(m)
    legacy_families.save(tmp_path, p, m, tp=tp, stages=CASES[family][case])
    check(tmp_path, m, p)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_open_legacy_of_any_version_has_all_tensors(tmp_path, family, version):
    m = getattr(families, family)()
    p = families.parameters(m)
    legacy_families.save(tmp_path, p, m, tp=2, stages=CASES[family][1], version=version)
    check(tmp_path, m, p)


def test_convert_bert_without_binary_head_and_tanh_gelu_reports_it(tmp_path):
    m = families.bert(binary_head=False, num_tokentypes=0, activation="gelu_tanh")
    p = families.parameters(m)
    legacy_families.save(tmp_path, p, m, stages=CASES["bert"][1])
    check(tmp_path, m, p)


def change(path, alter):
    import torch

    document = torch.load(path, weights_only=False)
    alter(document)
    torch.save(document, path)


def test_open_legacy_t5_with_different_embeddings_is_refused(tmp_path):
    m = families.t5()
    legacy_families.save(tmp_path, families.parameters(m), m, stages=CASES["t5"][1])
    path = tmp_path / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    change(path, lambda d: d["model"]["language_model"]["embedding"]["position_embeddings"]["weight"].add_(1))
    with pytest.raises(CorruptError, match=r"position_embeddings.weight of two stages, tensor-parallel rank 0 differ"):
        open_legacy(tmp_path, ReadOptions())


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "swiglu", False),
        ("llama", "rotary_percent", 0.5),
        ("llama", "rotary_interleaved", True),
        ("bert", "swiglu", True),
        ("t5", "num_experts", 2),
    ],
)
def test_open_legacy_variant_without_model_is_refused(tmp_path, family, field, value):
    m = getattr(families, family)()
    legacy_families.save(tmp_path, families.parameters(m), m, stages=CASES[family][0])
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    change(path, lambda d: setattr(d["args"], field, value))
    with pytest.raises(UnsupportedError, match=field):
        open_legacy(tmp_path, ReadOptions())


def test_llama_sizes_unfitting_groups_are_refused(tmp_path):
    m = families.llama()
    legacy_families.save(tmp_path, families.parameters(m), m, stages=CASES["llama"][0])
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    change(path, lambda d: setattr(d["args"], "num_query_groups", 4))
    with pytest.raises(UnsupportedError, match="do not fit 4 heads of 4 in 4 groups"):
        open_legacy(tmp_path, ReadOptions())


def test_t5_stages_are_split_between_encoder_and_decoder():
    m = families.t5()
    assert stage_layer_counts(m, 2, None) == [2, 3]
    assert stage_layer_counts(m, 4, None) == [1, 1, 2, 1]
    assert split_stage(m, [1, 1, 2, 1]) == 2
    with pytest.raises(UsageError, match="a stage boundary between them"):
        split_stage(m, [1, 2, 2])


def test_legacy_args_sliding_window_is_refused():
    model = families.llama(sliding_window=4)
    with pytest.raises(UnsupportedError, match="legacy Megatron: sliding_window 4 is not supported"):
        legacy_args(model, 1, 1, 3.0, None)


def test_legacy_args_other_rotary_scaling_is_refused():
    model = {
        "num_attention_heads": 4,
        "layernorm_epsilon": 1e-5,
        "rotary_scaling": {**MEGATRON_SCALING, "factor": 32.0},
    }
    assert llama_args(model)["rope_scaling_factor"] == 32.0
    model["rotary_scaling"]["low_freq_factor"] = 2.0
    with pytest.raises(UnsupportedError, match="low_freq_factor"):
        llama_args(model)
