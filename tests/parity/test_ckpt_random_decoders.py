"""Random configurations of decoders, within and outside what is supported: equal logits or refused, never wrong.

The logits check of ``convert`` is off: the configuration alone must state what a model computes. The variable
``DYNMO_RANDOM_DECODERS`` is the number of configurations of each family: 12 without it, 500 before a release.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dynmo_ckpt.converters.huggingface import read_hf
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.config_keys import key_table
from dynmo_ckpt.huggingface.decoders import DECODERS
from dynmo_ckpt.huggingface.deepseek import KINDS as DEEPSEEKS
from dynmo_ckpt.huggingface.models import hf_config, hf_model
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array, model_logits
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.layer_list import EXPERT_BIAS
from tests.parity.item_stream import build_all, parameters, run

pytestmark = pytest.mark.complete

COUNT = int(os.environ.get("DYNMO_RANDOM_DECODERS", "12"))
TOKENS = 40
IDS = (torch.arange(TOKENS)[None] * 7 + 3) % 61
LAYERS = 3
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}
FIXED = {
    **dict.fromkeys(DEEPSEEKS, DEEPSEEK),
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, **MOE},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "qwen3": {"head_dim": 8},
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
KINDS = ("gpt2", *DECODERS, *DEEPSEEKS)
# Sizes of all tensors; other keys of a configuration are drawn.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "rope_parameters")
SIZES += ("n_embd", "n_layer")
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = (
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 8.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 0.7},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.5},
    {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
)
# Values that a key may get, some of which no model of DynMo computes.
VALUES = {
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu", "silu", None),
    "rms_norm_eps": (1e-6, 1e-3, 0.1),
    "tie_word_embeddings": (True, False),
    "rope_theta": (1e4, 500.0, 1e6),
    "rope_local_base_freq": (100.0, 1e4),
    "rope_scaling": SCALINGS,
    "partial_rotary_factor": (1.0, 0.5, 0.25),
    "original_max_position_embeddings": (16, 64),
    "max_position_embeddings": (64, 128, 40),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "head_dim": (8, 16, None),
    "num_key_value_heads": (1, 2, 4, None),
    "num_attention_heads": (2, 4),
    "sliding_window": (None, 3, 8, 100),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 3),
    "layer_types": (
        None,
        [FULL] * LAYERS,
        [SLIDING] * LAYERS,
        [SLIDING, FULL, SLIDING],
        [FULL, FULL, SLIDING],
        [FULL, SLIDING],
        ["chunked_attention"] * LAYERS,
    ),
    "sliding_window_pattern": (1, 2, 3),
    "_sliding_window_pattern": (2,),
    "query_pre_attn_scalar": (8, 16, 100),
    "attn_logit_softcapping": (None, 0.5, 50.0),
    "final_logit_softcapping": (None, 0.5, 30.0),
    "use_bidirectional_attention": (None, False, True),
    "num_experts_per_tok": (1, 2, 4),
    "norm_topk_prob": (True, False),
    "mlp_only_layers": ([], [1]),
    "decoder_sparse_step": (1, 2),
    "router_jitter_noise": (0.1,),
    "router_aux_loss_coef": (0.0, 0.1),
    "swiglu_alpha": (1.702, 1.0),
    "swiglu_limit": (7.0, 0.2),
    "attention_dropout": (0.0, 0.3),
    "initializer_range": (0.1,),
    "pretraining_tp": (1, 2),
    "embedding_multiplier": (2.0,),
    "clip_qkv": (0.5,),
    "is_decoder": (True,),
    "chunk_size_feed_forward": (0, 8),
    "q_lora_rank": (None, 12, 20),
    "kv_lora_rank": (8, 16),
    "qk_nope_head_dim": (8, 12),
    "qk_rope_head_dim": (4, 8, 6),
    "v_head_dim": (8, 10, 28),
    "qk_head_dim": (20, 7),
    "n_routed_experts": (4, 8),
    "n_shared_experts": (1, 2, 0, None),
    "moe_intermediate_size": (16, 24),
    "first_k_dense_replace": (0, 1, 2, 3, 5),
    "moe_layer_freq": (1, 2),
    "routed_scaling_factor": (1.0, 2.5, 16.0),
    "n_group": (1, 2, 4, None),
    "topk_group": (1, 2, 4),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "rope_interleave": (True, False),
    "num_nextn_predict_layers": (0, 1),
    "aux_loss_alpha": (0.0, 0.1),
    "seq_aux": (True, False),
    "ep_size": (1, 2),
    "output_router_logits": (True, False),
    "activation_function": ("gelu_new", "gelu", "relu", "gelu_fast", "gelu_pytorch_tanh", "silu", "quick_gelu"),
    "layer_norm_epsilon": (1e-5, 1e-3, 0.1),
    "n_inner": (None, 40, 128),
    "n_head": (2, 4, 8),
    "n_positions": (64, 40),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
    "reorder_and_upcast_attn": (False, True),
    "add_cross_attention": (True,),
    "resid_pdrop": (0.0, 0.3),
}
# Values of other keys without which a key changes nothing, or is refused.
COMPANIONS = {
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 3},
    "layer_types": {"use_sliding_window": True, "sliding_window": 3},
    "use_sliding_window": {"sliding_window": 3, "max_window_layers": 1},
    "rope_local_base_freq": {"sliding_window": 3},
    "topk_method": {"n_group": 4, "topk_group": 2},
    "n_group": {"topk_method": "group_limited_greedy", "topk_group": 1},
    "topk_group": {"topk_method": "group_limited_greedy", "n_group": 4},
    "mlp_bias": {"first_k_dense_replace": LAYERS},
    "norm_topk_prob": {"num_experts_per_tok": 1},
    "original_max_position_embeddings": {"rope_scaling": SCALINGS[6]},
}
# Keys that a file of DeepSeek has, and transformers' class has not.
FILE_KEYS = ("topk_method", "scoring_func", "moe_layer_freq", "num_nextn_predict_layers", "aux_loss_alpha", "ep_size")


def drawn(kind: str, number: int) -> dict:
    """A random configuration of a family, as a file may have it; the same for the same number."""
    source = random.Random(f"{kind} {number}")
    config = {**(GPT2 if kind == "gpt2" else {**BASE, **FIXED.get(kind, {})}), "model_type": kind}
    own = set(CONFIG_MAPPING[kind]().to_dict()) | set(key_table()["model_types"][kind]["mapped"])
    own |= set(FILE_KEYS) if kind in DEEPSEEKS else set()
    likely = [key for key in VALUES if key in own or key.startswith(("rope_", "sliding_", "layer_"))]
    # Every key in turn, so that none is left to chance; then others.
    keys = [likely[number % len(likely)]] if number else []
    more = range(source.choice((0, 1, 2, 3, 4, 6)))
    keys += [source.choice(likely if source.random() < 0.9 else list(VALUES)) for _ in more]
    for key in keys:
        wider = {**config, key: source.choice(VALUES[key])}
        if source.random() < 0.5:
            wider |= {name: value for name, value in COMPANIONS.get(key, {}).items() if name in own}
        # Of three, two are within what is supported: most keys together are not.
        if number % 3 == 0 or is_read(wider):
            config = wider
    if kind == "gemma3_text" and source.random() < 0.4:
        full, local = ({"rope_theta": source.choice((100.0, 1e6)), **(source.choice(SCALINGS[:5]) or {})} for _ in "ab")
        config["rope_parameters"] = {FULL: full, SLIDING: local}
    elif source.random() < 0.2:
        config["rope_parameters"] = {"rope_theta": 777.0, **(source.choice(SCALINGS) or {"rope_type": "default"})}
    return config


def is_read(config: dict) -> bool:
    """Whether the configuration alone is not refused."""
    try:
        return bool(hf_model(config, 1))
    except (CorruptError, UnsupportedError):
        return False


def theirs(config: dict):
    """The model of transformers with random weights; None where transformers has none of this configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(std=0.3)
                    if (
                        ("norm" in name or ".ln_" in name)
                        and name.endswith("weight")
                        and not config["model_type"].startswith("gemma")
                    ):
                        parameter.add_(1.0)
                for name, buffer in model.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.normal_(std=0.3)
                logits = model(IDS).logits[0]
        except Exception:  # noqa: BLE001 - whatever transformers raises, it has no such model
            return None
    return (model, logits.numpy()) if bool(logits.isfinite().all()) else None


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return float(np.abs(found - expected).max()) <= 2e-4 * max(1.0, float(np.abs(expected).max()))


def of_trainer(checkpoint) -> np.ndarray:
    """The logits of dynmo-train's own model, of the manifest and the tensors."""
    model = checkpoint.manifest["model"]
    is_gpt = model["family"] == "gpt"
    family = Gpt(GptShape.from_manifest(model)) if is_gpt else Llama(LlamaShape.from_manifest(model))
    modules = build_all(family)
    with torch.no_grad():
        for name, value in parameters(modules).items():
            rows = torch.from_numpy(load_array(checkpoint, name))
            value.zero_()
            value[tuple(slice(0, size) for size in rows.shape)] = rows
        for item, module in modules.items():
            module.eval()
            for name, bias in module.named_buffers(prefix=item):
                if name.endswith(EXPERT_BIAS):
                    bias.copy_(torch.from_numpy(load_array(checkpoint, name)))
        values = run(family, modules, {"ids": IDS, "labels": IDS})
        return modules["head"].logits(values["before.hidden"])[0].numpy()


def add_predictions(folder, config: dict) -> int:
    """Append layers of multi-token prediction to the file of some DeepSeek, as published ones have; their number."""
    if config["model_type"] not in DEEPSEEKS:
        return 0
    count = random.Random(json.dumps(config)).choice((0, 1, 2))
    path, last = folder / "model.safetensors", f"model.layers.{LAYERS - 1}."
    tensors = load_file(path)
    table, wide = tensors["model.embed_tokens.weight"], torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    for number in range(count):
        layer = f"model.layers.{LAYERS + number}."
        tensors |= {f"{layer}{name[len(last) :]}": x.clone() for name, x in tensors.items() if name.startswith(last)}
        tensors |= {f"{layer}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {f"{layer}eh_proj.weight": wide + number, f"{layer}embed_tokens.weight": table.clone()}
        tensors[f"{layer}shared_head.head.weight"] = tensors.get("lm_head.weight", table).clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return count


def outcome(kind: str, number: int, folder) -> str:
    """What becomes of a configuration; ``wrong`` and how, where a conversion computes something else."""
    config = drawn(kind, number)
    built = theirs(config)
    if built is None:
        return "not in transformers"
    model, expected = built
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    predictions = add_predictions(folder, config)
    try:
        checkpoint = read_hf(folder, ReadOptions())[0]
    except (CorruptError, UnsupportedError):
        return "refused"
    stated = json.dumps(config)
    if checkpoint.manifest["model"].get("mtp_num_layers", 0) != predictions:
        return f"wrong, without its {predictions} layers of further tokens: {stated}"
    tokens = np.concatenate([IDS.numpy()] * 2)
    if not close(model_logits(checkpoint, tokens)[0], expected):
        return f"wrong, by the reference model: {stated}"
    if not close(of_trainer(checkpoint), expected):
        return f"wrong, by the trainer: {stated}"
    try:
        written = hf_config(checkpoint.manifest["model"], "float32", None, kind)
    except UnsupportedError:
        return "converted one way"
    if written["model_type"] == kind:
        again = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind].from_dict({**written, "pad_token_id": None}), attn_implementation="eager"
        ).eval()
        again.load_state_dict(model.state_dict())
        with torch.no_grad():
            if not close(again(IDS).logits[0].numpy(), expected):
                return f"wrong, written back as {json.dumps(written)}: {stated}"
    return "converted"


@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations_have_every_key_with_several_values(kind):
    """A key that is never drawn, or only where the configuration is refused, would hide a map without it."""
    mapped = key_table()["model_types"][kind]["mapped"]
    found = {key: {json.dumps(value)} for key, value in mapped.items() if key not in SIZES}
    for number in range(500):
        config = drawn(kind, number)
        if is_read(config):
            for key in found.keys() & config.keys():
                found[key].add(json.dumps(config[key]))
    # Outside Phi-3, transformers ignores a share of the rotation, and a model with one is refused.
    fixed = set() if kind == "phi3" else {"partial_rotary_factor"}
    assert [key for key, values in found.items() if len(values) < 2 and key not in fixed] == []


@pytest.mark.parametrize("kind", KINDS)
def test_random_decoders_convert_to_equal_logits_or_are_refused(tmp_path, kind):
    transformers.logging.set_verbosity_error()
    found: Counter[str] = Counter()
    for number in range(COUNT):
        folder = tmp_path / str(number)
        folder.mkdir()
        found[outcome(kind, number, folder)] += 1
        for path in folder.iterdir():
            path.unlink()
    assert not [each for each in found if each.startswith("wrong")], found
    assert found["converted"] >= COUNT / 10, found
