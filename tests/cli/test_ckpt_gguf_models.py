"""dynmo-ckpt convert --to gguf of Gemma 2 and 3, Phi-3, GPT-OSS and DeepSeek: tensors, keys, logits of llama.cpp."""

import numpy as np
import pytest

from dynmo_ckpt.converters.gguf_types import mxfp4_blocks
from tests.tables import table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Not importorskip, by which the module would have no tests where the extra is not installed.
try:
    import gguf
except ImportError:
    gguf = None
pytestmark = pytest.mark.skipif(gguf is None, reason="the gguf package is not installed")

LAYERS, HEADS, TOKENS = 2, 4, 40
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 288, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
# Windows of 8 positions, which the 40 tokens exceed.
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA3 = {**GEMMA, "num_hidden_layers": 7}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": LOCAL}
PHI = {**SIZES, "sliding_window": None}
OSS = {**SIZES, "head_dim": 32, "sliding_window": 8, "max_position_embeddings": 4096}
OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {**SIZES, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32}
LATENT |= {"n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
BOTH_SCALES = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}


def longrope(positions):
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", **factors, "rope_theta": 1e4, "original_max_position_embeddings": positions}
    return {"rope_parameters": rope, "original_max_position_embeddings": positions}


MODELS = {
    "gemma2": (transformers.Gemma2Config, GEMMA),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA3),
    "gemma3-scaled": (transformers.Gemma3TextConfig, {**GEMMA3, "rope_parameters": LINEAR}),
    "gemma3-capped": (transformers.Gemma3TextConfig, {**GEMMA3, "final_logit_softcapping": 0.5}),
    "phi3": (transformers.Phi3Config, PHI),
    "phi4": (
        transformers.Phi3Config,
        {**PHI, "hidden_size": 128, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    # 40 tokens are more than the original positions of the first, and fewer than those of the second.
    "phi3-long": (transformers.Phi3Config, {**PHI, **longrope(32)}),
    "phi3-short": (transformers.Phi3Config, {**PHI, **longrope(512), "max_position_embeddings": 2048}),
    "gpt-oss": (transformers.GptOssConfig, OSS),
    "deepseek-v2": (
        transformers.DeepseekV2Config,
        {**LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.5, "rope_parameters": BOTH_SCALES},
    ),
    "deepseek-v2-lite": (
        transformers.DeepseekV2Config,
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "num_hidden_layers": 27},
    ),
    "deepseek-v3": (transformers.DeepseekV3Config, LATENT),
    "deepseek-v3-yarn": (transformers.DeepseekV3Config, {**LATENT, "rope_parameters": BOTH_SCALES}),
    "deepseek-v3-half": (transformers.DeepseekV3Config, {**LATENT, "rope_interleave": False}),
    "deepseek-v3-groups": (
        transformers.DeepseekV3Config,
        {**LATENT, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3},
    ),
    "deepseek-v3-dense": (transformers.DeepseekV3Config, {**LATENT, "first_k_dense_replace": LAYERS}),
}
ARCHES = {"gemma2": "gemma2", "gemma3": "gemma3", "phi": "phi3", "gpt-oss": "gpt-oss", "deepseek": "deepseek2"}


def save(name, directory, dtype=None):
    """Save a random model whose norms, biases and sinks differ from 1 and 0; returns it."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**settings), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + noise / 8 if parameter.dim() == 1 else noise * 0.08)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(directory)
    return model


def stored_tensors(directory):
    from safetensors.torch import load_file

    return {key: value.float().numpy() for key, value in load_file(directory / "model.safetensors").items()}


def halves_interleaved(rows):
    """The rows of a head whose two halves alternate: DeepSeek's rotation of neighbors."""
    return rows.reshape(2, len(rows) // 2, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def by_converter_rules(name, stored):
    """The tensors of llama.cpp from those of transformers, by its converter's rules."""
    arch = next(arch for prefix, arch in ARCHES.items() if name.startswith(prefix))
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(number, 32)
    found, experts = {}, {}
    for key, value in stored.items():
        block = f"blk.{key.split('.')[2]}" if ".layers." in key else ""
        if ".experts." in key and arch == "deepseek2":
            expert, part = int(key.split(".")[5]), key.split(".")[6].removesuffix("_proj")
            experts.setdefault(f"{block}.ffn_{part}_exps.weight", {})[expert] = value
        elif key.endswith("experts.gate_up_proj"):
            rows = value.swapaxes(1, 2)
            found |= {f"{block}.ffn_gate_exps.weight": rows[:, ::2], f"{block}.ffn_up_exps.weight": rows[:, 1::2]}
        elif key.endswith("experts.gate_up_proj_bias"):
            found |= {f"{block}.ffn_gate_exps.bias": value[:, ::2], f"{block}.ffn_up_exps.bias": value[:, 1::2]}
        elif key.endswith("experts.down_proj"):
            found[f"{block}.ffn_down_exps.weight"] = value.swapaxes(1, 2)
        elif key.endswith("experts.down_proj_bias"):
            found[f"{block}.ffn_down_exps.bias"] = value
        elif key.endswith("sinks"):
            found[f"{block}.attn_sinks.weight"] = value
        elif key.endswith("kv_b_proj.weight"):
            heads = value.reshape(HEADS, 64, 64)
            found[f"{block}.attn_k_b.weight"] = heads[:, :32].swapaxes(1, 2)
            found[f"{block}.attn_v_b.weight"] = heads[:, 32:]
        else:
            if name == "deepseek-v3-half" and key.endswith("q_b_proj.weight"):
                heads = value.reshape(HEADS, 48, -1)
                value = np.concatenate([np.concatenate([h[:32], halves_interleaved(h[32:])]) for h in heads])
            if name == "deepseek-v3-half" and "kv_a_proj_with_mqa" in key:
                value = np.concatenate([value[:64], halves_interleaved(value[64:])])
            value = value + 1 if arch.startswith("gemma") and key.endswith("norm.weight") else value
            given = key.replace("e_score_correction_bias", "e_score_correction.bias")
            found[table.get_name(given, try_suffixes=(".weight", ".bias"))] = value
    return found | {key: np.stack([each[i] for i in range(8)]) for key, each in experts.items()}


def opened(*paths):
    readers = [gguf.GGUFReader(path) for path in paths]
    found = {}
    for reader in readers:
        for tensor in reader.tensors:
            data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            shape = tuple(int(n) for n in reversed(tensor.shape))
            found[tensor.name] = (tensor.tensor_type, data.reshape(shape))
    return readers[0], found


def key(reader, name):
    return reader.fields[name].contents()


@table("name", [name for name in MODELS if name != "deepseek-v2-lite"])
def test_tensors_equal_those_of_the_model(tmp_path, ckpt, name):
    save(name, tmp_path / "in")
    expected = by_converter_rules(name, stored_tensors(tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, found = opened(tmp_path / "out" / "model.gguf")
    factors = {each: found.pop(f"rope_factors_{each}.weight", None) for each in ("long", "short")}
    assert (factors["long"] is not None) == (name in ("phi3-long", "phi3-short"))
    assert found.keys() == expected.keys()
    for tensor, (_, data) in found.items():
        assert np.array_equal(data, expected[tensor]), tensor
    assert key(reader, "general.architecture") == next(a for p, a in ARCHES.items() if name.startswith(p))


def test_keys_of_deepseek_state_the_latents_and_the_router(tmp_path, ckpt):
    save("deepseek-v3-groups", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    expected = {"attention.head_count_kv": 1, "attention.key_length": 80, "attention.value_length": 64}
    expected |= {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.q_lora_rank": 32}
    expected |= {"attention.kv_lora_rank": 64, "rope.dimension_count": 16, "leading_dense_block_count": 1}
    expected |= {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 2, "expert_gating_func": 2}
    expected |= {"expert_feed_forward_length": 32, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    expected |= {"expert_group_count": 4, "expert_group_used_count": 2}
    assert {name: key(reader, f"deepseek2.{name}") for name in expected} == expected


def test_sliding_layers_of_gemma3_have_their_base(tmp_path, ckpt):
    save("gemma3-scaled", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    expected = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.scaling.factor": 8.0}
    expected |= {"attention.sliding_window": 8, "rope.scaling.type": "linear"}
    assert {name: key(reader, f"gemma3.{name}") for name in expected} == expected


@table(
    ("name", "settings", "named"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16}, "attention_scale"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gemma2", {"tie_word_embeddings": False}, "tied_embeddings"),
        (
            "gemma3",
            {"num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
            "layer_types",
        ),
        ("phi3", {"head_dim": 32}, "head_dim"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias"),
        ("gpt-oss", {"tie_word_embeddings": True}, "tied_embeddings"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "layernorm_epsilon"),
        ("deepseek-v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek-v3", {"rope_parameters": YARN}, "rotary_scaling"),
        ("deepseek-v3", {"rope_parameters": {**BOTH_SCALES, "mscale": 1.0}}, "rotary_scaling"),
        (
            "deepseek-v2",
            GROUPS,
            "moe_router_num_groups",
        ),
    ],
)
def test_constants_that_llama_cpp_does_not_read_are_refused(tmp_path, ckpt, monkeypatch, name, settings, named):
    kind, usual = MODELS[name]
    monkeypatch.setitem(MODELS, "other", (kind, {**usual, **settings}))
    save("other", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5)
    assert f"does not compute {named} of this model" in result.stderr


def test_layers_of_prediction_are_left_out_and_counted(tmp_path, ckpt):
    from safetensors.torch import load_file, save_file

    save("deepseek-v3", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    last = f"model.layers.{LAYERS - 1}."
    copied = {
        name.replace(last, f"model.layers.{LAYERS}."): each.clone() for name, each in tensors.items() if last in name
    }
    base = f"model.layers.{LAYERS}."
    copied |= {f"{base}{each}.weight": torch.ones(64) for each in ("enorm", "hnorm", "shared_head.norm")}
    copied |= {f"{base}eh_proj.weight": torch.ones(64, 128)}
    copied |= {f"{base}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    copied |= {f"{base}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | copied, file, {"format": "pt"})
    expected = by_converter_rules("deepseek-v3", {name: each.numpy() for name, each in tensors.items()})
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    assert "prediction_tensors_left_out" in result.stdout + result.stderr
    _, found = opened(tmp_path / "out" / "model.gguf")
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("dtype", ["bf16", "q8_0", "mxfp4"])
def test_experts_of_gpt_oss_have_the_type_and_biases_do_not(tmp_path, ckpt, dtype):
    save("gpt-oss", tmp_path / "in")
    expected = by_converter_rules("gpt-oss", stored_tensors(tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--dtype", dtype)
    reader, found = opened(tmp_path / "out" / "model.gguf")
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    assert key(reader, "general.file_type") == {"bf16": 32, "q8_0": 7, "mxfp4": 38}[dtype]
    for tensor, (stored, data) in found.items():
        value = expected[tensor]
        is_plain = value.ndim < 2 or tensor.endswith(".bias") or "ffn_gate_inp" in tensor
        if is_plain or (dtype == "mxfp4" and "_exps" not in tensor):
            assert stored == gguf.GGMLQuantizationType.F32, tensor
            assert np.array_equal(data, value), tensor
            continue
        assert stored == kind, tensor
        rounded = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(value), kind), kind)
        assert np.array_equal(data, rounded.reshape(value.shape)), tensor


def test_mxfp4_blocks_equal_those_of_the_gguf_package():
    numbers = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    numbers *= np.float32(2.0) ** np.arange(-32, 32, dtype=np.float32)[:, None]
    numbers[5] = 0
    numbers[6, :32] = [(-1) ** i * v for i, v in enumerate([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 4)]
    numbers[7, :32] = np.arange(32) / 4  # midpoints
    expected = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(mxfp4_blocks(numbers).reshape(64, -1), expected)


def test_mxfp4_needs_experts_and_gguf(tmp_path, ckpt):
    save("phi3", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--dtype", "mxfp4", code=5)
    assert "MXFP4 is a type of experts" in result.stderr
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "native", "--dtype", "mxfp4", code=2)
    assert "--dtype mxfp4" in result.stderr


def test_a_size_limit_divides_the_model_into_files(tmp_path, ckpt):
    save("phi3", tmp_path / "in")
    expected = by_converter_rules("phi3", stored_tensors(tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--max-shard-size", "100KB")
    files = sorted((tmp_path / "out").glob("*.gguf"))
    count = len(files)
    assert count > 2
    assert [file.name for file in files] == [f"model-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    _, found = opened(*files)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(data, expected[tensor]) for tensor, (_, data) in found.items())
    for number, file in enumerate(files):
        reader = gguf.GGUFReader(file)
        assert (key(reader, "split.no"), key(reader, "split.count")) == (number, count)
        assert key(reader, "split.tensors.count") == len(expected)
        assert ("phi3.block_count" in reader.fields) == (number == 0)


def llama_cpp_logits(path, ids):
    library = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = library.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def check_logits(path, model):
    ids = np.random.default_rng(0).integers(0, 288, TOKENS).tolist()
    found = llama_cpp_logits(path, ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    # llama.cpp keeps keys and values in float16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * max(1, np.abs(expected).max()))
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_logits_of_transformers(tmp_path, ckpt, name):
    model = save(name, tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    check_logits(tmp_path / "out" / "model.gguf", model)


def test_llama_cpp_loads_several_files_by_the_first_one(tmp_path, ckpt):
    model = save("gpt-oss", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--max-shard-size", "100KB")
    check_logits(min((tmp_path / "out").glob("*.gguf")), model)


def test_llama_cpp_computes_with_mxfp4_experts(tmp_path, ckpt):
    model = save("gpt-oss", tmp_path / "in")
    # Numbers that MXFP4 has, so that only llama.cpp's arithmetic differs: it rounds the inputs to eight bits.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                rows = parameter.transpose(1, 2).contiguous().numpy()
                blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4)
                rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).reshape(rows.shape)
                parameter.copy_(torch.from_numpy(rounded).transpose(1, 2))
    model.save_pretrained(tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--dtype", "mxfp4")
    _, found = opened(tmp_path / "out" / "model.gguf")
    expected = by_converter_rules("gpt-oss", stored_tensors(tmp_path / "in"))
    assert all(np.array_equal(data, expected[tensor]) for tensor, (_, data) in found.items())
    ids = np.random.default_rng(0).integers(0, 288, TOKENS).tolist()
    logits = llama_cpp_logits(tmp_path / "out" / "model.gguf", ids)
    with torch.no_grad():
        expected_logits = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=5e-2 * np.abs(expected_logits).max())
