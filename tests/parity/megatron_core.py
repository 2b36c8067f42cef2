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


def decoder(kind: str, sizes: Mapping[str, int]) -> nn.Module:
    """``gpt``, ``llama`` or ``experts``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    is_gpt = kind == "gpt"
    # The form of its fused kernel, which is the default; that kernel would be compiled.
    tanh = {"activation_func": partial(nn.functional.gelu, approximate="tanh")}
    own: dict[str, Any] = tanh if is_gpt else {**GATED, "num_query_groups": sizes["groups"]}
    spec: dict[str, Any] = {} if is_gpt else {"normalization": "RMSNorm"}
    if kind == "experts":
        own |= {
            "num_moe_experts": sizes["experts"],
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "allgather",
        }
        spec["num_experts"] = sizes["experts"]
    return GPTModel(
        config_of(sizes, **own),
        get_gpt_layer_local_spec(**spec),
        sizes["vocabulary"],
        sizes["tokens"],
        position_embedding_type="learned_absolute" if is_gpt else "rope",
        share_embeddings_and_output_weights=is_gpt,
    )


def bert(sizes: Mapping[str, int]) -> nn.Module:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    tied = {"share_embeddings_and_output_weights": True}
    return BertModel(config_of(sizes), 2, bert_layer_local_spec, sizes["vocabulary"], sizes["tokens"], **tied)


def t5(sizes: Mapping[str, int]) -> nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    blocks = (t5_spec.get_t5_encoder_with_local_block_spec, t5_spec.get_t5_decoder_with_local_block_spec)
    # Its local blocks lack the last norm, which those of Transformer Engine, the default, have.
    specs = [replace(block(sizes["layers"]), layer_norm=WrappedTorchNorm) for block in blocks]
    return T5Model(
        config_of(sizes),
        config_of(sizes),
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
    tower = "encoder" if kind == "bert" else "decoder"
    ends["head.norm"] = f"{tower}.final_layernorm"
    ends["head"] = "lm_head.output_layer" if kind == "t5" else "output_layer"
    found: dict[str, torch.Tensor] = {}
    for name, value in ours.items():
        module, _, part = name.rpartition(".")
        if kind in ("gpt", "bert", "t5") and name in ("head.weight", "decoder.embedding.word.weight"):
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
        if inner == "gate":
            up = ours[f"{module.removesuffix('gate')}up.{part}"]
            found[f"{prefix}.linear_fc1.{part}"] = torch.cat([value, up])
        elif inner == "fc2":
            found[f"{prefix}.linear_fc2.{part}"] = value
        elif inner != "up":
            found[f"{prefix}.{BLOCK[inner]}.{part}"] = value
    return found
