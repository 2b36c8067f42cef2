"""Small models of every family except GPT, with batches for them, for the placement scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dynmo_train.data.gpt_dataset import document_starts
from dynmo_train.models.attention.documents import STARTS
from dynmo_train.models.attention.latent_attention import LatentShape
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.bert import Bert, BertShape
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.ict import CONTEXT, EMBEDDED, QUERY, Ict, IctShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.families.multi_token import PREDICTION
from dynmo_train.models.families.t5 import DECODER, ENCODER, T5, T5Shape
from dynmo_train.models.layer_list import HIDDEN, LOSS, ModelFamily

VOCABULARY, WIDTH, TOKENS, ANSWERS = 50, 32, 16, 10
COMMON = {
    "hidden_size": WIDTH,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": 64,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "seed": 11,
}
EXPERTS = MoeShape(num_experts=4, top_k=2, aux_loss_coeff=0.1, z_loss_coeff=0.01, capacity_factor=1.1)
PADDED = replace(EXPERTS, pad_to_capacity=True)
DROPLESS = replace(EXPERTS, capacity_factor=None, shared_ffn_size=24, shared_gate=True)


@dataclass(frozen=True)
class Sample:
    """A family, the shapes of its values for a microbatch of ``B``, and its tensors for ``N`` samples."""

    family: ModelFamily
    shapes: Callable[[int], dict[str, tuple[int, ...]]]
    inputs: Callable[[int, torch.Generator], dict[str, torch.Tensor]]


def _hidden(batch: int) -> dict[str, tuple[int, ...]]:
    return {HIDDEN: (batch, TOKENS, WIDTH), LOSS: ()}


def _both(batch: int) -> dict[str, tuple[int, ...]]:
    return {ENCODER: (batch, TOKENS, WIDTH), DECODER: (batch, ANSWERS, WIDTH), LOSS: ()}


def _towers(batch: int) -> dict[str, tuple[int, ...]]:
    stream = (batch, TOKENS, WIDTH)
    return {QUERY: stream, EMBEDDED: (batch, 8), CONTEXT: stream, LOSS: ()}


def _ids(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, columns), generator=generator)


def _padding_mask(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    lengths = torch.randint(columns // 2, columns + 1, (rows, 1), generator=generator)
    return torch.arange(columns) < lengths


def _causal(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _ids(rows, TOKENS + 1, generator)
    return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _packed(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Documents of about four tokens; a label that begins another one does not count."""
    tensors = _causal(rows, generator)
    ends = torch.rand(rows, TOKENS, generator=generator) < 0.25
    tensors["ids"][ends] = VOCABULARY - 1
    ends = tensors["ids"] == VOCABULARY - 1
    return {**tensors, STARTS: document_starts(tensors["ids"], VOCABULARY - 1), "loss_mask": (~ends).long()}


def _masked(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    padding_mask = _padding_mask(rows, TOKENS, generator)
    return {
        "ids": _ids(rows, TOKENS, generator),
        "types": torch.randint(0, 2, (rows, TOKENS), generator=generator),
        "attention_mask": padding_mask,
        "labels": _ids(rows, TOKENS, generator),
        "loss_mask": ((torch.rand(rows, TOKENS, generator=generator) < 0.2) & padding_mask).long(),
        "order": torch.randint(0, 2, (rows,), generator=generator),
    }


def _spans(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    answers = _ids(rows, ANSWERS + 1, generator)
    return {
        "encoder_ids": _ids(rows, TOKENS, generator),
        "encoder_attention_mask": _padding_mask(rows, TOKENS, generator),
        "decoder_ids": answers[:, :-1].contiguous(),
        "labels": answers[:, 1:].contiguous(),
        "loss_mask": _padding_mask(rows, ANSWERS, generator).long(),
    }


def _blocks(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        f"{tower}_{name}": make(rows, TOKENS, generator)
        for tower in (QUERY, CONTEXT)
        for name, make in (("ids", _ids), ("attention_mask", _padding_mask))
    }


def _ict(*, shared: bool) -> Ict:
    return Ict(IctShape(**COMMON, num_layers=2, projection_size=8, shared_towers=shared, top_k=(1,)))


def _llama(moe: MoeShape | None) -> Llama:
    return Llama(LlamaShape(**COMMON, num_layers=4, num_key_value_heads=2, head_dim=8, moe=moe))


def _decoder() -> Llama:
    """Everything that tensor-parallel ranks must agree on: norms of heads, norms after sublayers, biases."""
    return Llama(
        LlamaShape(
            **COMMON,
            num_layers=4,
            num_key_value_heads=2,
            head_dim=8,
            qk_norm="head",
            norm_placement="sandwich",
            normalization="rmsnorm_1p",
            attention_bias="qkv",
            rotary_fraction=0.5,
            embedding_scale=5.5,
            activation="geglu",
        )
    )


def _deepseek() -> Llama:
    """Latent attention, a dense block and blocks with experts, and two depths of multi-token prediction."""
    latent = LatentShape(q_lora_rank=12, kv_lora_rank=16, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8)
    router = RouterShape(score_function="sigmoid", expert_bias=True, scaling_factor=2.5)
    moe = MoeShape(
        num_experts=4,
        top_k=2,
        seq_aux_loss_coeff=0.1,
        ffn_size=24,
        layers=(0, 1, 1, 0),
        shared_ffn_size=24,
        router=router,
    )
    return Llama(LlamaShape(**COMMON, num_layers=4, latent=latent, moe=moe, mtp_num_layers=2))


def _depths(batch: int) -> dict[str, tuple[int, ...]]:
    return {**_hidden(batch), PREDICTION: (batch, TOKENS, WIDTH)}


LOCAL_LAYERS = {
    "num_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 3,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
}


def _capped() -> Llama:
    """Gemma: soft caps, and layers with another window and rotation than the next one."""
    return Llama(
        LlamaShape(
            **COMMON,
            **LOCAL_LAYERS,
            local_rotary_base=100.0,
            attn_logit_softcapping=0.3,
            final_logit_softcapping=0.4,
            norm_placement="sandwich",
            tied_embeddings=True,
        )
    )


def _sinks() -> Llama:
    """GPT-OSS: a sink of each head, biases of router and experts, a clamped gate."""
    return Llama(
        LlamaShape(
            **COMMON,
            **LOCAL_LAYERS,
            attention_sinks=True,
            attention_bias="all",
            mlp_bias=True,
            activation="clamped_swiglu",
            swiglu_limit=0.05,
            moe=replace(EXPERTS, capacity_factor=None, router=RouterShape(bias=True)),
        )
    )


def _t5(positions: str) -> T5:
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "head_dim": 8}
    return T5(T5Shape(**COMMON, **sizes, position_embedding=positions, relative_buckets=8))


SAMPLES = {
    "llama": Sample(_llama(None), _hidden, _causal),
    "decoder": Sample(_decoder(), _hidden, _causal),
    "capped": Sample(_capped(), _hidden, _causal),
    "sinks": Sample(_sinks(), _hidden, _causal),
    "mixtral": Sample(_llama(EXPERTS), _hidden, _causal),
    "mixtral-padded": Sample(_llama(PADDED), _hidden, _causal),
    "mixtral-dropless": Sample(_llama(DROPLESS), _hidden, _causal),
    "deepseek": Sample(_deepseek(), _depths, _causal),
    "bert": Sample(Bert(BertShape(**COMMON, num_layers=4)), _hidden, _masked),
    "ict": Sample(_ict(shared=False), _towers, _blocks),
    "ict-shared": Sample(_ict(shared=True), _towers, _blocks),
    "t5": Sample(_t5("learned"), _both, _spans),
    "t5-relative": Sample(_t5("relative"), _both, _spans),
}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
PACKED = {
    "gpt-packed": Sample(Gpt(GptShape(**COMMON, **DOCUMENTS, num_layers=4)), _hidden, _packed),
    "llama-packed": Sample(
        Llama(LlamaShape(**COMMON, **DOCUMENTS, num_layers=4, num_key_value_heads=2, head_dim=8, sliding_window=3)),
        _hidden,
        _packed,
    ),
}
"""Samples of several documents."""
