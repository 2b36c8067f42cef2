"""The settings of every step, each flag declared once. Light: the commands' help needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .._common.document import MAX_COUNT, MAX_SIZE
from .._common.errors import UsageError
from .options import setting

MAX_PERMUTATIONS = 1 << 16
MAX_SEED = (1 << 32) - 1
"""The largest seed that numpy and datasketch take."""
MAX_WORKERS = 4096
MAX_TASKS = 1 << 20
MAX_BYTES = 1 << 40
MAX_PAGE_BYTES = 1 << 27
"""Of a fetched page: its row in the journal, where a byte may take 6, stays within ``MAX_TABLE_BYTES``."""


@dataclass(frozen=True, kw_only=True)
class ExtractWikiSettings:
    """Extract the articles of MediaWiki XML dumps: {"id", "revid", "url", "title", "text"}."""

    namespaces: tuple[str, ...] = setting(("0",), help="Numbers of the namespaces to extract. Repeat for several.")
    lists: bool = setting(False, help="Keep the items of lists, each as a line that begins with '- '.")
    url_base: str = setting("", help="What stands before ?curid=ID in the URLs [default: as the dump says]")

    def __post_init__(self) -> None:
        """Refuse namespaces that are not numbers: no page would be in them."""
        for namespace in self.namespaces:
            if not (namespace.isascii() and namespace.isdecimal()):
                raise UsageError(f"--namespaces {namespace!r}: must be a number of a namespace, such as 0 for articles")


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Put files of documents one behind the other, their lines as they are."""


@dataclass(frozen=True, kw_only=True)
class AddIdSettings:
    """Give each document a number, counted from 1 over all inputs in their order."""

    id_prefix: str = setting(help="What stands before the number: PREFIX-0000000001.")
    id_key: str = setting("adlr_id", help="Key of the new entry.")
    rewrite: bool = setting(False, help="Replace an entry that is there already.")


class Jaccard(StrEnum):
    """Which set the number of common shingles is divided by."""

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
    """What finding near-duplicates needs to know."""

    json_key: str = setting("text", help="Key of the text in each document; dots go into nested objects.")
    id_key: tuple[str, ...] = setting(
        ("url",),
        help="Key of a document's name; of several (repeat) the first that it has. Documents without one, and those "
        "whose name is not their own, are named FILE@OFFSET.",
    )
    threshold: float = setting(
        0.5, help="Pairs count from this Jaccard index of their shingles on (0 to 1).", minimum=0, maximum=1
    )
    jaccard: Jaccard = setting(
        Jaccard.UNION, help="Divide the common shingles by the union, or by the smaller or larger set."
    )
    num_seeds: int = setting(
        100, help="Number of MinHash permutations a document.", minimum=1, maximum=MAX_PERMUTATIONS
    )
    num_bands: int = setting(
        10,
        help="Bands that the permutations are cut into; documents that agree in a whole band are compared.",
        minimum=1,
        maximum=MAX_PERMUTATIONS,
    )
    heuristic_iter: int = setting(
        -1,
        help="Documents of a bucket that are compared with all others of it, one after the other; -1 is all of them.",
        minimum=-1,
        maximum=MAX_COUNT,
    )
    shingle_characters: int = setting(5, help="Length of a shingle in characters.", minimum=1, maximum=1000)
    seed: int = setting(1234, help="Seed of the permutations.", minimum=0, maximum=MAX_SEED)
    load_fingerprints: tuple[Path, ...] = setting(
        (),
        file=True,
        help="Folder of fingerprints of earlier documents, which count as the first ones. Repeat for several.",
    )
    save_fingerprints: Path | None = setting(
        None,
        output=True,
        folder=True,
        help="Folder to keep the fingerprints of all documents in, loaded ones included.",
    )

    def __post_init__(self) -> None:
        """Refuse bands of different sizes, and a search that compares nothing."""
        if self.num_bands >= 1 and self.num_seeds % self.num_bands:
            raise UsageError(
                f"--num-seeds {self.num_seeds} permutations do not divide into --num-bands {self.num_bands}; "
                "choose a divisor"
            )
        if self.heuristic_iter == 0:
            raise UsageError("--heuristic-iter 0: compares no documents; give at least 1, or -1 for all")


@dataclass(frozen=True, kw_only=True)
class FindDuplicatesSettings(MatchSettings):
    """List pairs of near-duplicates: MinHash bands find candidates, their true Jaccard index decides."""


@dataclass(frozen=True, kw_only=True)
class DedupSettings(MatchSettings):
    """Remove near-duplicates, all but the first of each group: find, group and remove in one."""

    threshold: float = setting(
        0.9,
        help="Documents are duplicates from this Jaccard index of their character shingles on (0 to 1).",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class RemoveDuplicatesSettings:
    """Remove all documents but the first of each group that group-duplicates wrote."""

    groups: Path = setting(file=True, help="The groups to remove: the output of group-duplicates.")
    id_key: tuple[str, ...] = setting(
        ("url",), help="Key of a document's name; of several (repeat) the first that it has, as in find-duplicates."
    )


class Model(StrEnum):
    """The tokenizers that can be trained."""

    BPE = "bpe"
    WORDPIECE = "wordpiece"
    WORDPIECE_LOWER = "wordpiece-lower"


GPT2_END = "<|endoftext|>"
MAX_WORD_BYTES = 1 << 30
"""32 bits number the symbols of the words."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerSettings:
    """Train a tokenizer on the documents: byte-level BPE, or WordPiece."""

    model: Model = setting(Model.BPE, help="Byte-level BPE (as GPT-2), or WordPiece (as BERT), cased or lower-cased.")

    json_key: str = setting("text", help="Key of the text in each document; dots go into nested objects.")
    vocab_size: int = setting(
        8192, help="Entries of the vocabulary, special tokens and the 256 bytes included.", minimum=1, maximum=MAX_SIZE
    )
    min_frequency: int = setting(2, help="A pair must occur this often to be merged.", minimum=1, maximum=MAX_COUNT)
    max_word_bytes: int = setting(
        1 << 24,
        help="Bytes of distinct words to merge, at most: the rarest beyond are left out, and the summary says how "
        "many. While it merges, each byte takes 20 bytes of disk, and no memory.",
        minimum=1,
        maximum=MAX_WORD_BYTES,
    )
    special_tokens: tuple[str, ...] = setting(
        (),
        help="Special tokens, which take the first ids; repeat for several "
        "[default: <|endoftext|> for bpe; [PAD] [UNK] [CLS] [SEP] [MASK] for wordpiece]",
    )

    def __post_init__(self) -> None:
        """Refuse a vocabulary that has no room for all bytes."""
        least = 256 + len(set(self.special_tokens or (GPT2_END,)))
        if self.model is Model.BPE and self.vocab_size < least:
            raise UsageError(f"--vocab-size {self.vocab_size}: the bytes and special tokens alone need {least}")


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
    """``NAME=FILE`` or ``NAME=FILE:KEY`` as name, file and the keys of its questions.

    Raises:
        UsageError: it is neither, or the name is unknown and no key is given.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise UsageError(f"--task {text!r} must have the form NAME=FILE or NAME=FILE:KEY")
    path, colon, key = rest.rpartition(":")
    if not colon or "/" in key or Path(rest).exists():
        path, key = rest, ""
    keys = (key,) if key else TASK_KEYS.get(name)
    if keys is None:
        raise UsageError(
            f"--task {text!r}: name the key, as in {name}={rest}:question; known are {', '.join(TASK_KEYS)}"
        )
    return name, Path(path), keys


@dataclass(frozen=True, kw_only=True)
class DecontaminateSettings:
    """Cut text that downstream tasks ask for out of the documents, by word n-grams."""

    json_key: str = setting("text", help="Key of the text in each document; dots go into nested objects.")
    task: tuple[str, ...] = setting(
        (),
        names=("--tasks",),
        help="NAME=FILE or NAME=FILE:KEY of a task (JSON or JSON lines); repeat for several. The key is known for "
        "lambada, squad, trivia_qa, web_questions, race, drop, natural_questions, coqa, piqa.",
    )
    name: tuple[str, ...] = setting((), help="Names in split_id instead of those of the tasks. Repeat for several.")
    load_dictionary: Path | None = setting(None, file=True, help="Use a saved dictionary; nothing is counted.")
    save_dictionary: Path | None = setting(None, output=True, help="Save the dictionary, without the common n-grams.")
    max_ngram_size: int = setting(13, help="Words of an n-gram.", minimum=1, maximum=1000)
    min_ngram_size: int = setting(
        8,
        help="Task texts of fewer words are not looked for; up to the maximum, as a whole.",
        minimum=1,
        maximum=1000,
    )
    key_threshold: int = setting(
        10, help="N-grams in this many documents and more are common, and stay.", minimum=1, maximum=MAX_COUNT
    )
    remove_char_each_side: int = setting(
        200, help="Characters to cut on each side, up to the end of a sentence.", minimum=0, maximum=MAX_COUNT
    )
    filter_text_char_len: int = setting(
        200, help="Pieces of at most this many characters are dropped.", minimum=0, maximum=MAX_COUNT
    )
    splits_count: int = setting(10, help="Documents of more pieces are dropped.", minimum=0, maximum=MAX_COUNT)

    def __post_init__(self) -> None:
        """Refuse sizes of n-grams that contradict each other."""
        if self.min_ngram_size > self.max_ngram_size:
            raise UsageError(
                f"--min-ngram-size {self.min_ngram_size} must be at most --max-ngram-size {self.max_ngram_size}"
            )

    def named_files(self) -> list[Path]:
        """The tasks' files, for ``options.files_of``."""
        return [parse_task(text)[1] for text in self.task]


@dataclass(frozen=True, kw_only=True)
class ShuffleSettings:
    """Put the documents in a random order that the seed fixes."""

    seed: int = setting(1234, help="Seed of the order.", minimum=0, maximum=MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class SplitSentencesSettings:
    """Write each sentence of a document on its own line."""

    json_key: str = setting("text", help="Key of the text in each document; dots address nested objects.")


class TokenDtype(StrEnum):
    """The types of tokens that are written."""

    UINT16 = "uint16"
    INT32 = "int32"
    INT64 = "int64"


class TokenizerType(StrEnum):
    """The tokenizers that binarize knows, by Megatron's names."""

    HUGGING_FACE = "HuggingFaceTokenizer"
    GPT2 = "GPT2BPETokenizer"
    BERT_LOWER = "BertWordPieceLowerCase"
    BERT_CASE = "BertWordPieceCase"
    SENTENCE_PIECE = "SentencePieceTokenizer"
    LLAMA = "Llama2Tokenizer"
    WHITESPACE = "WhitespaceVocab"


class Engine(StrEnum):
    """Which library runs a BPE tokenizer; their ids are the same."""

    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"


@dataclass(frozen=True, kw_only=True)
class BinarizeSettings:
    """Tokenize documents into an indexed data set."""

    json_keys: tuple[str, ...] = setting(
        ("text",),
        names=("--json-key",),
        help="Key of the text in each document; repeat for several, each becomes a data set of its own.",
    )
    tokenizer_type: TokenizerType = setting(
        TokenizerType.HUGGING_FACE, help="What the tokenizer's files are, by Megatron's names."
    )
    tokenizer: Path | None = setting(
        None,
        file=True,
        names=("--tokenizer-model",),
        help="The tokenizer.json, or the SentencePiece model for SentencePieceTokenizer and Llama2Tokenizer.",
    )
    vocab_file: Path | None = setting(
        None,
        file=True,
        names=("--vocab",),
        help="The vocabulary of the GPT2, Bert and WhitespaceVocab tokenizers (JSON; for Bert one token a line).",
    )
    merge_file: Path | None = setting(None, file=True, help="The merges of GPT2BPETokenizer.")
    append_eod: bool = setting(False, help="Append the end-of-document token to each document.")
    eod_token: str | None = setting(
        None,
        help="The end-of-document token [default: <|endoftext|>; [SEP] for Bert; the model's own for SentencePiece]",
    )
    plain_text: bool = setting(False, help="Each line of the inputs is a document's text, and no JSON object.")
    split_sentences: bool = setting(False, help="Make each sentence a sequence, as BERT and T5 want it.")
    keep_newlines: bool = setting(False, help="Leave the white space behind a sentence on it when splitting.")
    keep_empty: bool = setting(
        False,
        help="Write empty documents as documents of no tokens, and white space as it is, instead of leaving them out.",
    )
    dataset_impl: IndexForm = setting(IndexForm.MMAP, help="Form of the index; cached and lazy have the same bytes.")
    engine: Engine = setting(
        Engine.AUTO,
        data=False,
        help="Library that runs BPE: gigatoken where it can, else tokenizers, sentencepiece; same ids.",
    )

    def data_prefix(self, output: Path, key: str) -> Path:
        """``PREFIX_text_document`` or ``PREFIX_text_sentence``: the data set's name, as in the classic tools."""
        return output.with_name(f"{output.name}_{key}_{'sentence' if self.split_sentences else 'document'}")

    def made_files(self, output: Path) -> list[Path]:
        """The files that a run writes, for ``plan.written_files``."""
        prefixes = [self.data_prefix(output, key) for key in self.json_keys]
        endings = (".bin", ".dataset.json", ".idx")
        return [prefix.with_name(prefix.name + ending) for prefix in prefixes for ending in endings]

    def __post_init__(self) -> None:
        """Refuse two data sets of one name."""
        if len(set(self.json_keys)) < len(self.json_keys):
            raise UsageError(f"--json-keys {' '.join(self.json_keys)}: a key is named twice; each becomes one data set")
        if self.plain_text and self.json_keys != ("text",):
            raise UsageError(
                f"--plain-text: a line of text has no keys; leave out --json-keys {' '.join(self.json_keys)}"
            )


class Utf8(StrEnum):
    """What to do with bytes that are no UTF-8."""

    REJECT = "reject"
    REPLACE = "replace"


class ExecutorName(StrEnum):
    """Where tasks run."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How any step is run."""

    log_interval: int = setting(
        1000,
        data=False,
        help="Documents between two lines of progress, where stderr is no terminal.",
        minimum=1,
        maximum=MAX_COUNT,
    )

    workers: int = setting(
        1,
        help="Processes that work side by side; the output's bytes do not depend on it.",
        data=False,
        minimum=1,
        maximum=MAX_WORKERS,
    )
    executor: ExecutorName = setting(
        ExecutorName.LOCAL,
        data=False,
        help="Run tasks in processes of this machine, on a Ray cluster (RAY_ADDRESS, else one of this machine), or as "
        "Slurm arrays of which each job runs a part.",
    )
    emit_sbatch: Path | None = setting(
        None, data=False, help="Write the script that submits the Slurm arrays to this file; submit nothing."
    )
    task_index: int | None = setting(
        None,
        data=False,
        help="Run only the tasks I, I+N, I+2N, ... of one phase: this is I, counted from 0.",
        minimum=0,
        maximum=MAX_TASKS,
    )
    task_count: int | None = setting(
        None,
        data=False,
        help="This is N of --task-index; with Slurm the jobs of an array [default: 64].",
        minimum=1,
        maximum=MAX_TASKS,
    )
    phase: str | None = setting(
        None, data=False, help="The phase of --task-index [default: the first that is not complete]."
    )
    overwrite: bool = setting(
        False,
        help="Replace existing outputs, and discard an unfinished run with other settings or inputs.",
        data=False,
    )
    max_rejects: float = setting(
        0.01,
        help="Stop with exit code 4 when more than this share of the lines (0 to 1) are no usable documents.",
        data=False,
        minimum=0,
        maximum=1,
    )
    task_bytes: int = setting(
        64 << 20,
        help="Cut uncompressed inputs into tasks of about this many bytes, the end of the last input finer.",
        minimum=1,
        maximum=MAX_BYTES,
    )
    max_line_bytes: int = setting(64 << 20, help="Put longer lines (bytes) aside unread.", minimum=1, maximum=MAX_BYTES)
    utf8: Utf8 = setting(Utf8.REJECT, help="Put lines that are no UTF-8 aside, or replace their bad bytes by U+FFFD.")
