"""Models of Megatron-core on CPU in one process, with our parameters under its names.

Megatron-core asks for CUDA in a few places that do not compute anything; ``on_cpu`` replaces those.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _WithoutCuda(TorchFunctionMode):
    """Creates on the CPU what Megatron-core creates on the device ``cuda``, such as the mask of a window."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return func(*args, **(named | {"device": "cpu"} if named.get("device") == "cuda" else named))


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The process groups of one process, and no use of CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.moe import moe_utils

        parallel_state.initialize_model_parallel()
        try:
            with (
                mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
                mock.patch.object(CudaRNGStatesTracker, "fork", side_effect=lambda *_: contextlib.nullcontext()),
                # Without Transformer Engine this name is missing.
                mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
                _WithoutCuda(),
            ):
                yield
        finally:
            parallel_state.destroy_model_parallel()


def config_of(sizes: Mapping[str, int], **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = dict.fromkeys(
        (
            *("bias_dropout_fusion", "masked_softmax_fusion", "bias_activation_fusion", "apply_rope_fusion"),
            *("gradient_accumulation_fusion", "persist_layer_norm"),
        ),
        False,
    )
    return TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["width"],
        num_attention_heads=sizes["heads"],
        ffn_hidden_size=sizes["inner"],
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **plain,
        **more,
    )


GATED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "add_bias_linear": False,
}


# The form of its fused kernel, which is the default; that kernel would be compiled.
TANH = {"activation_func": partial(nn.functional.gelu, approximate="tanh")}
# Fields of ``TransformerConfig`` that variants of ``llama`` have as well.
LLAMA_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "experts": {},
    "quick-geglu": {"quick_gelu": True},
    "quick-geglu-offset": {"quick_gelu": True, "glu_linear_offset": 1.0},
    "clamped-swiglu": {"activation_func_clamp_value": 0.25},
    "off-by-one": {"softmax_type": "off-by-one"},
    "gpt-oss": {
        "quick_gelu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.25,
        "softmax_type": "learnable",
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
    },
}
# Attributes that the training of Megatron-LM sets on the configuration for ``--position-embedding-type yarn``.
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}


def decoder(kind: str, sizes: Mapping[str, int]) -> nn.Module:
    """``gpt``, ``gpt-exact`` or one of ``LLAMA_VARIANTS``."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    is_gpt = kind not in LLAMA_VARIANTS
    more = dict(LLAMA_VARIANTS.get(kind, {}))
    own: dict[str, Any] = {} if kind == "gpt-exact" else TANH
    if not is_gpt:
        own = {**GATED, "num_query_groups": sizes["groups"]}
        if more.pop("quick_gelu", False):
            own["activation_func"] = quick_gelu
        own |= more
    spec: dict[str, Any] = {} if is_gpt else {"normalization": "RMSNorm"}
    if kind == "experts":
        own |= {
            "num_moe_experts": sizes["experts"],
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "allgather",
        }
        spec["num_experts"] = sizes["experts"]
    config = config_of(sizes, **own)
    if kind == "gpt-oss":
        for name, value in YARN.items():
            setattr(config, name, value)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(**spec),
        sizes["vocabulary"],
        sizes["tokens"],
        position_embedding_type="learned_absolute" if is_gpt else "yarn" if kind == "gpt-oss" else "rope",
        share_embeddings_and_output_weights=is_gpt,
    )


def bert(sizes: Mapping[str, int], kind: str = "bert") -> nn.Module:
    """``bert``, or ``bert-exact`` without the fused kernel."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    tied = {"share_embeddings_and_output_weights": True}
    own = TANH if kind == "bert" else {}
    return BertModel(config_of(sizes, **own), 2, bert_layer_local_spec, sizes["vocabulary"], sizes["tokens"], **tied)


def t5(sizes: Mapping[str, int]) -> nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    blocks = (t5_spec.get_t5_encoder_with_local_block_spec, t5_spec.get_t5_decoder_with_local_block_spec)
    # Its local blocks lack the last norm, which those of Transformer Engine, the default, have.
    specs = [replace(block(sizes["layers"]), layer_norm=WrappedTorchNorm) for block in blocks]
    return T5Model(
        config_of(sizes, **TANH),
        config_of(sizes, **TANH),
        *specs,
        sizes["vocabulary"],
        sizes["tokens"],
        share_embeddings_and_output_weights=True,
    )


BLOCK = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "cross_attention.norm": "pre_cross_attn_layernorm",
    "cross_attention.query": "cross_attention.linear_q",
    "cross_attention.key_value": "cross_attention.linear_kv",
    "cross_attention.dense": "cross_attention.linear_proj",
    "mlp.norm": "pre_mlp_layernorm",
    "mlp.router": "mlp.router",
    "mlp.fc1": "mlp.linear_fc1",
    "mlp.fc2": "mlp.linear_fc2",
}
ENDS = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "embedding.tokentype": "embedding.tokentype_embeddings",
    "encoder.norm": "encoder.final_layernorm",
    "head.dense": "lm_head.dense",
    "head.dense_norm": "lm_head.layer_norm",
    "head.pooler": "pooler.dense",
    "head.binary": "binary_head",
}


def names_of(kind: str, ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our parameters under the names of Megatron-core; copies of a tied matrix are left out."""
    ends = dict(ENDS)
    tower = "encoder" if kind.startswith("bert") else "decoder"
    ends["head.norm"] = f"{tower}.final_layernorm"
    ends["head"] = "lm_head.output_layer" if kind.startswith("t5") else "output_layer"
    found: dict[str, torch.Tensor] = {}
    for name, value in ours.items():
        module, _, part = name.rpartition(".")
        if kind not in LLAMA_VARIANTS and name in ("head.weight", "decoder.embedding.word.weight"):
            continue
        if name == "decoder.embedding.position.weight":
            continue  # one table for both sides
        module = module.removeprefix("encoder.") if module.startswith("encoder.embedding") else module
        if module in ends:
            found[f"{ends[module]}.{part}"] = value
            continue
        side, _, rest = module.partition("layers.")
        number, _, inner = rest.partition(".")
        prefix = f"{side or tower + '.'}layers.{number}"
        if inner.startswith("mlp.experts."):
            expert = inner.split(".")[2]
            prefix, inner = f"{prefix}.mlp.experts.local_experts.{expert}", inner.rpartition(".")[2]
        elif inner.startswith("mlp.") and inner not in BLOCK:
            prefix, inner = f"{prefix}.mlp", inner.removeprefix("mlp.")
        if part == "sinks":
            found[f"{prefix}.self_attention.core_attention.softmax_offset"] = value
        elif inner == "gate":
            up = ours[f"{module.removesuffix('gate')}up.{part}"]
            found[f"{prefix}.linear_fc1.{part}"] = torch.cat([value, up])
        elif inner == "fc2":
            found[f"{prefix}.linear_fc2.{part}"] = value
        elif inner != "up":
            found[f"{prefix}.{BLOCK[inner]}.{part}"] = value
    return found
