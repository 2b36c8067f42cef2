"""The soft cap of the logits wherever a head is read: loss, exits, scores, decoding, shards of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynmo_train.models.families.vocabulary_family import VocabularyShardedFamily
from dynmo_train.models.kv_cache import last_logits
from dynmo_train.models.techniques.early_exit import Exit, ExitSettings, response_of, sampled_cross_entropy
from dynmo_train.models.vocabulary.head import Head
from dynmo_train.models.vocabulary.token_scores import HITS, LOSSES, ScoringHead
from tests.distributed.families import SAMPLES

CPU = torch.device("cpu")
D, V, CAP = 16, 30, 0.7


@pytest.fixture
def head():
    torch.manual_seed(0)
    made = Head(width=D, rows=32, vocabulary=V, norm=nn.LayerNorm(D), device=CPU, softcap=CAP)
    nn.init.normal_(made.weight)
    return made


@pytest.fixture
def capped(head):
    """The stream, and its logits by the formula."""
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    return x, CAP * torch.tanh(F.linear(head.norm(x), head.weight[:V]) / CAP)


def test_logits_and_loss_of_a_head_are_capped(head, capped):
    x, logits = capped
    labels = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(head.logits(x), logits)
    torch.testing.assert_close(head(x, labels), F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1)))


def test_exits_decide_by_capped_logits(head, capped):
    x, logits = capped
    exit_ = Exit(head, ExitSettings(layers=(0,), loss_weight=1.0, threshold=0.5, measure="softmax"), 0, D, CPU)
    torch.testing.assert_close(exit_.confidence(x, x), response_of(logits.flatten(0, 1).clone()).view(2, 5))
    labels = torch.randint(0, V, (10,), generator=torch.Generator().manual_seed(2))
    features = head.features(x).flatten(0, 1)
    losses = sampled_cross_entropy(features, head.weight, None, labels, torch.randperm(V), vocabulary=V, cap=CAP)
    torch.testing.assert_close(losses, F.cross_entropy(logits.flatten(0, 1), labels, reduction="none"))


def test_scores_are_of_capped_logits(head, capped):
    x, logits = capped
    labels = logits.argmax(-1)
    labels[0, 0] = (labels[0, 0] + 1) % V
    with torch.no_grad():
        result = ScoringHead(head)(x, labels, torch.ones(2, 5))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none").view(2, 5)
    torch.testing.assert_close(result.metrics[LOSSES].float(), losses.sum(1))
    assert result.metrics[HITS].tolist() == [4, 5]


class _OneRank:
    rank, size = 0, 1

    def all_reduce(self, x):
        return x


def test_decoded_logits_of_tensor_parallel_ranks_are_capped(head, capped):
    x, logits = capped
    head.region = _OneRank()
    torch.testing.assert_close(last_logits(head, x), logits[:, -1])


@pytest.mark.parametrize("tied", [True, False])
def test_shards_of_the_vocabulary_have_the_cap_of_the_head(tied):
    base = SAMPLES["capped"].family
    family = VocabularyShardedFamily(type(base)(replace(base.shape, tied_embeddings=tied)), 2)
    assert [family.build(name, CPU).softcap for name in family.shards] == [0.4, 0.4]
