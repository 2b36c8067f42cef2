"""Our BERT against transformers' MegatronBertForPreTraining: logits, losses and gradients from the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MegatronBertForPreTraining

from dynmo_train.models.families.bert import Bert, BertShape
from dynmo_train.models.layer_list import ItemOutput
from tests.parity.item_stream import TOLERANCE, assert_same_gradients, build_all, copy_into, gradients, parameters, run
from tests.parity.megatron_bert import both, config_of, encoder

SHAPE = BertShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=4,
    max_position_embeddings=32,
    vocab_size=101,
    padded_vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.15,
    layernorm_epsilon=1e-12,
)


def hugging_face() -> MegatronBertForPreTraining:
    return MegatronBertForPreTraining(config_of(SHAPE, SHAPE.num_layers)).eval()


def renamed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    pairs = {
        "bert.pooler.dense": "head.pooler",
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.dense_norm",
        "cls.seq_relationship": "head.binary",
    }
    out = encoder(values, SHAPE, SHAPE.num_layers, norm="head.norm") | both(values, pairs)
    return out | {"cls.predictions.bias": values["head.bias"][: SHAPE.vocab_size]}


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE.vocab_size, (3, 20), generator=generator)
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[1, 13:] = False
    return {
        "ids": ids,
        "types": (torch.arange(20) > 8).long().expand(3, 20).contiguous(),
        "attention_mask": mask,
        "labels": torch.randint(0, SHAPE.vocab_size, (3, 20), generator=generator),
        "loss_mask": (torch.rand(3, 20, generator=generator) < 0.3).long() * mask,
        "order": torch.tensor([0, 1, 1]),
    }


def test_bert_logits_losses_and_gradients_equal_transformers():
    family = Bert(SHAPE)
    modules = build_all(family)
    theirs = hugging_face()
    copy_into(theirs, renamed(parameters(modules)))
    inputs = batch()
    values = run(family, modules, inputs)
    head, last = modules["head"], values["before.hidden"]
    words, order = head.logits(last), head.order_logits(head.norm(last))
    labels = inputs["labels"].masked_fill(inputs["loss_mask"] == 0, -100)
    expected = theirs(
        inputs["ids"],
        attention_mask=inputs["attention_mask"].long(),
        token_type_ids=inputs["types"],
        labels=labels,
        next_sentence_label=inputs["order"],
    )
    assert expected.prediction_logits.std() > 0.3
    mask = inputs["attention_mask"]
    torch.testing.assert_close(words[mask], expected.prediction_logits[mask], **TOLERANCE)
    torch.testing.assert_close(order, expected.seq_relationship_logits, **TOLERANCE)
    torch.testing.assert_close(values["loss"], expected.loss, rtol=0, atol=1e-5)
    values["loss"].backward()
    expected.loss.backward()
    assert_same_gradients(theirs, renamed(gradients(family, modules)))


def test_bert_without_binary_head_has_the_lm_loss_alone():
    family = Bert(replace(SHAPE, binary_head=False, num_tokentypes=0))
    modules = build_all(family)
    assert not [name for name in parameters(modules) if "pooler" in name or "binary" in name or "tokentype" in name]
    inputs = batch()
    values = run(family, modules, inputs)
    output = modules["head"](values["before.hidden"], inputs["labels"], inputs["loss_mask"])
    assert isinstance(output, ItemOutput)
    assert set(output.metrics) == {"lm_loss"}
    assert output.output == output.metrics["lm_loss"]


def test_bert_with_padding_has_the_same_outputs():
    """Masked tokens are neither attended to nor counted."""
    family = Bert(SHAPE)
    modules = build_all(family)
    inputs = batch()
    first = run(family, modules, inputs)["loss"]
    inputs["ids"] = inputs["ids"].clone()
    inputs["ids"][1, 13:] = 7
    assert run(family, modules, inputs)["loss"].item() == pytest.approx(first.item(), abs=1e-6)
