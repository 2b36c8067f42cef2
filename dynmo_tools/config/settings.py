"""Settings of the built-in steps and of a run; each field is a flag and a recipe key. Imports nothing heavy."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .._common.document import (
    MAX_COUNT,
    MAX_SIZE,
    is_count,
)
from .._common.errors import UsageError
from .._common.sentencepiece_json import tokenizer_file_of
from .options import setting
from .tokenizer_paths import TokenizerType, check_is_local, tokenizer_in

EXECUTION, ERRORS = "Execution", "Existing outputs and invalid lines"
"""Sections of help pages."""
# Bounds of numbers: beyond them a run would fail late, in an allocation or in a library, instead of with a message.
DATASET_ENDINGS = (".bin", ".dataset.json", ".idx")
MAX_PERMUTATIONS = 1 << 16
MAX_SEED = (1 << 32) - 1
"""Largest seed that numpy and datasketch accept."""
MAX_WORKERS = 4096
MAX_TASKS = 1 << 20
MAX_BYTES = 1 << 40
MAX_PAGE_BYTES = 1 << 27
"""Bytes of a fetched page: its journal row, with up to 6 bytes per byte, stays within ``MAX_TABLE_BYTES``."""


@dataclass(frozen=True, kw_only=True)
class ExtractWikiSettings:
    """Extract the articles of MediaWiki XML dumps: {"id", "revid", "url", "title", "text"}."""

    namespaces: tuple[str, ...] = setting(("0",), help="Number of a namespace to extract. Repeat for several.")
    lists: bool = setting(False, help="Keep list items, each as a line that starts with '- '.")
    url_base: str = setting("", help="URL before ?curid=ID [default: base of the dump]")

    def __post_init__(self) -> None:
        """Refuse namespaces that are not numbers: no page would match."""
        for namespace in self.namespaces:
            if not is_count(namespace):
                raise UsageError(
                    f"--namespaces {namespace!r}: must be the number of a namespace, such as 0 for articles"
                )


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Concatenate document files; the bytes of each row stay unchanged."""


@dataclass(frozen=True, kw_only=True)
class AddIdSettings:
    """Number the documents, starting at 1, across all inputs in their order."""

    id_prefix: str = setting(help="Prefix of the number: PREFIX-0000000001.")
    # Key, numbers from 1 and ten digits of Megatron's add_id.
    id_key: str = setting("adlr_id", help="Key of the new entry.")
    rewrite: bool = setting(False, help="Replace an existing entry.")


class JaccardDenominator(StrEnum):
    """Denominator of the Jaccard index."""

    UNION = "union"
    MIN = "min"
    MAX = "max"


class IndexForm(StrEnum):
    """The three forms of Megatron's index."""

    MMAP = "mmap"
    CACHED = "cached"
    LAZY = "lazy"


@dataclass(frozen=True, kw_only=True)
class MatchSettings:
    """Settings of the search for near-duplicates."""

    # Seeds, bands, shingles and the threshold of 0.5 are those of Megatron's find_duplicates. 10 bands of 10 values
    # find 98.6 % of the pairs of Jaccard index 0.9 (dedup/minhash.py); the default bands of datasketch find fewer.
    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")
    id_key: tuple[str, ...] = setting(
        ("url",),
        help="Key of a document's name; repeat for alternatives, the first present one counts. Documents without a "
        "unique name are named FILE@OFFSET.",
    )
    threshold: float = setting(0.5, help="Minimum Jaccard index of a pair's shingles (0 to 1).", minimum=0, maximum=1)
    jaccard: JaccardDenominator = setting(
        JaccardDenominator.UNION, help="Denominator of the Jaccard index: the union, the smaller or the larger set."
    )
    num_seeds: int = setting(100, help="Number of MinHash permutations.", minimum=1, maximum=MAX_PERMUTATIONS)
    num_bands: int = setting(
        10,
        help="Number of LSH bands; documents with one equal band are compared.",
        minimum=1,
        maximum=MAX_PERMUTATIONS,
    )
    heuristic_iter: int = setting(
        -1,
        help="Maximum number of documents of a bucket that are compared with all others; -1 compares all.",
        minimum=-1,
        maximum=MAX_COUNT,
        rare=True,
    )
    shingle_characters: int = setting(5, help="Length of a shingle in characters.", minimum=1, maximum=1000)
    seed: int = setting(1234, help="Seed of the permutations.", minimum=0, maximum=MAX_SEED, rare=True)
    load_fingerprints: tuple[Path, ...] = setting(
        (),
        file=True,
        help="Folder of saved fingerprints; its documents precede all inputs. Repeat for several.",
        rare=True,
    )
    save_fingerprints: Path | None = setting(
        None,
        output=True,
        folder=True,
        help="Folder for the fingerprints of all documents, including loaded ones.",
        rare=True,
    )

    def __post_init__(self) -> None:
        """Refuse bands of different sizes, and a search that compares nothing."""
        if self.num_bands >= 1 and self.num_seeds % self.num_bands:
            raise UsageError(
                f"--num-bands {self.num_bands}: must divide --num-seeds {self.num_seeds}; choose a divisor of it"
            )
        if self.heuristic_iter == 0:
            raise UsageError("--heuristic-iter 0: compares no documents; use at least 1, or -1 for all")


@dataclass(frozen=True, kw_only=True)
class FindDuplicatesSettings(MatchSettings):
    """List pairs of near-duplicates. MinHash bands select candidates, their exact Jaccard index decides."""


class Grouping(StrEnum):
    """Groups of duplicates."""

    SIMILAR = "similar"
    CONNECTED = "connected"


@dataclass(frozen=True, kw_only=True)
class DedupSettings(MatchSettings):
    """Remove near-duplicates except the first of each group, in one step."""

    # The threshold that Megatron's README uses for groups.
    threshold: float = setting(
        0.9,
        help="Minimum Jaccard index of duplicates, by character shingles (0 to 1).",
        minimum=0,
        maximum=1,
    )
    grouping: Grouping = setting(
        Grouping.SIMILAR,
        help="Each removed document is similar to the kept one, or connected with it by a chain of similar ones.",
    )
    save_dropped: Path | None = setting(
        None, output=True, help="File for the removed documents, each with the name of the kept one."
    )


@dataclass(frozen=True, kw_only=True)
class RemoveDuplicatesSettings:
    """Remove all documents of each group of group-duplicates except the first."""

    groups: Path = setting(file=True, help="Groups, the output of group-duplicates.")
    id_key: tuple[str, ...] = setting(
        ("url",), help="Key of a document's name, as for find-duplicates; repeat for alternatives."
    )
    save_dropped: Path | None = setting(None, output=True, help="File for the removed documents, with drop_reason.")


class TokenizerModel(StrEnum):
    """Models of tokenizers that can be trained."""

    BPE = "bpe"
    WORDPIECE = "wordpiece"
    WORDPIECE_LOWER = "wordpiece-lower"


GPT2_END = "<|endoftext|>"
MAX_WORD_BYTES = 1 << 30
"""Symbols of words are numbered with 32 bits."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerSettings:
    """Train a tokenizer on the documents: byte-level BPE or WordPiece."""

    model: TokenizerModel = setting(
        TokenizerModel.BPE, help="Byte-level BPE (GPT-2) or WordPiece (BERT), cased or lower-cased."
    )

    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")
    vocab_size: int = setting(
        8192, help="Vocabulary size, including special tokens and the 256 bytes.", minimum=1, maximum=MAX_SIZE
    )
    min_frequency: int = setting(
        2, help="Minimum number of occurrences of a merged pair.", minimum=1, maximum=MAX_COUNT, rare=True
    )
    max_word_bytes: int = setting(
        1 << 24,
        help="Maximum bytes of distinct words; rarer words are excluded and counted in the summary. Merging uses 20 "
        "bytes of disk per byte, and no memory.",
        minimum=1,
        maximum=MAX_WORD_BYTES,
        rare=True,
    )
    special_tokens: tuple[str, ...] = setting(
        (),
        help="Special token; special tokens have the first ids. Repeat for several "
        "[default: <|endoftext|> for bpe; [PAD] [UNK] [CLS] [SEP] [MASK] for wordpiece]",
    )

    def __post_init__(self) -> None:
        """Refuse a vocabulary that is too small for all bytes."""
        minimum = 256 + len(set(self.special_tokens or (GPT2_END,)))
        if self.model is TokenizerModel.BPE and self.vocab_size < minimum:
            raise UsageError(
                f"--vocab-size {self.vocab_size}: must be at least {minimum}, the bytes and special tokens"
            )


# Keys of texts in the files of each task, as Megatron's filter_ngrams reads them; some tasks have several spellings.
TASK_KEYS: dict[str, tuple[str, ...]] = {
    "lambada": ("text",),
    "squad": ("question",),
    "triviaqa": ("question", "Question"),
    "trivia_qa": ("question", "Question"),
    "webqa": ("question", "qText", "utterance"),
    "web_questions": ("question", "qText", "utterance"),
    "race": ("question", "questions"),
    "drop": ("question",),
    "natural_questions": ("question",),
    "coqa": ("questions",),
    "piqa": ("goal",),
}


def parse_task(text: str) -> tuple[str, Path, tuple[str, ...]]:
    """Split ``NAME=FILE`` or ``NAME=FILE:KEY`` into name, file and the keys of its texts.

    Raises:
        UsageError: the text has neither form, or the name is unknown and no key is stated.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise UsageError(f"--task {text!r} must have the form NAME=FILE or NAME=FILE:KEY")
    # A path may contain a colon: an existing file of the complete name counts, and a key has no slash.
    path, colon, key = rest.rpartition(":")
    if not colon or "/" in key or os.path.exists(rest):
        path, key = rest, ""
    keys = (key,) if key else TASK_KEYS.get(name)
    if keys is None:
        raise UsageError(
            f"--task {text!r}: the keys of this task are unknown; state one, as in {name}={rest}:question, "
            f"or use a task of {', '.join(TASK_KEYS)}"
        )
    return name, Path(path), keys


@dataclass(frozen=True, kw_only=True)
class DecontaminateSettings:
    """Remove text of downstream tasks from the documents, by word n-grams."""

    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")
    task: tuple[str, ...] = setting(
        (),
        names=("--tasks",),
        help="NAME=FILE or NAME=FILE:KEY of a task (JSON or JSON lines); repeat for several. KEY is optional for "
        "lambada, squad, trivia_qa, web_questions, race, drop, natural_questions, coqa, piqa.",
    )
    name: tuple[str, ...] = setting(
        (), help="Name in split_id instead of the task names. Repeat for several.", rare=True
    )
    load_dictionary: Path | None = setting(
        None, file=True, help="Saved dictionary; its n-grams are not counted again.", rare=True
    )
    save_dictionary: Path | None = setting(
        None, output=True, help="File for the dictionary without common n-grams.", rare=True
    )
    # Sizes and limits of Megatron's filter_ngrams: n-grams of 8 to 13 words.
    max_ngram_size: int = setting(13, help="Maximum words per n-gram.", minimum=1, maximum=1000)
    min_ngram_size: int = setting(
        8,
        help="Minimum words per n-gram; task texts between the sizes are one n-gram.",
        minimum=1,
        maximum=1000,
    )
    key_threshold: int = setting(
        10,
        help="Number of documents from which an n-gram is common and stays.",
        minimum=1,
        maximum=MAX_COUNT,
        rare=True,
    )
    remove_char_each_side: int = setting(
        200,
        help="Minimum characters to remove on each side, up to a sentence end.",
        minimum=0,
        maximum=MAX_COUNT,
        rare=True,
    )
    filter_text_char_len: int = setting(
        200, help="Maximum characters of dropped pieces.", minimum=0, maximum=MAX_COUNT, rare=True
    )
    splits_count: int = setting(
        10,
        help="Maximum pieces per document; documents with more are dropped.",
        minimum=0,
        maximum=MAX_COUNT,
        rare=True,
    )

    def __post_init__(self) -> None:
        """Refuse n-gram sizes that contradict each other."""
        if self.min_ngram_size > self.max_ngram_size:
            raise UsageError(
                f"--min-ngram-size {self.min_ngram_size} must be at most --max-ngram-size {self.max_ngram_size}"
            )

    def named_files(self) -> list[Path]:
        """Files of the tasks, for ``options.files_of``."""
        return [parse_task(text)[1] for text in self.task]


@dataclass(frozen=True, kw_only=True)
class ShuffleSettings:
    """Shuffle the documents; the seed determines the order."""

    seed: int = setting(1234, help="Seed of the random order.", minimum=0, maximum=MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class SplitSentencesSettings:
    """Write each sentence of a document on its own line."""

    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")


class TokenDtype(StrEnum):
    """Data types of tokens that can be written."""

    UINT16 = "uint16"
    INT32 = "int32"
    INT64 = "int64"


class Engine(StrEnum):
    """Library that runs a BPE tokenizer; all give the same ids."""

    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"


@dataclass(frozen=True, kw_only=True)
class BinarizeSettings:
    """Tokenize documents into an indexed dataset."""

    json_keys: tuple[str, ...] = setting(
        ("text",),
        names=("--json-key",),
        help="Key of the text in each document; repeat for several, one dataset per key.",
    )
    tokenizer_type: TokenizerType = setting(TokenizerType.HUGGING_FACE, help="Tokenizer type, with Megatron's names.")
    tokenizer: Path | None = setting(
        None,
        file=True,
        names=("--tokenizer-model",),
        help="tokenizer.json or SentencePiece model, or the folder that has it.",
    )
    vocab_file: Path | None = setting(
        None,
        file=True,
        names=("--vocab",),
        help="Vocabulary of the GPT2, Bert and WhitespaceVocab tokenizers (JSON; for Bert one token per line).",
    )
    merge_file: Path | None = setting(None, file=True, help="Merges of GPT2BPETokenizer.")
    append_eod: bool = setting(False, help="Append the end-of-document token to each document.")
    eod_token: str | None = setting(
        None,
        help="End-of-document token [default: that of the tokenizer's and the model's configuration]",
        rare=True,
    )
    plain_text: bool = setting(False, help="Read each line of the inputs as the text of a document, not as JSON.")
    split_sentences: bool = setting(False, help="Make each sentence a sequence, for BERT and T5.")
    keep_newlines: bool = setting(False, help="Keep the white space after a sentence when splitting.", rare=True)
    keep_empty: bool = setting(
        False,
        help="Write empty documents without tokens, and tokenize white space, instead of dropping them.",
        rare=True,
    )
    dataset_impl: IndexForm = setting(
        IndexForm.MMAP, help="Form of the index; cached and lazy are identical.", rare=True
    )
    engine: Engine = setting(
        Engine.AUTO,
        data=False,
        help="Library that runs BPE; auto prefers gigatoken. The ids are the same: recent characters use tokenizers.",
        rare=True,
    )

    def data_prefix(self, output: Path, key: str) -> Path:
        """The name of the dataset, as in Megatron's tools: ``PREFIX_text_document`` or ``PREFIX_text_sentence``."""
        return output.with_name(f"{output.name}_{key}_{'sentence' if self.split_sentences else 'document'}")

    def made_files(self, output: Path) -> list[Path]:
        """Files that a run writes, for ``task_manifest.written_files``."""
        prefixes = [self.data_prefix(output, key) for key in self.json_keys]
        return [prefix.with_name(prefix.name + ending) for prefix in prefixes for ending in DATASET_ENDINGS]

    def __post_init__(self) -> None:
        """Refuse two datasets of one name, and find the tokenizer in the directory of a model."""
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", tokenizer_in(self.tokenizer, self.tokenizer_type))
        if len(set(self.json_keys)) < len(self.json_keys):
            raise UsageError(
                f"--json-keys {' '.join(self.json_keys)}: a key occurs twice; each key becomes one dataset"
            )
        if self.plain_text and self.json_keys != ("text",):
            raise UsageError(f"--plain-text: a line of text has no keys; remove --json-keys {' '.join(self.json_keys)}")


@dataclass(frozen=True, kw_only=True)
class BinarizeChatSettings:
    """Tokenize conversations by a chat template, with a loss mask of the assistant's tokens."""

    tokenizer: Path = setting(
        file=True,
        names=("--tokenizer-model",),
        help="tokenizer.json or SentencePiece model, or the folder that has it.",
    )
    chat_template: Path | None = setting(
        None, file=True, help="Jinja file [default: chat_template.jinja, else in tokenizer_config.json, of the model]"
    )
    tokenizer_config: Path | None = setting(
        None,
        file=True,
        help="Special tokens and chat template [default: tokenizer_config.json of the model]",
        rare=True,
    )
    messages_key: str | None = setting(None, help="Key of the messages [default: messages, else conversations]")
    date: str | None = setting(None, help="Date of templates that print it, YYYY-MM-DD.")
    eod_token: str | None = setting(None, help="Token to append to each conversation, if the template does not.")

    @property
    def template_source(self) -> Path | None:
        """The file that has the chat template."""
        return self.chat_template or self.tokenizer_config

    def data_prefix(self, output: Path) -> Path:
        """The name of the dataset of token ids."""
        return output.with_name(f"{output.name}_chat_document")

    def mask_prefix(self, output: Path) -> Path:
        """The name of the dataset of the loss mask: that of the ids, and ``.loss_mask``."""
        return output.with_name(f"{self.data_prefix(output).name}.loss_mask")

    def made_files(self, output: Path) -> list[Path]:
        """Files that a run writes, for ``task_manifest.written_files``."""
        prefixes = [self.mask_prefix(output), self.data_prefix(output)]
        return [prefix.with_name(prefix.name + ending) for prefix in prefixes for ending in DATASET_ENDINGS]

    def __post_init__(self) -> None:
        """Find the files next to the tokenizer, so that the task manifest and the sidecar state them."""
        check_is_local(self.tokenizer, "tokenizer.json")
        object.__setattr__(self, "tokenizer", tokenizer_file_of(self.tokenizer))
        if self.tokenizer_config is None and (found := self.tokenizer.with_name("tokenizer_config.json")).is_file():
            object.__setattr__(self, "tokenizer_config", found)
        if self.chat_template is None and (found := self.tokenizer.with_name("chat_template.jinja")).is_file():
            object.__setattr__(self, "chat_template", found)
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError as error:
                raise UsageError(f"--date {self.date}: must be a date as YYYY-MM-DD") from error


class InvalidUtf8(StrEnum):
    """Handling of invalid UTF-8."""

    REJECT = "reject"
    REPLACE = "replace"


class ExecutorName(StrEnum):
    """Where tasks run."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the execution of any step."""

    log_interval: int = setting(
        1000,
        data=False,
        help="Documents between two progress lines, if stderr is not a terminal.",
        minimum=1,
        maximum=MAX_COUNT,
        panel=EXECUTION,
        rare=True,
    )

    workers: int = setting(
        1,
        help="Number of worker processes; the output does not depend on it.",
        data=False,
        minimum=1,
        maximum=MAX_WORKERS,
        panel=EXECUTION,
    )
    executor: ExecutorName = setting(
        ExecutorName.LOCAL,
        data=False,
        help="Run tasks in processes of this machine, on a Ray cluster (RAY_ADDRESS, else a local one), or in Slurm "
        "job arrays.",
        panel=EXECUTION,
    )
    emit_sbatch: Path | None = setting(
        None,
        data=False,
        help="Write the Slurm submission script to this file without submitting.",
        panel=EXECUTION,
        rare=True,
    )
    task_index: int | None = setting(
        None,
        data=False,
        help="Run only tasks I, I+N, I+2N, ... of one phase; this is I, from 0.",
        minimum=0,
        maximum=MAX_TASKS,
        panel=EXECUTION,
        rare=True,
    )
    task_count: int | None = setting(
        None,
        data=False,
        help="N of --task-index; with Slurm the jobs per array [default: 64].",
        minimum=1,
        maximum=MAX_TASKS,
        panel=EXECUTION,
        rare=True,
    )
    phase: str | None = setting(
        None, data=False, help="Phase of --task-index [default: the first incomplete one].", panel=EXECUTION, rare=True
    )
    overwrite: bool = setting(
        False,
        help="Replace existing outputs, and discard an incomplete run with other settings or inputs.",
        data=False,
        panel=ERRORS,
    )
    max_rejects: float = setting(
        0.01,
        help="Maximum fraction of invalid lines (0 to 1); above it, exit with code 4.",
        data=False,
        minimum=0,
        maximum=1,
        panel=ERRORS,
    )
    task_bytes: int = setting(
        64 << 20,
        help="Bytes of text per task; tasks at the end of the last input are smaller.",
        minimum=1,
        maximum=MAX_BYTES,
        panel=EXECUTION,
        rare=True,
    )
    max_line_bytes: int = setting(
        64 << 20,
        help="Maximum bytes per line; longer lines are rejected.",
        minimum=1,
        maximum=MAX_BYTES,
        panel=ERRORS,
        rare=True,
    )
    utf8: InvalidUtf8 = setting(
        InvalidUtf8.REJECT,
        help="Reject lines of invalid UTF-8, or replace invalid bytes by U+FFFD.",
        panel=ERRORS,
        rare=True,
    )
