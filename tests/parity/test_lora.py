"""LoRA adapters: logits and gradients of PEFT, on the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.models.families.llama import Llama
from dynmo_train.models.lora import TARGETS, LoraFamily, LoraSettings, is_adapter, merge_adapters, targets_of
from dynmo_train.trainer.checkpoint.export_adapter import peft_name
from tests.parity.item_stream import TOLERANCE, build_all, copy_into, parameters, run
from tests.parity.test_decoder_shapes import LLAMA, hugging_face, renamed

LINEAR = tuple(name for name in TARGETS if name != "fc1")
SHAPE = replace(LLAMA, hidden_dropout=0.0, attention_dropout=0.0)
TARGET_LISTS = (LINEAR, ("q_proj", "v_proj"), ("k_proj",), ("o_proj", "down_proj"), ("gate_proj",))


def adapted(targets, shape=SHAPE, rank=3):
    """A decoder with random adapters, and its items."""
    family = LoraFamily(Llama(shape), LoraSettings(rank=rank, alpha=5.0, targets=targets), seed=4)
    modules = build_all(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in parameters(modules).items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return family, modules


def batch():
    ids = torch.randint(0, LLAMA.vocab_size, (2, 13), generator=torch.Generator().manual_seed(3))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("targets", TARGET_LISTS)
def test_logits_and_gradients_equal_those_of_peft(targets):
    peft = pytest.importorskip("peft", reason="peft is not installed (an optional peer)")
    family, modules = adapted(targets)
    values = {name: each.detach() for name, each in parameters(modules).items()}
    theirs = hugging_face("Llama", SHAPE)
    copy_into(theirs, renamed(values, SHAPE, dict(theirs.named_parameters())))
    config = peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=list(targets), lora_dropout=0.0, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, config)
    own = {peft_name(name): value for name, value in values.items() if is_adapter(name)}
    loaded = peft.set_peft_model_state_dict(theirs, own)
    assert not loaded.unexpected_keys
    tensors = batch()
    found = run(family, modules, tensors)
    logits = modules["head"].logits(found["before.hidden"])
    expected = theirs(input_ids=tensors["ids"]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    found["loss"].backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), tensors["labels"].flatten()).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    mine = {name: each.grad for name, each in parameters(modules).items() if each.grad is not None}
    assert {peft_name(name) for name in mine} == set(gradients)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, gradients[peft_name(name)], **TOLERANCE)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("targets", TARGET_LISTS)
def test_merged_weights_have_the_logits_of_the_adapters(targets, heads):
    family, modules = adapted(targets, replace(SHAPE, num_key_value_heads=heads))
    tensors = batch()
    before = run(family, modules, tensors)["loss"]
    for module in modules.values():
        merge_adapters(module)
    assert not any(map(is_adapter, parameters(modules)))
    torch.testing.assert_close(run(family, modules, tensors)["loss"], before, rtol=0, atol=1e-5)


def test_initial_adapters_change_nothing_and_are_the_same_again():
    family = LoraFamily(Llama(SHAPE), LoraSettings(rank=3, alpha=5.0, targets=LINEAR), seed=4)
    device = torch.device("cpu")
    for item in family.items:
        plain, first, second = Llama(SHAPE).build(item.name, device), *(family.build(item.name, device) for _ in "ab")
        for name, parameter in first.named_parameters():
            assert torch.equal(parameter, second.get_parameter(name))
            assert parameter.requires_grad == is_adapter(f"{item.name}.{name}")
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, first.get_parameter(name))


def test_front_before_the_first_adapter_is_frozen():
    front = {
        targets: LoraFamily(Llama(SHAPE), LoraSettings(rank=1, alpha=1.0, targets=targets), seed=0).frozen_front
        for targets in (("q_proj",), ("up_proj",))
    }
    assert front[("q_proj",)] == ("embedding",)
    assert front[("up_proj",)] == ("embedding", "layers.0.attention")


def test_targets_are_in_the_order_of_the_model():
    assert targets_of("v_proj, q_proj,v_proj", gated=True, experts=False) == ("q_proj", "v_proj")
    assert targets_of("all", gated=False, experts=False) == ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "down_proj")
    assert targets_of("all", gated=True, experts=True) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert targets_of("all", gated=True, experts=True, latent=True) == ("o_proj",)
