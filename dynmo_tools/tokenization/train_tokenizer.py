"""Train a tokenizer on the documents of a data set: words are counted by slices, summed by shares, and merged.

The words of a slice are cut into shares by their CRC-32, and the sums of a share are one file. The last task takes the
most frequent words of all shares, as many as it is allowed, and merges their symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..config.settings import TrainTokenizerSettings
from ..runner.task import Phase, Task, marker_of
from ..runner.task_manifest import Plan
from .bpe_trainer import PairMerger, Words
from .trainable import trainable
from .word_counts import ShareWriter, WordBlock, choose, read_blocks, sum_blocks

MAX_SHARES = 256
WORDS, SUMS = "words", "sums"


def train_phases(plan: Plan) -> list[Phase]:
    """Count by slices, sum by shares, merge."""
    return [
        Phase(name="count", run="tokenization.train_tokenizer:count_words", tasks=len(plan.tasks), reads=True),
        Phase(name="sum", run="tokenization.train_tokenizer:sum_share", tasks=_num_shares(plan)),
        Phase(name="train", run="tokenization.train_tokenizer:train", tasks=1),
    ]


def _num_shares(plan: Plan) -> int:
    return min(len(plan.tasks), MAX_SHARES)


def count_words(task: Task) -> None:
    """Task function: how often each word of one slice occurs."""
    settings: TrainTokenizerSettings = task.job.settings
    kind = trainable(settings)
    split = kind.splitter()
    counts = ShareWriter(task.create(task.part(WORDS)), _num_shares(task.plan), kind.words_of)
    for _, text in task.documents(settings.json_key):
        counts.add(split(text), len(text))
        task.tally.documents_kept += 1
    counts.flush()
    task.result["bounds"] = counts.bounds


def _blocks_of_share(task: Task) -> Iterator[WordBlock]:
    for index in range(len(task.plan.tasks)):
        for bounds in marker_of(task, "count", index)["result"]["bounds"]:
            yield from read_blocks(task.part(WORDS, index), bounds[task.index], bounds[task.index + 1])


def sum_share(task: Task) -> None:
    """Task function: every word of one share once, and what the alphabet must hold for them."""
    kind = trainable(task.job.settings)
    target = task.create(task.part(SUMS))
    begin: set[int] = set()
    go_on: set[int] = set()
    task.facts["distinct_words"] = 0
    for block in sum_blocks(_blocks_of_share(task), task.job.work / "parts"):
        block.write(target)
        task.facts["distinct_words"] += len(block.lengths)
        found = kind.characters(block)
        begin |= found[0]
        go_on |= found[1]
    task.result.update(begin=sorted(begin), go_on=sorted(go_on))


def train(task: Task) -> None:
    """Task function: merges the words' symbols and writes ``tokenizer.json``."""
    settings: TrainTokenizerSettings = task.job.settings
    kind = trainable(settings)
    shares = range(_num_shares(task.plan))
    seen = [marker_of(task, "sum", index)["result"] for index in shares]
    paths = [task.part(SUMS, index) for index in shares]
    tokens = kind.alphabet(_together(seen, "begin"), _together(seen, "go_on"))
    choice = choose(paths, settings.max_word_bytes)
    with Words(task.job.work / "parts", choice.words, choice.size) as words:
        for path in paths:
            for block in read_blocks(path):
                kept = block.only(choice.kept(block))
                words.add(*kind.symbols(kept), kept.counts)
        pairs = PairMerger(words, tokens, prefix=kind.prefix).merges(settings.vocab_size, settings.min_frequency)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    trained = kind.file(vocabulary, [(tokens[left], tokens[right]) for left, right in pairs])
    task.create(task.job.output).write(trained.encode())
    task.facts.update(vocab_size=len(tokens), special_tokens={token: vocabulary[token] for token in kind.special})
    if choice.words_left_out:
        share = f"{100 * choice.occurrences_left_out / choice.occurrences:.2g} %"
        task.facts["left_out"] = {"rare words": choice.words_left_out, "of the text's words": share}


def _together(seen: Iterable[dict[str, list[int]]], name: str) -> set[int]:
    return {point for one in seen for point in one[name]}
