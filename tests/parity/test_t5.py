"""Our T5: with learned positions against transformers' Blenderbot, with relative ones against T5."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration, T5Config, T5ForConditionalGeneration

from dynmo_train.models.families.t5 import T5, T5Shape
from tests.parity.item_stream import TOLERANCE, assert_same_gradients, build_all, copy_into, gradients, parameters, run

LEARNED = T5Shape(
    num_encoder_layers=2,
    num_decoder_layers=3,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=4,
    head_dim=12,
    max_position_embeddings=32,
    vocab_size=101,
    padded_vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.15,
)
RELATIVE = replace(
    LEARNED,
    position_embedding="relative",
    relative_buckets=8,
    relative_max_distance=16,
    activation="relu",
    head_dim=10,
    layernorm_epsilon=1e-6,
)


def rows(values, name, parts):
    """The parts of a projection whose rows are grouped by head."""
    out = []
    for kind in ("weight", "bias"):
        if f"{name}.{kind}" in values:
            grouped = values[f"{name}.{kind}"].unflatten(0, (LEARNED.num_attention_heads, parts, -1))
            out.append([(kind, grouped[:, place].flatten(0, 1)) for place in range(parts)])
    return [dict(each) for each in zip(*out, strict=True)]


def put(out, name, tensors):
    out.update({f"{name}.{kind}": value for kind, value in tensors.items()})


def module_of(values, name):
    return {kind: values[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in values}


def blenderbot_names(values):
    V = LEARNED.vocab_size
    out = {"model.shared.weight": values["encoder.embedding.word.weight"][:V]}
    for side, layers in (("encoder", LEARNED.num_encoder_layers), ("decoder", LEARNED.num_decoder_layers)):
        out[f"model.{side}.embed_positions.weight"] = values["encoder.embedding.position.weight"]
        put(out, f"model.{side}.layer_norm", module_of(values, "encoder.norm" if side == "encoder" else "head.norm"))
        for n in range(layers):
            ours, theirs = f"{side}.layers.{n}", f"model.{side}.layers.{n}"
            for part, tensors in zip("qkv", rows(values, f"{ours}.attention.qkv", 3), strict=True):
                put(out, f"{theirs}.self_attn.{part}_proj", tensors)
            pairs = {
                "self_attn.out_proj": "attention.dense",
                "self_attn_layer_norm": "attention.norm",
                "fc1": "mlp.fc1",
                "fc2": "mlp.fc2",
                "final_layer_norm": "mlp.norm",
            }
            if side == "decoder":
                for part, tensors in zip("kv", rows(values, f"{ours}.cross_attention.key_value", 2), strict=True):
                    put(out, f"{theirs}.encoder_attn.{part}_proj", tensors)
                pairs |= {
                    "encoder_attn.q_proj": "cross_attention.query",
                    "encoder_attn.out_proj": "cross_attention.dense",
                    "encoder_attn_layer_norm": "cross_attention.norm",
                }
            for name, mine in pairs.items():
                put(out, f"{theirs}.{name}", module_of(values, f"{ours}.{mine}"))
    return out


def t5_names(values, gated):
    V = RELATIVE.vocab_size
    out = {"shared.weight": values["encoder.embedding.word.weight"][:V]}
    out["encoder.final_layer_norm.weight"] = values["encoder.norm.weight"]
    out["decoder.final_layer_norm.weight"] = values["head.norm.weight"]
    for side, layers in (("encoder", RELATIVE.num_encoder_layers), ("decoder", RELATIVE.num_decoder_layers)):
        for n in range(layers):
            ours, theirs = f"{side}.layers.{n}", f"{side}.block.{n}.layer"
            last = 2 if side == "decoder" else 1
            for part, tensors in zip("qkv", rows(values, f"{ours}.attention.qkv", 3), strict=True):
                put(out, f"{theirs}.0.SelfAttention.{part}", tensors)
            pairs = {
                "0.SelfAttention.o": "attention.dense",
                "0.layer_norm": "attention.norm",
                f"{last}.DenseReluDense.wo": "mlp.fc2",
                f"{last}.layer_norm": "mlp.norm",
            }
            names = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "fc1"}
            pairs |= {f"{last}.DenseReluDense.{name}": f"mlp.{mine}" for name, mine in names.items()}
            if n == 0:
                pairs["0.SelfAttention.relative_attention_bias"] = "attention.relative"
            if side == "decoder":
                for part, tensors in zip("kv", rows(values, f"{ours}.cross_attention.key_value", 2), strict=True):
                    put(out, f"{theirs}.1.EncDecAttention.{part}", tensors)
                pairs |= {
                    "1.EncDecAttention.q": "cross_attention.query",
                    "1.EncDecAttention.o": "cross_attention.dense",
                    "1.layer_norm": "cross_attention.norm",
                }
            for name, mine in pairs.items():
                put(out, f"{theirs}.{name}", module_of(values, f"{ours}.{mine}"))
    return out


def blenderbot():
    shape = LEARNED
    return BlenderbotForConditionalGeneration(
        BlenderbotConfig(
            vocab_size=shape.vocab_size,
            d_model=shape.hidden_size,
            encoder_layers=shape.num_encoder_layers,
            decoder_layers=shape.num_decoder_layers,
            encoder_attention_heads=shape.num_attention_heads,
            decoder_attention_heads=shape.num_attention_heads,
            encoder_ffn_dim=shape.ffn_hidden_size,
            decoder_ffn_dim=shape.ffn_hidden_size,
            activation_function="gelu",
            max_position_embeddings=shape.max_position_embeddings,
            scale_embedding=False,
        )
    ).eval()


def t5(gated):
    shape = RELATIVE
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=shape.vocab_size,
            d_model=shape.hidden_size,
            d_kv=shape.head_dim,
            d_ff=shape.ffn_hidden_size,
            num_layers=shape.num_encoder_layers,
            num_decoder_layers=shape.num_decoder_layers,
            num_heads=shape.num_attention_heads,
            relative_attention_num_buckets=shape.relative_buckets,
            relative_attention_max_distance=shape.relative_max_distance,
            feed_forward_proj="gated-gelu" if gated else "relu",
            layer_norm_epsilon=shape.layernorm_epsilon,
            tie_word_embeddings=True,
        )
    ).eval()


@pytest.mark.parametrize("kind", ["learned", "relative", "relative, gated"])
def test_t5_logits_loss_and_gradients_equal_transformers(kind):
    gated = kind.endswith("gated")
    shape = LEARNED if kind == "learned" else replace(RELATIVE, activation="geglu" if gated else "relu")
    family = T5(shape)
    modules = build_all(family)
    weights, copied = parameters(modules), {}
    if kind == "learned":
        theirs = blenderbot()
        copied = blenderbot_names(weights)
        theirs.final_logits_bias.copy_(weights["head.bias"][None, : shape.vocab_size].detach())
    else:
        theirs = t5(gated)
        copied = t5_names(weights, gated)
    copy_into(theirs, copied)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab_size, (3, 22), generator=generator)
    answers = torch.randint(0, shape.vocab_size, (3, 15), generator=generator)
    mask = torch.ones(3, 22, dtype=torch.bool)
    mask[2, 17:] = False
    batch = {
        "encoder_ids": ids,
        "encoder_attention_mask": mask,
        "decoder_ids": answers[:, :-1],
        "labels": answers[:, 1:],
        "loss_mask": torch.ones(3, 14, dtype=torch.long),
    }
    values = run(family, modules, batch)
    logits = modules["head"].logits(values["before.decoder"])
    expected = theirs(ids, attention_mask=mask.long(), decoder_input_ids=batch["decoder_ids"]).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    their_loss = F.cross_entropy(expected.reshape(-1, shape.vocab_size), answers[:, 1:].reshape(-1))
    torch.testing.assert_close(values["loss"], their_loss, rtol=0, atol=1e-5)
    values["loss"].backward()
    their_loss.backward()
    ours = gradients(family, modules)
    if kind == "learned":
        # Theirs has a table of positions on either side: ours is their sum, checked as such.
        positions = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
        total = sum(dict(theirs.named_parameters())[name].grad for name in positions)
        torch.testing.assert_close(ours["encoder.embedding.position.weight"], total, **TOLERANCE)
        names = blenderbot_names(ours) | {name: dict(theirs.named_parameters())[name].grad for name in positions}
        assert_same_gradients(theirs, names)
    else:
        assert_same_gradients(theirs, t5_names(ours, gated))
