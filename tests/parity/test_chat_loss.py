"""Loss and gradients of packed conversations: those of transformers, which reads each conversation by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.data.chat_dataset import COLUMNS
from dynmo_train.data.sample_format import columns_to_tensors
from dynmo_train.models.families.llama import Llama
from tests.parity.item_stream import assert_same_gradients, build_all, copy_into, gradients, parameters, run
from tests.parity.test_decoder_shapes import LLAMA, hugging_face, renamed
from tests.unit.dynmo_train.data.test_chat_dataset import T, build, conversations


@pytest.mark.parametrize("pack", [True, False])
def test_loss_of_conversations_equals_transformers(pack):
    tokens, masks = conversations(24)
    tokens = [[token % 100 + 1 for token in each] for each in tokens]
    data = build(tokens, masks, pack=pack)
    packed = {"reset_position_ids": pack, "reset_attention_mask": pack, "eod_mask_loss": True}
    family = Llama(replace(LLAMA, hidden_dropout=0.0, attention_dropout=0.0, **packed))
    modules = build_all(family)
    batch = columns_to_tensors(data.batch(range(len(data.packs))), COLUMNS)
    loss = run(family, modules, batch)["loss"]
    loss.backward()
    theirs = hugging_face("Llama", LLAMA)
    values = {name: value.detach() for name, value in parameters(modules).items()}
    copy_into(theirs, renamed(values, LLAMA, dict(theirs.named_parameters())))
    total, count = torch.zeros(()), 0
    for ids, mask in zip(tokens, masks, strict=True):
        learned = torch.tensor(mask[: T + 1], dtype=torch.bool)
        learned[0] = False
        if not learned.any():
            continue
        ids = torch.tensor([ids[: T + 1]])
        labels = ids.masked_fill(~learned, -100)
        number = int(learned.sum())
        total = total + theirs(input_ids=ids, labels=labels).loss * number
        count += number
    (total / count).backward()
    torch.testing.assert_close(loss, total / count, rtol=0, atol=1e-5)
    assert_same_gradients(theirs, renamed(gradients(family, modules), LLAMA, dict(theirs.named_parameters())))
