"""Samples of conversations, for supervised fine-tuning (``--sft``): the loss counts tokens of the assistant only.

    conversations [id ...] of dynmo-prep binarize-chat, PREFIX and PREFIX.loss_mask
      --inputs and labels--> L tokens make L - 1 places --best fit, longest first--> samples of T places --shuffle-->

    ids        a b c | d e f g | 0 0         one sample of two conversations, and padding
    labels     b c d | e f g h | 0 0
    starts     0 0 0 | 3 3 3 3 | 7 7         a token attends within its conversation, positions begin again
    loss_mask  0 1 1 | 0 0 1 1 | 0 0         whether the label is the assistant's

The last token of a conversation is a label only: no place is lost to it, and none has a label of another conversation.
A conversation is never cut to fill a sample. One of more than T + 1 tokens loses its end.

The samples are a function of the lengths, the split and the sequence length, and their order of the seed: neither
depends on the number of ranks or the length of the run.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.console import print_message
from .._common.document import DocumentError
from .._common.errors import UsageError
from ..config import Config
from ..formats.indexed import IndexedDataset, open_indexed
from .batch import LOSS_MASK
from .gpt_dataset import check_ids
from .sample_format import Dataset, Int64Array, SampleFormat, SplitBuilder, SplitRequest, columns_to_tensors

MASK_SUFFIX = ".loss_mask"
COLUMNS = ("ids", "labels", "document_starts", LOSS_MASK)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Which conversations a sample has: sample ``s`` those of ``members[ends[s - 1] : ends[s]]``."""

    members: Int64Array
    ends: Int64Array

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, sample: int) -> Int64Array:
        return self.members[self.ends[sample - 1] if sample else 0 : self.ends[sample]]


def pack_best_fit(lengths: Sequence[int] | Int64Array, capacity: int) -> Packs:
    """Pack lengths into samples: longest first, each into the fullest sample that has room.

    Best-fit decreasing: at most 11/9 of the fewest possible samples, plus 1 (Johnson, 1974, section 3). Equal lengths
    are in ascending order, so the result is a function of the arguments.

    Args:
        lengths: length of each member ``[members]``, from 1 to ``capacity``.
        capacity: length of a sample.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    rooms: list[int] = []  # distinct rooms of open samples, ascending
    open_samples: dict[int, list[int]] = {}
    samples: list[list[int]] = []
    for member in order.tolist():
        length = int(lengths[member])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            sample, room = len(samples), capacity
            samples.append([])
        else:
            room = rooms[at]
            sample = open_samples[room].pop()
            if not open_samples[room]:
                del open_samples[room], rooms[at]
        samples[sample].append(member)
        room -= length
        if room:
            if room not in open_samples:
                bisect.insort(rooms, room)
                open_samples[room] = []
            open_samples[room].append(sample)
    members = np.fromiter((each for sample in samples for each in sample), dtype=np.int64, count=len(order))
    return Packs(members=members, ends=np.cumsum([len(sample) for sample in samples], dtype=np.int64))


@functools.lru_cache(maxsize=8)
def epoch_order(seed: int, split_index: int, epoch: int, samples: int) -> Int64Array:
    """The order of ``samples`` samples in an ``epoch``, int64 ``[samples]``, by ``seed`` and ``split_index``."""
    return np.random.default_rng([seed, split_index, epoch]).permutation(samples).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatDataset:
    """The samples of one split of a data set of conversations; see ``Dataset``.

    Attributes:
        source: token ids, a document per conversation.
        mask: 1 for tokens of the assistant, with the index of ``source``.
        packs: sequences of the samples of an epoch.
        num_samples: samples of the run.
    """

    source: IndexedDataset
    mask: IndexedDataset
    packs: Packs
    seq_length: int
    vocab_size: int
    seed: int
    split_index: int
    num_samples: int

    def __len__(self) -> int:
        return -(-self.num_samples // len(self.packs)) * len(self.packs)

    def _sequences(self, index: int) -> Int64Array:
        epoch, place = divmod(int(index), len(self.packs))
        return self.packs[int(epoch_order(self.seed, self.split_index, epoch, len(self.packs))[place])]

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Ids, labels, starts of conversations and loss mask of samples, int64 ``[n, 4 * seq_length]``.

        Args:
            indices: sample numbers, ``[n]``.

        Raises:
            TokenError: an id of the data set is not in the vocabulary.
        """
        numbers = np.asarray(indices, dtype=np.int64)
        rows_N4T = np.zeros((len(numbers), len(COLUMNS), self.seq_length), dtype=np.int64)
        for row_4T, number in zip(rows_N4T, numbers, strict=True):
            at = 0
            for sequence in self._sequences(number):
                first = self.source.starts[sequence]
                places = places_of(int(self.source.lengths[sequence]), self.seq_length)
                tokens = self.source.tokens[first : first + places + 1]
                row_4T[0, at : at + places], row_4T[1, at : at + places] = tokens[:-1], tokens[1:]
                row_4T[2, at : at + places] = at
                row_4T[3, at : at + places] = self.mask.tokens[first + 1 : first + places + 1] != 0
                at += places
            row_4T[2, at:] = at
        check_ids(rows_N4T[:, :2], self.source.prefix, self.vocab_size)
        return rows_N4T.reshape(len(numbers), -1)

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset``; ``indices`` are sample numbers, ``[n]``."""
        return [
            [self._range(int(sequence)) for sequence in self._sequences(int(index))]
            for index in np.asarray(indices, dtype=np.int64)
        ]

    def _range(self, sequence: int) -> dict[str, Any]:
        first, length = int(self.source.starts[sequence]), int(self.source.lengths[sequence])
        tokens = [first, first + places_of(length, self.seq_length) + 1]
        return {"prefix": str(self.source.prefix), "sequences": [sequence, sequence + 1], "tokens": tokens}


def places_of(length: int, seq_length: int) -> int:
    """Places that a conversation of ``length`` tokens takes of ``seq_length``: those of its tokens with a label."""
    return min(length - 1, seq_length)


def build_chat_dataset(
    request: SplitRequest, mask: IndexedDataset, *, seq_length: int, seed: int, vocab_size: int, pack: bool
) -> ChatDataset:
    """Build the samples of a split.

    Args:
        request: which samples.
        mask: the loss mask of the data set.
        seq_length: tokens that the model reads of a sample.
        seed: seed of the shuffles.
        vocab_size: upper bound of the token ids.
        pack: several conversations per sample; else one, and padding.

    Raises:
        UsageError: the mask is that of another data set, or an epoch has fewer samples than a batch.
    """
    source, (begin, end) = request.source, request.documents
    if not np.array_equal(source.lengths, mask.lengths):
        raise UsageError(
            f"{mask.prefix} is not the loss mask of {source.prefix}: the lengths of their sequences differ"
        )
    sequences = np.arange(source.documents[begin], source.documents[end])
    lengths = np.minimum(source.lengths[sequences].astype(np.int64) - 1, seq_length)
    learned = _learned_tokens(mask, sequences, lengths)
    is_used = learned > 0
    num_cut = int((source.lengths[sequences] > seq_length + 1).sum())
    sequences, lengths = sequences[is_used], lengths[is_used]
    if pack:
        packs = pack_best_fit(lengths, seq_length)
        packs = Packs(members=sequences[packs.members], ends=packs.ends)
    else:
        packs = Packs(members=sequences, ends=np.arange(1, len(sequences) + 1))
    needed = max(1, request.batch_size)
    if len(packs) < needed:
        raise UsageError(
            f"the {request.split} split of {source.prefix} is too small: {len(sequences):,} conversations make"
            f" {len(packs):,} samples of --seq-length {seq_length}, and a batch needs {needed:,}; add conversations,"
            " lower --seq-length or the batch size, or change --split"
            + ("" if request.split == "train" else ", or give --eval-iters 0")
        )
    if request.split == "train":
        _report(source.prefix, packs, lengths, int(learned.sum()), seq_length, num_cut, int((~is_used).sum()))
    return ChatDataset(
        source=source,
        mask=mask,
        packs=packs,
        seq_length=seq_length,
        vocab_size=vocab_size,
        seed=seed,
        split_index=request.split_index,
        num_samples=request.num_samples,
    )


def _learned_tokens(mask: IndexedDataset, sequences: Int64Array, lengths: Int64Array) -> Int64Array:
    """Labels of each conversation that are the assistant's ``[conversations]``, without those that are cut off."""
    counts = np.zeros(len(sequences), dtype=np.int64)
    for number, (sequence, length) in enumerate(zip(sequences.tolist(), lengths.tolist(), strict=True)):
        first = int(mask.starts[sequence])
        counts[number] = np.count_nonzero(mask.tokens[first + 1 : first + 1 + max(0, length)])
    return counts


def _report(
    prefix: str, packs: Packs, lengths: Int64Array, learned: int, seq_length: int, num_cut: int, num_unused: int
) -> None:
    total = len(packs) * seq_length
    print_message(
        f"{prefix}: {len(lengths):,} conversations in {len(packs):,} samples of {seq_length:,} tokens per epoch;"
        f" {learned / total:.1%} learned, {1 - int(lengths.sum()) / total:.1%} padding"
        + (f"; {num_cut:,} conversations are longer and lose their end" if num_cut else "")
        + (f"; {num_unused:,} have no token of the assistant and are left out" if num_unused else "")
    )


def open_mask(prefix: str) -> IndexedDataset:
    """The loss mask of a data set.

    Raises:
        UsageError: it has none.
        DocumentError: the mask is damaged.
    """
    try:
        return open_indexed(prefix + MASK_SUFFIX)
    except DocumentError as error:
        if any(problem.kind == "missing" for problem in error.problems):
            raise UsageError(
                f"--sft: {prefix} has no loss mask, {prefix}{MASK_SUFFIX}.bin and .idx; make the data set with"
                " dynmo-prep binarize-chat, which writes both"
            ) from error
        raise


def _builder(config: Config) -> SplitBuilder:
    def build(request: SplitRequest) -> Dataset:
        """See ``build_chat_dataset``, which raises ``UsageError``."""
        return build_chat_dataset(
            request,
            open_mask(request.source.prefix),
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            vocab_size=config.model.vocab_size,
            pack=config.data.sft_packing,
        )

    return build


def _tensors(config: Config, rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """Ids, labels, loss mask and, where samples are packed, starts of conversations: int64 ``[N, T]`` each."""
    tensors = columns_to_tensors(rows_NC, COLUMNS)
    if not config.data.packs_documents:
        # Padding follows the only conversation, and causal attention does not reach it.
        del tensors["document_starts"]
    return tensors


FORMAT = SampleFormat(
    builder=_builder, to_tensors=_tensors, num_columns=lambda config: len(COLUMNS) * config.model.seq_length
)
