"""The step ``train-tokenizer``: count the words of slices, sum the counts of shards, merge symbols.

A shard has the words with one value of their CRC-32 modulo the number of shards. The last task selects the most
frequent words of all shards up to a size, and merges their symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..config.settings import TrainTokenizerSettings
from ..runner.task import Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest
from .bpe_trainer import PairMerger, WordSymbols
from .trainers import make_trainer
from .word_counts import WordBlock, WordCountWriter, read_blocks, select_words, sum_blocks

# One shard per slice at most. Each task of the first phase writes a part of every shard.
MAX_SHARDS = 256
WORDS, SUMS = "words", "sums"


def train_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``train-tokenizer``."""
    return [
        Phase(name="count", run="tokenization.train_tokenizer:count_words", tasks=len(manifest.tasks), reads=True),
        Phase(name="sum", run="tokenization.train_tokenizer:sum_shard", tasks=_num_shards(manifest)),
        Phase(name="train", run="tokenization.train_tokenizer:train", tasks=1),
    ]


def _num_shards(manifest: TaskManifest) -> int:
    return min(len(manifest.tasks), MAX_SHARDS)


def count_words(task: Task) -> None:
    """Task function: count each word of one slice."""
    settings: TrainTokenizerSettings = task.job.settings
    kind = make_trainer(settings)
    split = kind.splitter()
    counts = WordCountWriter(task.create(task.part(WORDS)), _num_shards(task.manifest), kind.extract_words)
    for _, text in task.documents(settings.json_key):
        counts.add(split(text), len(text))
        task.counts.documents_out += 1
    counts.flush()
    task.result["bounds"] = counts.bounds


def _blocks_of_shard(task: Task) -> Iterator[WordBlock]:
    # In slice order, so that the words of a shard have the same order in every run.
    for index in range(len(task.manifest.tasks)):
        for bounds in read_marker(task, "count", index)["result"]["bounds"]:
            yield from read_blocks(task.part(WORDS, index), bounds[task.index], bounds[task.index + 1])


def sum_shard(task: Task) -> None:
    """Task function: sum the counts of one shard, and collect the characters of its words."""
    kind = make_trainer(task.job.settings)
    target = task.create(task.part(SUMS))
    # The alphabet has the characters of all words, also of those that are excluded later.
    begin: set[int] = set()
    continuing: set[int] = set()
    task.facts["distinct_words"] = 0
    for block in sum_blocks(_blocks_of_shard(task), task.job.work / "parts"):
        block.write(target)
        task.facts["distinct_words"] += len(block.lengths)
        found = kind.characters(block)
        begin |= found[0]
        continuing |= found[1]
    task.result.update(begin=sorted(begin), continuing=sorted(continuing))


def train(task: Task) -> None:
    """Task function: merge the symbols of the words, and write ``tokenizer.json``."""
    settings: TrainTokenizerSettings = task.job.settings
    kind = make_trainer(settings)
    shards = range(_num_shards(task.manifest))
    results = [read_marker(task, "sum", index)["result"] for index in shards]
    paths = [task.part(SUMS, index) for index in shards]
    tokens = kind.alphabet(_union(results, "begin"), _union(results, "continuing"))
    choice = select_words(paths, settings.max_word_bytes)
    with WordSymbols(task.job.work / "parts", choice.words, choice.size) as words:
        for path in paths:
            for block in read_blocks(path):
                selected = block.only(choice.selected(block))
                words.add(*kind.symbols(selected), selected.counts)
        pairs = PairMerger(words, tokens, prefix=kind.prefix).merges(settings.vocab_size, settings.min_frequency)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    trained = kind.file(vocabulary, [(tokens[left], tokens[right]) for left, right in pairs])
    task.create(task.job.output).write(trained.encode())
    task.facts.update(vocab_size=len(tokens), special_tokens={token: vocabulary[token] for token in kind.special})
    if choice.num_excluded_words:
        percentage = f"{100 * choice.excluded_occurrences / choice.occurrences:.2g} %"
        task.facts["excluded"] = {"rare words": choice.num_excluded_words, "of all words": percentage}


def _union(results: Iterable[dict[str, list[int]]], name: str) -> set[int]:
    return {point for one in results for point in one[name]}
