"""Multi-token prediction against the layers of transformers: losses and gradients of every depth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_layers import MtpModel

from dynmo_train.models.aux_loss import with_losses
from dynmo_train.models.families.llama import Llama
from dynmo_train.models.layer_list import ItemOutput, output_of
from tests.parity.item_stream import build_all, gradients, parameters
from tests.parity.test_deepseek import V3, hugging_face, renamed, renamed_block

FACTOR = 0.3


def models_of(depths: int):
    """Our family with its items, and the model of transformers with its layers of prediction, with the same weights."""
    shape = replace(V3, mtp_num_layers=depths, mtp_loss_scaling_factor=FACTOR)
    family = Llama(shape)
    modules = build_all(family)
    own = parameters(modules)
    with torch.no_grad():
        for copy, owner in family.ties.items():
            own[copy].copy_(own[owner])
    theirs = hugging_face("V3", shape)
    further = MtpModel(theirs, depths)
    values = renamed(own, shape) | further_names(own, shape)
    parts = dict(theirs.named_parameters()) | {f"mtp.{n}": p for n, p in further.layers.named_parameters()}
    assert parts.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in parts.items():
            parameter.copy_(values[name])
        for module in further.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.zero_()
    return family, modules, theirs, further, parts


def further_names(values: dict, shape) -> dict:
    """Tensors of the depths by transformers' names."""
    out = {}
    for k in range(shape.mtp_num_layers):
        mine, other = f"mtp.{k}.", f"mtp.{k}."
        single = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "head.norm": "post_norm"}
        out |= {f"{other}{their}.weight": values[f"{mine}{our}.weight"] for our, their in single.items()}
        out |= renamed_block(values, mine, f"{other}mtp_block.", shape)
    return out


def run(family, modules, batch: dict):
    """Loss of the model, and those of the depths; the backward of the first runs all."""
    values, losses = {}, []
    for item in family.items:
        result = modules[item.name](*(values[name] for name in item.reads), *(batch[name] for name in item.inputs))
        values[item.writes] = output_of(result)
        if isinstance(result, ItemOutput):
            own = {name: loss for name, loss in result.losses.items() if name == "mtp"}
            values[item.writes] = with_losses(result.output, own.values(), 1.0)
            losses += [result.metrics["mtp_loss"]] if own else []
    return values["loss"], losses


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_losses_and_gradients_of_depths_equal_transformers(depths):
    family, modules, theirs, further, parts = models_of(depths)
    tokens = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    loss, losses = run(family, modules, {"ids": ids, "labels": labels})
    states = theirs.model(ids).last_hidden_state
    expected = [F.cross_entropy(theirs.lm_head(states).flatten(0, 1), labels.reshape(-1))]
    places = torch.arange(16)[None]
    rotation = theirs.model.rotary_emb(states, position_ids=places)
    for k, layer in enumerate(further.layers):
        # Of position i the token i + k + 1, which predicts the token i + k + 2; unknown tokens are 0, and do not count.
        known = tokens[:, k + 1 :]
        read = F.pad(known, (0, 16 - known.shape[1]))
        states = layer(theirs.model.embed_tokens(read), states, rotation, None, places, None)
        logits = theirs.lm_head(states)[:, : 16 - k - 1]
        expected.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, k + 2 :].reshape(-1)))
    torch.testing.assert_close(torch.stack([loss, *losses]), torch.stack(expected), rtol=0, atol=1e-5)
    loss.backward()
    (expected[0] + FACTOR * torch.stack(expected[1:]).mean()).backward()
    found = gradients(family, modules)
    found = renamed(found, family.shape) | further_names(found, family.shape)
    for name, parameter in parts.items():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_masked_labels_count_in_no_depth():
    """Labels of masked places are predictions that do not count, at their own place in every depth."""
    family = Llama(replace(V3, mtp_num_layers=1, eod_mask_loss=True))
    modules = build_all(family)
    tokens = torch.randint(0, 101, (1, 9), generator=torch.Generator().manual_seed(2))
    batch = {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    losses = [
        run(family, modules, {**batch, "loss_mask": torch.tensor([[0, *counted]])})[1][0]
        for counted in ([1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 1, 1])
    ]
    # The mean of all places is that of the places that each mask counts.
    torch.testing.assert_close(losses[0], (2 * losses[1] + 5 * losses[2]) / 7)


def test_evaluation_passes_the_stream_on_without_the_loss():
    family = Llama(replace(V3, mtp_num_layers=2))
    modules = build_all(family)
    item = modules["mtp.1"].eval()
    x = torch.randn(1, 4, 48)
    result = item(x, torch.randn(1, 4, 48), torch.zeros(1, 4, dtype=torch.int64))
    assert result.output is x
    assert not result.losses
    assert [name for name, _ in family.items[-2].metrics] == list(result.metrics)
