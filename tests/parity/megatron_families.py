"""Saves and loads decoders with Megatron-core's own checkpointing on CPU; run as a program.

    python megatron_families.py save|load FAMILY NAMES DIRECTORY

``NAMES`` is ``local`` or ``te``: modules of Transformer Engine fuse norms into linear layers, and their checkpoints
have other names; ``single`` is ``local`` with a tensor for each expert, gate and up projection.
``DIRECTORY.logits.npy`` gets the logits of ``TOKENS``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

SIZES = {"layers": 3, "width": 32, "heads": 4, "inner": 48, "vocabulary": 64, "tokens": 16, "groups": 2}
VOCABULARY = 61
TOKENS = [[3, 17, 60, 8, 1, 42, 42, 5, 9, 31, 2, 58]]
STEP = 4
GROUPED: Mapping[str, Any] = {"num_query_groups": SIZES["groups"], "kv_channels": 8}
EXPERTS: Mapping[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
LATENT: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "rope_type": "rope",
}
DEEPSEEK: Mapping[str, Any] = {
    **LATENT,
    **EXPERTS,
    "num_moe_experts": 8,
    "moe_layer_freq": [0, 1, 1],
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 4,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {**GROUPED, "qk_layernorm": True, "kv_channels": 10},
    "mixtral": {**GROUPED, **EXPERTS, "moe_ffn_hidden_size": SIZES["inner"]},
    "qwen3-moe": {
        **GROUPED,
        **EXPERTS,
        "qk_layernorm": True,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": [1, 0, 1],
        "moe_router_pre_softmax": True,
    },
    "shared": {**GROUPED, **EXPERTS, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40},
    "deepseek-v2": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": None,
        "moe_layer_freq": [0, 1, 1],
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 1.5,
    },
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-yarn": {
        **DEEPSEEK,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "deepseek-v3-mtp": {**DEEPSEEK, "mtp_num_layers": 1},
    "gpt-oss": {
        **GROUPED,
        **EXPERTS,
        "moe_ffn_hidden_size": SIZES["inner"],
        "add_bias_linear": True,
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.5,
        "softmax_type": "learnable",
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": False,
    },
}
# Arguments that are not fields of the configuration; those of YaRN become attributes of it.
ARGUMENTS_ALONE = ("untie_embeddings_and_output_weights", "position_embedding_type", "swiglu", "quick_geglu")
ATTRIBUTES: Mapping[str, Any] = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}
# Names of the configuration that the arguments of Megatron-LM have as well, or under another name.
ARGUMENT = {"num_moe_experts": "num_experts"}


def arguments(family: str) -> argparse.Namespace:
    """The arguments that Megatron-LM records for a family, those of the checkpoint alone."""
    own = dict(FAMILIES[family])
    is_grouped = "num_query_groups" in own
    common = {
        "num_layers": SIZES["layers"],
        "hidden_size": SIZES["width"],
        "num_attention_heads": SIZES["heads"],
        "ffn_hidden_size": SIZES["inner"],
        "max_position_embeddings": SIZES["tokens"],
        "padded_vocab_size": SIZES["vocabulary"],
        "vocab_size": VOCABULARY,
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "group_query_attention": is_grouped,
        "untie_embeddings_and_output_weights": True,
        "transformer_impl": "local",
    }
    return argparse.Namespace(**common | {ARGUMENT.get(name, name): value for name, value in own.items()})


def latent_attention() -> type:
    """Its attention in plain torch, which takes no sizes of latent attention: they are those of its inputs."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):
        def __init__(self, config: Any, *given: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
            super().__init__(config, *given, **more)
            if v_channels:
                self.hidden_size_per_partition = v_channels * config.num_attention_heads
            del k_channels

    return LatentAttention


def built(family: str, names: str, *, is_first: bool = True, is_last: bool = True, **more: Any) -> Any:
    """A model of Megatron-core, whose checkpoints have the names of its own modules or of Transformer Engine's.

    Of several stages it has the layers of this rank; ``more`` are further fields of its configuration.
    """
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from tests.parity.megatron_core import GATED

    listed = dict(FAMILIES[family])
    alone = {name: listed.pop(name) for name in ARGUMENTS_ALONE if name in listed}
    is_yarn = alone.get("position_embedding_type") == "yarn"
    yarn = {name: listed.pop(name) for name in ATTRIBUTES if is_yarn}
    own = {**GATED, **listed, **({"activation_func": quick_gelu} if alone.get("quick_geglu") else {})}
    plain = ("bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion", "apply_rope_fusion")
    kind = MLATransformerConfig if own.pop("multi_latent_attention", False) else TransformerConfig
    config = kind(
        num_layers=SIZES["layers"],
        hidden_size=SIZES["width"],
        num_attention_heads=SIZES["heads"],
        ffn_hidden_size=SIZES["inner"],
        layernorm_epsilon=1e-6,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **dict.fromkeys(plain, False),
        **own,
        **more,
    )
    for name, value in yarn.items():
        setattr(config, ATTRIBUTES[name], value)
    if is_yarn:
        config.yarn_beta_fast, config.yarn_beta_slow = 32.0, 1.0
    # Without Transformer Engine these names are missing, which it does not notice.
    multi_latent_attention.HAVE_TE = False
    attention = latent_attention()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        is_latent, has_experts = kind is MLATransformerConfig, layer.submodules.mlp.module is MoELayer
        fused = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if names != "te" or not has_experts else {}
        if is_latent and names == "te":
            for latent in ("q", "kv"):
                fused[f"self_attention.{latent}_layernorm."] = f"self_attention.linear_{latent}_up_proj.layer_norm_"
        if not is_latent:
            fused["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if is_latent:
            layer.submodules.self_attention.submodules.core_attention = attention
        if names == "te" or not is_latent:
            layer.submodules.sharded_state_dict_keys_map = fused
    further = {}
    if config.mtp_num_layers:
        further["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        SIZES["vocabulary"],
        SIZES["tokens"],
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="yarn" if is_yarn else "rope",
        share_embeddings_and_output_weights=not alone.get("untie_embeddings_and_output_weights", True),
        **further,
    ).eval()


def generator_of(model: Any, name: str, seed: int) -> Any:
    """Random numbers of a parameter, the same for both copies of a tied table."""
    import torch

    is_copy = name == "output_layer.weight" and model.share_embeddings_and_output_weights
    own = "embedding.word_embeddings.weight" if is_copy else name
    return torch.Generator().manual_seed(zlib.crc32(f"{own} {seed}".encode()))


def randomize(model: Any, seed: int) -> None:
    """Random weights, those of norms and the biases of routers included, so that none of them may be exchanged."""
    import torch

    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and "inv_freq" not in name and "tokens_per_expert" not in name:
                generator = generator_of(model, name, seed)
                scale = 0.3 if value.dim() < 2 else 0.15
                value.copy_(
                    torch.randn(value.shape, generator=generator) * scale + ("norm" in name and value.dim() < 2)
                )


def logits_of(model: Any) -> Any:
    import torch

    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1])[None]
    # Depths of multi-token prediction need labels, and leave the first logits as they are.
    model.mtp_process, model.config.mtp_num_layers = False, None
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, positions, mask)[0, :, :VOCABULARY].float().numpy()


def main() -> None:
    command, family, names, directory = sys.argv[1:]
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from tests.parity.megatron_core import on_cpu
    from tests.parity.megatron_optimizer import without_cuda

    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    with on_cpu(), without_cuda():
        model = built(family, names)
        randomize(model, 0 if command == "save" else 1)
        from megatron.core import parallel_state

        metadata: dict[str, Any] = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        if names == "single":
            metadata["singleton_local_shards"] = True
        if command == "save":
            saved = {
                "model": model.sharded_state_dict(metadata=metadata),
                "args": arguments(family),
                "iteration": STEP,
                "checkpoint_version": 3.0,
            }
            dist_checkpointing.save(saved, directory)
        else:
            requested = {"model": model.sharded_state_dict(metadata=metadata)}
            # Unexpected are names that it requests and a checkpoint lacks; we write those of other modules too.
            loaded = dist_checkpointing.load(requested, directory, strict=StrictHandling.RAISE_UNEXPECTED)
            model.load_state_dict(loaded["model"], strict=True)
        np.save(f"{directory}.logits.npy", logits_of(model))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
