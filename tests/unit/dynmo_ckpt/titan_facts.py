"""Facts about the tensors of torchtitan 0.3: the name and the elements of each, from a file of transformers.

They were read from torchtitan's model code (``models/*/model.py``, ``models/common/moe.py``) and its adapters
(``state_dict_adapter.py``). A Llama's queries and keys pair neighbors in a rotation; those of a Qwen3 and a GPT-OSS
pair elements half a head apart, as transformers' do. DeepSeek's pair neighbors in both.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16}
SIZES |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {"num_key_value_heads": 6, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 20}
LATENT |= {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8}
LATENT |= {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8}
# Class of transformers, its configuration, number of the first blocks that are dense.
MODELS = {
    "llama": ("Llama", {}, 3),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, 3),
    "qwen3 experts": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}, 1),
    "deepseek": ("DeepseekV3", LATENT, 1),
    "deepseek, queries without a latent": ("DeepseekV3", {**LATENT, "q_lora_rank": None}, 1),
    "deepseek v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}, 1),
    "gpt-oss": ("GptOss", OSS, 0),
}


def save_theirs(name, folder, dtype=None, **changes):
    """Save a random model of transformers; returns the tensors of its file."""
    kind, own, _ = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config).to(dtype or torch.float32)
    for label, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in label:
            tensor.data.copy_(0.2 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return safetensors.load_file(folder / "model.safetensors")


def neighbors(rows, heads):
    """Rows of heads whose rotation pairs neighbors, from those whose pairs are half a head apart."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def titan_state(name, theirs):
    """The state dict of torchtitan's model, from the tensors of a file of transformers."""
    kind, _, dense = MODELS[name]
    state = {"tok_embeddings.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    # Both names of a tied weight are in torchtitan's state dict.
    state["lm_head.weight"] = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    for i in range(SIZES["num_hidden_layers"]):
        source, to = f"model.layers.{i}", f"layers.{i}"
        state[f"{to}.attention_norm.weight"] = theirs[f"{source}.input_layernorm.weight"]
        state[f"{to}.ffn_norm.weight"] = theirs[f"{source}.post_attention_layernorm.weight"]
        part = {
            key.removeprefix(f"{source}.self_attn."): each for key, each in theirs.items() if key.startswith(source)
        }
        state |= {f"{to}.attention.{key}": each for key, each in attention(kind, part).items()}
        if i < dense:
            named = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
            state |= {f"{to}.feed_forward.{key}.weight": theirs[f"{source}.mlp.{each}.weight"] for key, each in named}
        else:
            part = {key.removeprefix(f"{source}.mlp."): each for key, each in theirs.items() if key.startswith(source)}
            state |= {f"{to}.moe.{key}": each for key, each in experts(kind, part).items()}
    return state


def attention(kind, part):
    state = {"wo.weight": part["o_proj.weight"]}
    if kind.startswith("Deepseek"):
        named = {"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wq": "q_proj"}
        named |= {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"}
        return state | {
            f"{key}.weight": part[f"{each}.weight"] for key, each in named.items() if f"{each}.weight" in part
        }
    for key, heads in (("q", 6), ("k", 2), ("v", 2)):
        rows = part[f"{key}_proj.weight"]
        is_rotated = kind == "Llama" and key != "v"
        state[f"qkv_linear.w{key}.weight"] = neighbors(rows, heads) if is_rotated else rows
    if kind.startswith("Qwen3"):
        state |= {f"{key}_norm.weight": part[f"{key}_norm.weight"] for key in "qk"}
    if kind == "GptOss":
        state |= {f"qkv_linear.w{key}.bias": part[f"{key}_proj.bias"] for key in "qkv"}
        state |= {"wo.bias": part["o_proj.bias"], "sinks": part["sinks"]}
    return state


def experts(kind, part):
    """The tensors of the experts: stacked, ``[experts, outputs, inputs]``."""
    inner = "routed_experts.inner_experts"
    count = 4
    if kind == "GptOss":
        # transformers has [experts, inputs, outputs]; gate and up alternate in both.
        return {
            "router.gate.weight": part["router.weight"],
            "router.gate.bias": part["router.bias"],
            f"{inner}.mlp1_weight_EGD": part["experts.gate_up_proj"].transpose(1, 2),
            f"{inner}.mlp1_bias_EG": part["experts.gate_up_proj_bias"],
            f"{inner}.mlp2_weight_EDF": part["experts.down_proj"].transpose(1, 2),
            f"{inner}.mlp2_bias_ED": part["experts.down_proj_bias"],
            "expert_bias_E": torch.zeros(count),
        }
    state = {"router.gate.weight": part["gate.weight"]}
    for key, each in (("w1_EFD", "gate_proj"), ("w2_EDF", "down_proj"), ("w3_EFD", "up_proj")):
        state[f"{inner}.{key}"] = torch.stack([part[f"experts.{j}.{each}.weight"] for j in range(count)])
    state["expert_bias_E"] = part.get("gate.e_score_correction_bias", torch.zeros(count)).float()
    if kind.startswith("Deepseek"):
        named = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
        state |= {f"shared_experts.{key}.weight": part[f"shared_experts.{each}.weight"] for key, each in named}
    return state


def older(state):
    """The state dict under the names of torchtitan 0.2."""
    shorter = (
        ("attention.qkv_linear.", "attention."),
        ("lm_head.", "output."),
        ("routed_experts.inner_experts.", "experts."),
    )
    found = {}
    for name, tensor in state.items():
        for new, old in shorter:
            name = name.replace(new, old)
        for suffix in ("_EFD", "_EDF", "_EGD", "_EG", "_ED", "_E"):
            name = name.removesuffix(suffix)
        found[name] = tensor
    return found


def same_elements(found, expected):
    return found.shape == expected.shape and np.array_equal(found.float().numpy(), expected.float().numpy())


TRAINED = {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
STEP = 7


def moments_of(theirs, seed):
    """Random numbers, not negative, under the names of transformers."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in theirs.items()}


def parameters_of(name, state):
    """The parameters of a state dict: without buffers, and a tied head once."""
    is_tied = MODELS[name][1].get("tie_word_embeddings")
    return {k: v for k, v in state.items() if "expert_bias" not in k and not (is_tied and k == "lm_head.weight")}


def fused(state):
    """A state dict with queries, keys and values in one parameter: of each group its heads, its key and its value."""
    found = dict(state)
    for name in [key for key in state if ".qkv_linear.wq." in key]:
        parts = [found.pop(name.replace(".wq.", f".{part}.")) for part in ("wq", "wk", "wv")]
        groups, tail = SIZES["num_key_value_heads"], parts[0].shape[1:]
        joined = torch.cat([part.reshape(groups, -1, *tail) for part in parts], 1)
        found[name.replace(".wq.", ".wqkv.")] = joined.reshape(-1, *tail)
    return found


def module_of(tensors):
    """A module with parameters of these names, which computes nothing."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        inner = root
        for each in path:
            if not hasattr(inner, each):
                inner.add_module(each, torch.nn.Module())
            inner = getattr(inner, each)
        inner.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return root


def trained(weights, first, second, **changes):
    """A module, and torch's AdamW after ``STEP`` steps with these moments by name."""
    model = module_of(weights)
    optimizer = torch.optim.AdamW(model.parameters(), **{**TRAINED, "foreach": False, **changes})
    for name, parameter in model.named_parameters():
        moments = {"exp_avg": first[name].clone(), "exp_avg_sq": second[name].clone()}
        optimizer.state[parameter] = {"step": torch.tensor(float(STEP)), **moments}
    return model, optimizer


def flat_state(model, optimizer):
    """The optimizer state by name, as torch flattens it; torchtitan's own function gives the same names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)
