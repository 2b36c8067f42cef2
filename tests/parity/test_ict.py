"""Our towers against two of transformers' MegatronBertModel, the loss written out: scores, loss, gradients."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MegatronBertModel

from dynmo_train._common.errors import UsageError
from dynmo_train.data.ict_dataset import IctDataset, check_titles, ict_tensors
from dynmo_train.data.sample_format import SplitRequest
from dynmo_train.data.sentence_spans import SpanSettings, build_sentence_spans
from dynmo_train.data.vocabulary import make_vocabulary
from dynmo_train.formats.indexed import IndexedDataset, open_indexed
from dynmo_train.models.families.ict import Ict, IctShape
from tests.parity.item_stream import TOLERANCE, assert_same_gradients, build_all, copy_into, gradients, parameters, run
from tests.parity.megatron_bert import both, config_of, encoder

pytestmark = pytest.mark.complete

SHAPE = IctShape(
    num_layers=2,
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
    projection_size=16,
    scaled_scores=True,
    top_k=(1, 3),
)
TOKENS = 24
CLS, SEP, PAD = 2, 3, 0


class Tower(nn.Module):
    """A BERT without pooler, the first token, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = MegatronBertModel(config_of(SHAPE, SHAPE.num_layers), add_pooling_layer=False)
        self.projection = nn.Linear(SHAPE.hidden_size, SHAPE.projection_size)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.projection(self.bert(ids, attention_mask=mask.long()).last_hidden_state[:, 0])


class Towers(nn.Module):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.query = Tower()
        self.context = self.query if shared else Tower()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        query = self.query(batch["query_ids"], batch["query_attention_mask"])
        return query @ self.context(batch["context_ids"], batch["context_attention_mask"]).T / SHAPE.hidden_size**0.5


def renamed(values: dict[str, torch.Tensor], *, shared: bool) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for tower, end in (("query", "query.pooler"), ("context", "head"))[: 1 if shared else 2]:
        out |= encoder(values, SHAPE, SHAPE.num_layers, tower=f"{tower}.", norm=f"{end}.norm")
        out |= both(values, {f"{tower}.projection": f"{end}.projection"})
    return out


def write_indexed(prefix: Path, documents: list[list[list[int]]]) -> IndexedDataset:
    """An indexed data set of documents of sentences."""
    sentences = [sentence for document in documents for sentence in document]
    lengths = np.array([len(sentence) for sentence in sentences])
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sentences).astype("<u2").tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents) + 1)
    pointers = np.concatenate([[0], lengths.cumsum()[:-1] * 2]).astype("<i8")
    ends = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.astype("<i4").tobytes() + pointers.tobytes() + ends.tobytes()
    )
    return open_indexed(str(prefix))


def some_documents() -> list[list[list[int]]]:
    random = np.random.default_rng(3)
    return [
        [random.integers(5, 100, random.integers(3, 9)).tolist() for _ in range(random.integers(1, 9))]
        for _ in range(30)
    ]


def blocks_of(source: IndexedDataset, titles: IndexedDataset | None = None, **options) -> IctDataset:
    sentences = options.pop("sentences", 2)
    names = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, **{f"w{n}": n for n in range(4, 101)}}
    settings = SpanSettings(
        tokens=TOKENS - 3,
        min_sentences=sentences,
        short_probability=0.0,
        seed=7,
        split_index=0,
        min_remaining=sentences,
    )
    request = SplitRequest(source=source, split="train", shares=(1.0, 0.0, 0.0), num_samples=60, batch_size=4)
    spans = build_sentence_spans(request, settings, titles)
    options = {"query_in_block_prob": 0.1, "seed": 7, "split_index": 0, "seq_length": TOKENS} | options
    return IctDataset(
        source=source, titles=titles, spans=spans, vocabulary=make_vocabulary("names", names, 101), **options
    )


@pytest.mark.parametrize("shared", [False, True])
def test_ict_scores_loss_and_gradients_equal_transformers(tmp_path, shared):
    """From sentences on disk to gradients."""
    batch = ict_tensors(blocks_of(write_indexed(tmp_path / "data", some_documents())).batch(range(5)))
    family = Ict(replace(SHAPE, shared_towers=shared))
    modules = build_all(family)
    for copy, owner in family.ties.items():
        parameters(modules)[copy].data.copy_(parameters(modules)[owner].data)
    theirs = Towers(shared=shared).eval()
    copy_into(theirs, renamed(parameters(modules), shared=shared))
    values = run(family, modules, batch)
    scores = modules["head"].scores(values["before.context"], values["before.query_embedding"])
    expected = theirs(batch)
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, **TOLERANCE)
    loss = F.cross_entropy(expected, torch.arange(5))
    torch.testing.assert_close(values["loss"], loss, rtol=0, atol=1e-5)
    values["loss"].backward()
    loss.backward()
    assert_same_gradients(theirs, renamed(gradients(family, modules), shared=shared))
    metrics = modules["head"](values["before.context"], values["before.query_embedding"]).metrics
    for k in (1, 3):
        found = [n in expected[n].topk(k).indices for n in range(5)]
        assert metrics[f"top{k}_acc"].item() == pytest.approx(100 * sum(found) / 5)


def tokens_of(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    assert (ids[~mask] == PAD).all()
    return ids[mask].tolist()


@pytest.mark.parametrize("stay", [0.0, 1.0])
def test_ict_query_is_a_sentence_of_its_block(tmp_path, stay):
    documents = some_documents()
    titles = [[[90 + number % 10, number % 80 + 5]] for number in range(30)]
    dataset = blocks_of(
        write_indexed(tmp_path / "data", documents),
        write_indexed(tmp_path / "titles", titles),
        query_in_block_prob=stay,
    )
    rows = ict_tensors(dataset.batch(range(40)))
    again = ict_tensors(dataset.batch([17]))
    assert all(torch.equal(rows[name][17], again[name][0]) for name in rows)
    used_documents = set()
    for n in range(40):
        query = tokens_of(rows["query_ids"][n], rows["query_attention_mask"][n])
        block = tokens_of(rows["context_ids"][n], rows["context_attention_mask"][n])
        begin, end = int(dataset.spans.begins[n]), int(dataset.spans.ends[n])
        number = int(np.searchsorted(dataset.source.documents, begin, side="right")) - 1
        used_documents.add(number)
        first = begin - int(dataset.source.documents[number])
        sentences = documents[number][first : first + end - begin]
        assert len(sentences) >= 2
        assert query[0] == CLS
        assert query[-1] == SEP
        assert query[1:-1] in sentences
        rest = [list(each) for each in sentences]
        if not stay:
            rest.remove(query[1:-1])
        expected = [CLS, *titles[number][0], SEP, *[token for each in rest for token in each]][: TOKENS - 1]
        assert block == [*expected, SEP]
    assert len(used_documents) > 10


def test_ict_blocks_cover_documents_with_room_for_titles(tmp_path):
    documents = [[[5, 6, 7, 8]] * 10]
    plain = blocks_of(write_indexed(tmp_path / "data", documents * 4))
    # 21 tokens take six sentences of four; the four that are left are enough for a block.
    assert sorted({(int(e - b)) for b, e in zip(plain.spans.begins, plain.spans.ends, strict=True)}) == [4, 6]
    titles = write_indexed(tmp_path / "titles", [[[9] * 12]] * 4)
    short = blocks_of(write_indexed(tmp_path / "data", documents * 4), titles)
    assert {int(e - b) for b, e in zip(short.spans.begins, short.spans.ends, strict=True)} == {3, 4}
    alone = blocks_of(write_indexed(tmp_path / "one", [[[5, 6, 7]]] * 8), sentences=1, query_in_block_prob=0.0)
    tensors = ict_tensors(alone.batch([0]))
    assert tokens_of(tensors["context_ids"][0], tensors["context_attention_mask"][0]) == [CLS, SEP]
    with pytest.raises(UsageError, match=r"has 4, and .* 8 documents"):
        check_titles(alone.source, titles)
