"""A small model passes bit for bit from every format to every other, in one step.

``tests/parity/test_ckpt_one_step.py`` begins with files that other programs write, among them llama2.c's, in float32.
"""

import itertools

import numpy as np
import pytest

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.operations.reference_model import load_array
from tests.unit.dynmo_ckpt import families, native_checkpoints

pytest.importorskip("torch")

FORMATS = ("native", "hf", "legacy", "dcp", "titan", "deepspeed")
GPT = native_checkpoints.model(num_layers=2)
LLAMA = families.llama(num_layers=2)
# Formats that have no such model: torchtitan has no GPT-2.
WITHOUT = {"gpt": ("titan",), "llama": ()}
TOPOLOGY = {"native": ("--tp", 2), "legacy": ("--tp", 2), "deepspeed": ("--tp", 2)}


def parameters(family, dtype):
    if family == "gpt":
        found = native_checkpoints.true_rows(GPT["vocab_size"], native_checkpoints.parameters(GPT))
    else:
        found = native_checkpoints.true_rows(LLAMA["vocab_size"], families.parameters(LLAMA))
    return {name: value.astype(dtype) for name, value in found.items()}


@pytest.fixture(scope="module", params=[("gpt", np.float32), ("llama", np.float16)])
def sources(request, tmp_path_factory):
    """The family, its parameters, and the folder with one checkpoint per format."""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp(family)
    p = parameters(family, dtype)
    native_checkpoints.save(folder / "native", p, GPT if family == "gpt" else LLAMA)
    return family, p, folder


def stored(path, names):
    checkpoint, _ = open_checkpoint(path, options=ReadOptions())
    assert set(checkpoint.names("parameter")) == set(names)
    assert {checkpoint.manifest["tensors"][name]["dtype"] for name in names} == {
        "F32" if next(iter(names.values())).dtype == np.float32 else "F16"
    }
    return {name: load_array(checkpoint, name) for name in names}


def test_every_format_converts_to_every_other_without_a_changed_bit(sources, ckpt):
    family, p, folder = sources
    formats = [name for name in FORMATS if name not in WITHOUT[family]]
    for name in formats[1:]:
        ckpt("convert", folder / "native", folder / name, "--to", name, "--no-check-logits", *TOPOLOGY.get(name, ()))
    for source, target in itertools.product(formats, formats):
        out = folder / f"{source}-{target}"
        options = TOPOLOGY.get(target, ())
        ckpt("convert", folder / source, out, "--to", target, "--no-check-logits", "--no-verify", *options)
        found = stored(out, p)
        for name, value in p.items():
            assert np.array_equal(found[name], value.astype(np.float32)), f"{source} to {target}: {name}"


LATER = ("qwen3", "qwen3 experts", "deepseek", "deepseek, queries without a latent", "deepseek v2", "gpt-oss")


@pytest.mark.complete
@pytest.mark.parametrize("name", LATER)
def test_later_families_pass_between_native_hf_and_titan_unchanged(tmp_path, ckpt, name):
    from safetensors.torch import load_file

    from tests.unit.dynmo_ckpt import titan_facts

    formats = ("hf", "native", "titan")
    titan_facts.save_theirs(name, tmp_path / "hf")
    ckpt("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", "--no-check-logits")
    ckpt("convert", tmp_path / "native", tmp_path / "titan", "--to", "titan", "--no-check-logits")
    expected, _ = open_checkpoint(tmp_path / "native", options=ReadOptions())
    for source, target in itertools.product(formats, formats):
        out = tmp_path / f"{source}-{target}"
        ckpt("convert", tmp_path / source, out, "--to", target, "--no-check-logits", "--no-verify")
        found, _ = open_checkpoint(out, options=ReadOptions())
        assert found.manifest["model"] == expected.manifest["model"]
        assert found.manifest["ties"] == expected.manifest["ties"]
        assert set(found.weights()) == set(expected.weights())
        for key in expected.weights():
            assert np.array_equal(load_array(found, key), load_array(expected, key)), f"{source} to {target}: {key}"
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "titan-hf"))
    assert {key: value.tolist() for key, value in theirs.items()} == {key: v.tolist() for key, v in ours.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_titan_is_loaded_by_torch_under_current_names(tmp_path, ckpt):
    """torch's own reader finds torchtitan's names and shapes; neighbors of a head are its pairs."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    p = parameters("llama", np.float32)
    native_checkpoints.save(tmp_path / "native", p, LLAMA)
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan")
    metadata = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    names = {"tok_embeddings.weight", "norm.weight", "lm_head.weight"}
    for i in range(2):
        names |= {f"layers.{i}.attention.qkv_linear.{each}.weight" for each in ("wq", "wk", "wv")}
        names |= {f"layers.{i}.feed_forward.{each}.weight" for each in ("w1", "w2", "w3")}
        names |= {f"layers.{i}.{each}.weight" for each in ("attention.wo", "attention_norm", "ffn_norm")}
    assert set(metadata) == names
    state = {name: torch.zeros(entry.size) for name, entry in metadata.items()}
    load(state, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    qkv = p["layers.1.attention.qkv.weight"].reshape(2, 4, 4, 16)
    query = qkv[:, :2].reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(16, 16)
    assert np.array_equal(state["layers.1.attention.qkv_linear.wq.weight"].numpy(), query)
    assert np.array_equal(state["layers.0.feed_forward.w2.weight"].numpy(), p["layers.0.mlp.fc2.weight"])


@pytest.mark.parametrize("family", ["gpt", "window"])
def test_titan_refuses_other_models_by_name(tmp_path, ckpt, family):
    m = GPT if family == "gpt" else LLAMA | {"sliding_window": 4}
    p = parameters("gpt" if family == "gpt" else "llama", np.float32)
    native_checkpoints.save(tmp_path / "native", p, m)
    result = ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan", code=5)
    assert f"a {'gpt2' if family == 'gpt' else 'mistral'} is not written" in result.stderr


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DECODERS = {
    "Qwen2": {**GROUPED, "tie_word_embeddings": True},
    "Qwen3": {**GROUPED, "head_dim": 12},
    "Mixtral": {**GROUPED, **EXPERTS},
    "Qwen3Moe": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "GptOss": {**GROUPED, **EXPERTS, "head_dim": 16},
    "DeepseekV3": {
        **GROUPED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
}


# Fields that every form records, in the same words.
STATED = {
    *("num_layers", "ffn_hidden_size", "num_key_value_heads", "head_dim", "layernorm_epsilon", "tied_embeddings"),
    *("rotary_base", "attention_bias", "qk_norm", "num_experts", "moe_top_k", "moe_layer_pattern", "kv_lora_rank"),
    *("sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit", "attention_sinks", "moe_router_bias"),
}


@pytest.mark.complete
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_of_today_convert_between_all_forms(tmp_path, ckpt, kind):
    """Transformers' form, the native one and Megatron-core's, each in one step to each."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**DECODERS[kind], pad_token_id=None)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / "hf")
    forms = ("hf", "native", "dcp")
    for form in forms[1:]:
        ckpt("convert", tmp_path / "hf", tmp_path / form, "--to", form, "--no-check-logits")
    before, _ = open_checkpoint(tmp_path / "hf")
    for source, target in itertools.product(forms, forms):
        out = tmp_path / f"{source}-{target}"
        ckpt("convert", tmp_path / source, out, "--to", target, "--no-check-logits", "--no-verify")
        after, _ = open_checkpoint(out, target)
        assert set(before.weights()) == set(after.weights())
        for name in before.weights():
            assert np.array_equal(load_array(before, name), load_array(after, name)), (source, target, name)
        models = [each.manifest["model"] for each in (before, after)]
        assert all(models[0][field] == models[1].get(field) for field in models[0] if field in STATED), (source, target)
