"""torchtitan's own models: they load what is written under its names, and what they save is read, with equal logits.

torchtitan is not among the dependencies: ``pip install --no-deps torchtitan spmd_types tyro docstring_parser triton``.
Its models run on the CPU with PyTorch's flex attention as it is, not compiled, and with experts in float32.
"""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
import transformers
from torch.distributed import checkpoint as dcp
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from dynmo_ckpt.cli import app

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.components import checkpoint as checkpointer
        from torchtitan.models import common, deepseek_v3, gpt_oss, llama3, qwen3
        from torchtitan.models.common import attention, moe
        from torchtitan.models.common import config_utils as utils
except ImportError:
    # Its tests are collected, and skipped with a reason.
    checkpointer = None

pytestmark = [
    pytest.mark.complete,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(checkpointer is None, reason="torchtitan 0.3 is not installed"),
]
VOCAB, DIM, POSITIONS, TOKENS = 96, 48, 64, 40
IDS = (torch.arange(TOKENS)[None] * 7 + 3) % VOCAB
SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
SIZES |= {"rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
INIT = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.normal_}
HEADS = {"dim": DIM, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16, "attn_backend": "flex"}
STANDARD = {"moe_comm_backend": "standard"}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
TITAN_YARN = {"scaling": "yarn", "theta": 5e3, "rope_factor": 4.0, "original_seq_len": 16}


def rope(kind="CosSinRoPE", dim=16, **changes):
    return getattr(common, kind).Config(dim=dim, max_seq_len=POSITIONS, **{"theta": 1e4, **changes})


def model_of(package, name, layers, **changes):
    return getattr(package.model, name).Config(
        vocab_size=VOCAB,
        dim=DIM,
        norm=common.RMSNorm.Config(normalized_shape=DIM),
        tok_embeddings=common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=INIT),
        lm_head=common.Linear.Config(in_features=DIM, out_features=VOCAB, param_init=INIT),
        layers=layers,
        **changes,
    )


def titan_llama(scaling):
    inner = utils.get_attention_config("flex")
    own = rope("ComplexRoPE", **scaling)
    layers = [
        llama3.model.Llama3TransformerBlock.Config(
            attention_norm=common.RMSNorm.Config(normalized_shape=DIM),
            ffn_norm=common.RMSNorm.Config(normalized_shape=DIM),
            attention=utils.make_gqa_config(
                **{name: HEADS[name] for name in ("dim", "n_heads", "n_kv_heads", "head_dim")},
                wqkv_param_init=INIT,
                wo_param_init=INIT,
                inner_attention=inner,
                rope=own,
            ),
            feed_forward=utils.make_ffn_config(dim=DIM, hidden_dim=64, w1_param_init=INIT, w2w3_param_init=INIT),
        )
        for _ in range(3)
    ]
    return model_of(llama3, "Llama3Model", layers, enable_weight_tying=True)


def qwen3_layers(count, **scaling):
    return qwen3._build_qwen3_layers(n_layers=count, hidden_dim=64, rope=rope(**scaling), **HEADS)


def qwen3_experts(count):
    experts = {"moe_hidden_dim": 32, "num_experts": 4, "top_k": 2, **STANDARD}
    return qwen3._build_qwen3_moe_layers(n_layers=count, rope=rope(), fuse_qkv=False, **HEADS, **experts)


def titan_deepseek(scaling, **changes):
    sizes = {"n_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    sizes |= {"v_head_dim": 10, "dense_hidden_dim": 64, "moe_hidden_dim": 24, "num_experts": 8}
    sizes |= {"num_shared_experts": 2, "router_top_k": 3, "router_route_scale": 2.5, "mscale": 1.0}
    sizes |= {"router_score_func": "sigmoid", "router_route_norm": True} | changes
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=3,
        n_dense_layers=1,
        dim=DIM,
        attn_backend="flex",
        non_blocking_capacity_factor=None,
        rope=rope("ComplexRoPE", 8, **scaling),
        **STANDARD,
        **sizes,
    )
    return model_of(deepseek_v3, "DeepSeekV3Model", layers)


def titan_gpt_oss():
    scaling = {"scaling": "yarn", "theta": 5e3, "rope_factor": 4.0, "original_seq_len": 16, "truncate": False}
    layers = gpt_oss._build_gptoss_layers(
        n_layers=3,
        dim=DIM,
        hidden_dim=32,
        num_experts=4,
        top_k=2,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        rope=rope(dim=64, **scaling),
        **STANDARD,
    )
    for layer in layers:
        if layer.attention.sliding_window_size is not None:
            layer.attention = dataclasses.replace(layer.attention, sliding_window_size=6)
    return model_of(gpt_oss, "GptOssModel", layers)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {"num_key_value_heads": 6, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 20}
LATENT |= {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 1e4}
OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 32}
OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "attention_bias": True}
CASES = {
    "llama": (
        "Llama",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        lambda: titan_llama({"scaling": "llama", "original_max_position_embeddings": 16}),
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
        lambda: model_of(qwen3, "Qwen3Model", qwen3_layers(3), enable_weight_tying=True),
    ),
    "qwen3, yarn": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.0}},
        lambda: model_of(qwen3, "Qwen3Model", qwen3_layers(3, **TITAN_YARN)),
    ),
    "qwen3 experts": (
        "Qwen3Moe",
        {"head_dim": 16, **EXPERTS, "mlp_only_layers": [0]},
        lambda: model_of(qwen3, "Qwen3Model", [*qwen3_layers(1), *qwen3_experts(2)]),
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        lambda: titan_deepseek(TITAN_YARN, router_num_expert_groups=4, router_num_limited_groups=2),
    ),
    "deepseek v3, queries without a latent": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        lambda: titan_deepseek({}, q_lora_rank=0),
    ),
    "deepseek v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        lambda: titan_deepseek({}, router_score_func="softmax", router_route_norm=False),
    ),
    "gpt-oss": ("GptOss", {**OSS, "rope_parameters": {**YARN, "truncate": False}}, titan_gpt_oss),
}


@pytest.fixture(autouse=True)
def float32_on_the_cpu(monkeypatch):
    """Compute attention without a compiler, and experts in float32: torchtitan casts them to bfloat16."""
    monkeypatch.setattr(attention.FlexAttention, "compiled_flex_attn", staticmethod(flex_attention), raising=False)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)

    def matmuls(_self, *, A, B_t, offs):
        ends = [0, *offs.tolist()]
        return torch.cat([A[ends[i] : ends[i + 1]] @ B_t[i] for i in range(len(B_t))])

    monkeypatch.setattr(moe.GroupedExperts, "_grouped_mm", matmuls)


def randomize(tensors):
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors:
        if tensor.is_floating_point() and "inv_freq" not in name and "rope" not in name:
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(1 + 0.2 * drawn if "norm" in name else 0.15 * drawn)


def theirs(kind, changes, folder):
    """A random model of transformers, saved in ``folder``, and its logits ``[tokens, vocabulary]``."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    randomize(model.named_parameters())
    randomize([pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")])
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits[0]


def titan(build):
    """A model of torchtitan, with the epsilon that transformers' models have."""
    model = build().build().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 1e-6
    return model


def logits_of(model):
    positions = torch.arange(TOKENS)[None]
    with torch.no_grad():
        return model(IDS, positions=positions, attention_masks=model.get_attention_masks(positions))[0]


def convert(*args):
    result = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert not result.exit_code, result.output + result.stderr


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_loads_what_is_written_with_equal_logits(tmp_path, case):
    kind, changes, build = CASES[case]
    expected = theirs(kind, changes, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "titan", "--to", "titan")
    model = titan(build)
    # As torchtitan's trainer loads ``initial_load_path``.
    wrapper = checkpointer.ModelWrapper(model)
    state = wrapper.state_dict()
    for tensor in state.values():
        tensor.fill_(float("nan"))
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    wrapper.load_state_dict(state)
    assert (logits_of(model) - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(max=1)


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_saves_what_is_read_with_equal_logits(tmp_path, case):
    kind, changes, build = CASES[case]
    theirs(kind, changes, tmp_path / "like")
    model = titan(build)
    randomize(model.named_parameters())
    if kind == "DeepseekV3":
        randomize([pair for pair in model.named_buffers() if pair[0].endswith("expert_bias_E")])
    expected = logits_of(model)
    dcp.save(checkpointer.ModelWrapper(model).state_dict(), checkpoint_id=tmp_path / "titan", no_dist=True)
    convert(tmp_path / "titan", tmp_path / "hf", "--to", "hf", "--config", tmp_path / "like")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found = loaded(IDS).logits[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(max=1)
    assert json.loads((tmp_path / "hf" / "config.json").read_bytes())["vocab_size"] == VOCAB
