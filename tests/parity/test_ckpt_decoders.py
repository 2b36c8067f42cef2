"""Random decoders of transformers, converted to a native checkpoint and back: equal logits, weights and settings."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.huggingface.models import hf_config
from dynmo_train.models.layer_list import split_dim
from dynmo_train.models.registry import family_of_manifest
from tests.parity.item_stream import build_all, run

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
LOCAL = {"sliding_window": 6}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# The experts of a DeepSeek-V3 with another attention.
ROUTED = {name: value for name, value in DEEPSEEK.items() if not name.endswith(("_rank", "_dim", "_value_heads"))}
ROUTED |= {"norm_topk_prob": True}
YARN_IN_FULL = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
NEWER = {
    "olmo3": ("Olmo3", {**LOCAL, "num_hidden_layers": 4, "rope_parameters": YARN_IN_FULL}),
    "exaone 4": ("Exaone4", {**LOCAL, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3", {**LOCAL, "num_hidden_layers": 4, "use_sliding_window": True}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "ministral": ("Ministral", {**LOCAL, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "internlm3": ("InternLM3", {"head_dim": 16}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "qwen2 experts": (
        "Qwen2Moe",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "glm-4.5": ("Glm4Moe", {**ROUTED, "n_group": 4, "topk_group": 2, "attention_bias": True, "use_qk_norm": True}),
    "glm-4.7 flash": ("Glm4MoeLite", DEEPSEEK),
    "dots1": ("Dots1", {**ROUTED, **LOCAL, "max_window_layers": 1}),
    "minimax-m2": (
        "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "starcoder2": ("Starcoder2", LOCAL),
    "arcee": ("Arcee", {}),
    "jais2": ("Jais2", {}),
}
CASES = {
    **NEWER,
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with biases of attention": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases, yarn": ("Qwen3", {"attention_bias": True, "rope_parameters": YARN}),
    "qwen3 experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3 experts, not normalized": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3 experts, dense blocks": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "qwen3 experts in every second block": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2},
    ),
    "deepseek v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek v2, groups": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek v2, dense with biases": (
        "DeepseekV2",
        {**DEEPSEEK, "first_k_dense_replace": 2, "mlp_bias": True, "attention_bias": True},
    ),
    "deepseek v3": ("DeepseekV3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek v3, yarn, halves": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            **LOCAL,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma2 without caps": (
        "Gemma2",
        {
            **LOCAL,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "Gemma3",
        {**LOCAL, "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": TWO_BASES},
    ),
    "gemma3 with a final cap": (
        "Gemma3",
        {**LOCAL, "head_dim": 16, "final_logit_softcapping": 1.0, "layer_types": ["sliding_attention"] * 2},
    ),
    "gemma3 without windows": ("Gemma3", {"head_dim": 16, "layer_types": ["full_attention"] * 2}),
    "gpt-oss": ("GptOss", {**LOCAL, **OSS}),
    "gpt-oss, other values": (
        "GptOss",
        {
            **OSS,
            "attention_bias": False,
            "swiglu_alpha": 1.1,
            "swiglu_limit": 0.3,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3 of a share": ("Phi3", {"sliding_window": 6, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "phi3 with longrope": (
        "Phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": {**DEFAULT, **LONGROPE}},
    ),
    "phi3 with longrope, short": (
        "Phi3",
        {"original_max_position_embeddings": 50, "rope_parameters": {**DEFAULT, **LONGROPE}},
    ),
    "qwen2 with late windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3 with windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 experts with windows": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "olmo2": ("Olmo2", {}),
    "olmo2 with biases": ("Olmo2", {"attention_bias": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}


# Variants of other rows, which test_ckpt_random_decoders.py draws, too.
VARIANTS = (
    "llama with biases of attention",
    "qwen3 experts, not normalized",
    "qwen3 experts with windows",
    "deepseek v2, groups",
    "deepseek v2, dense with biases",
    "gemma2 without caps",
    "gemma3 with a final cap",
    "gemma3 without windows",
    "gpt-oss, other values",
    "phi3 with longrope, short",
    "olmo2 with biases",
    "linear",
    "dynamic",
)
BY_LEVEL = [pytest.param(name, marks=pytest.mark.complete if name in VARIANTS else ()) for name in CASES]


def convert(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["convert", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def saved(folder, name: str):
    """A random model of a case, saved as users have it; norms and biases are not ones and zeros."""
    kind, own = CASES[name]
    torch.manual_seed(3)
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, "attn_implementation": "eager"})
    # InternLM3 has no class of its own.
    kind = "Llama" if kind == "InternLM3" else kind
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else 0.1))
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.add_(torch.randn(8) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", BY_LEVEL)
def test_decoder_to_native_and_back_computes_the_same(tmp_path, name):
    model = saved(tmp_path / "theirs", name)
    output = convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    assert "logits of input and output differ by at most" in output
    convert(str(tmp_path / "native"), str(tmp_path / "back"), "--to", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert type(again) is type(model)
    ids = torch.arange(40)[None] % 96
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    if name in NEWER:
        torch.testing.assert_close(trainer_logits(tmp_path / "native", ids), model(ids).logits, rtol=0, atol=1e-4)


SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 48, "patch_size": 4, "spatial_merge_size": 1}
# Models of images and text: the configurations of both parts.
WITH_IMAGES = {
    "Gemma3": ({"head_dim": 16, **LOCAL}, VISION),
    "Mistral3": ({"model_type": "mistral", "head_dim": 16}, VISION),
    "Llava": ({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    "Qwen2VL": ({"rope_parameters": SECTIONS}, QWEN_VISION),
    "Qwen2_5_VL": ({"rope_parameters": SECTIONS}, {**QWEN_VISION, "fullatt_block_indexes": [0]}),
    "Qwen3VL": ({"rope_parameters": SECTIONS}, {**QWEN_VISION, "deepstack_visual_indexes": [0]}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Gemma3" else pytest.mark.complete) for name in WITH_IMAGES]
)
def test_text_part_of_a_model_with_images_computes_the_same_on_text(tmp_path, name):
    text, vision = WITH_IMAGES[name]
    config = getattr(transformers, f"{name}Config")(text_config={**SIZES, **text}, vision_config=vision)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(tmp_path / "theirs")
    output = convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    assert "tensors of images are left out" in output
    convert(str(tmp_path / "native"), str(tmp_path / "back"), "--to", "hf")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(40)[None] % 90
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    own = {value.numpy().tobytes() for value in stored.values()}
    assert all(value.numpy().tobytes() in own for value in load_file(tmp_path / "back" / "model.safetensors").values())


def trainer_logits(native, ids: torch.Tensor) -> torch.Tensor:
    """The logits that the trainer's model computes from a native checkpoint of one rank."""
    manifest = json.loads((native / "manifest.json").read_text())
    stored = load_file(native / "model-p000-t00.safetensors")
    family = family_of_manifest(manifest["model"])
    modules = build_all(family)
    for item, module in modules.items():
        for name, value in (*module.eval().named_parameters(), *module.named_buffers()):
            source = stored[manifest["ties"].get(f"{item}.{name}", f"{item}.{name}")]
            value.data[: len(source)] = source
    values = run(family, modules, {"ids": ids, "labels": ids})
    return modules["head"].logits(values["before.hidden"])[..., : manifest["model"]["vocab_size"]]


def test_tensor_parallel_parts_of_a_gpt_oss_are_the_trainers(tmp_path):
    model = saved(tmp_path / "theirs", "gpt-oss")
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native", "--tp", "2")
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    for name, entry in manifest["tensors"].items():
        assert entry["split_dim"] == split_dim(name), name
    convert(str(tmp_path / "native"), str(tmp_path / "back"), "--to", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_info_names_what_a_model_has_that_others_of_its_family_have_not(tmp_path):
    saved(tmp_path / "theirs", "qwen3")
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    assert "differs by  qk_norm head" in CliRunner().invoke(app, ["info", str(tmp_path / "native")]).output


def test_info_counts_the_layers_of_each_type(tmp_path):
    saved(tmp_path / "theirs", "gemma2")
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    output = " ".join(CliRunner().invoke(app, ["info", str(tmp_path / "native")]).output.split())
    assert "layer_types 1 full_attention and 1 sliding_attention" in output
    assert "sliding_window 6" in output


@pytest.mark.complete
@pytest.mark.parametrize("name", CASES)
def test_configuration_written_without_its_source_computes_the_same(tmp_path, name):
    """The configuration is then computed from the manifest alone."""
    model = saved(tmp_path / "theirs", name)
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    manifest = tmp_path / "native" / "manifest.json"
    stated = json.loads(manifest.read_text())["model"]
    config = hf_config(stated, "float32", 2, model.config.model_type)
    stated = {key: value for key, value in config.items() if key != "architectures"}
    kind = type(model.config)(**stated, attn_implementation="eager")
    other = type(model)(kind).eval()
    other.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None] % 96
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)


def with_prediction_layers(folder, model, depths: int) -> dict[str, torch.Tensor]:
    """Add layers of multi-token prediction to the file of a saved DeepSeek-V3, as its publisher has them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    numbers = torch.Generator().manual_seed(5)
    for k in range(depths):
        layer = f"model.layers.{model.config.num_hidden_layers + k}."
        block = {name.replace(last, layer): value for name, value in tensors.items() if name.startswith(last)}
        block |= {f"{layer}{name}.weight": torch.ones(48) for name in ("enorm", "hnorm", "shared_head.norm")}
        block[f"{layer}eh_proj.weight"] = torch.ones(48, 96)
        block = {name: value + torch.randn(value.shape, generator=numbers) for name, value in block.items()}
        block[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        block[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors |= block
    save_file(tensors, path, {"format": "pt"})
    return tensors


@pytest.mark.parametrize("depths", [1, 2])
def test_layers_of_multi_token_prediction_are_carried(tmp_path, depths):
    """Loading and saving with transformers drops them without a message."""
    model = saved(tmp_path / "theirs", "deepseek v3")
    tensors = with_prediction_layers(tmp_path / "theirs", model, depths)
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    assert manifest["model"]["mtp_num_layers"] == depths
    assert manifest["ties"]["mtp.0.final_norm.weight"] == "head.norm.weight"
    convert(str(tmp_path / "native"), str(tmp_path / "back"), "--to", "hf")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == depths


def test_copy_of_a_table_that_differs_is_refused(tmp_path):
    model = saved(tmp_path / "theirs", "deepseek v3")
    tensors = with_prediction_layers(tmp_path / "theirs", model, 1)
    tensors["model.layers.2.embed_tokens.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native"])
    assert result.exit_code != 0
    assert "model.layers.2.embed_tokens.weight and model.embed_tokens.weight differ" in str(result.exception)


def test_biases_of_experts_stay_float32_in_an_export_in_bfloat16(tmp_path):
    saved(tmp_path / "theirs", "deepseek v3")
    convert(str(tmp_path / "theirs"), str(tmp_path / "native"), "--to", "native")
    convert(str(tmp_path / "native"), str(tmp_path / "half"), "--to", "hf", "--dtype", "bf16", "--no-check-logits")
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
