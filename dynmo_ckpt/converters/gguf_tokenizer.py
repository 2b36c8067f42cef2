"""The tokenizer of a GGUF file: tokens, scores, types and merges from the files of a Hugging Face directory.

llama.cpp has the pre-tokenizers of known models built in, under names. A wrong name splits text in other places without
a message, so the rules of ``tokenizer.json`` are compared with those of each name, and other rules are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, parse_any_json
from .._common.errors import MissingExtraError
from ..io.errors import CorruptError, UnsupportedError
from ..io.files import read_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_O200K = (
    f"{_BEFORE_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}|{_BEFORE_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The expressions by which text is split before bytes are mapped to letters -> llama.cpp's name. Of two models with the
# same expressions, one has ignore_merges: no merges in a word that is a token.
SPLITS = {
    (f"{_WORDS}\\p{{N}}{{1,3}}{_REST}",): "llama-bpe",
    (f"{_WORDS}\\p{{N}}{_REST}",): "qwen2",
    (_O200K,): "gpt-4o",
    _DEEPSEEK: "deepseek-v3",
}
WITH_MERGES = {"llama-bpe": "dbrx"}
# A vocabulary of tiktoken has a merge for each way to divide a token, so that merging ends in the word itself.
EITHER_MERGES = ("gpt-4o",)
ID_KEYS = ("bos", "eos", "pad", "unk")
NO_TOKENIZER = "; --tokenizer with an empty directory writes the model without one"

AddKeys = Callable[[Any], None]


def tokenizer_keys(folder: Path, vocab_size: int, config: Mapping[str, Any] | None) -> tuple[AddKeys, str]:
    """A function that adds the tokenizer's keys to a ``GGUFWriter``, and the name of its kind.

    Args:
        folder: the directory of the tokenizer's files; it may have none.
        vocab_size: number of rows of the embedding; missing tokens are added as unused ones.
        config: the ``config.json`` of the model, which has the ids of special tokens, or None.

    Raises:
        CorruptError: an invalid file, or more tokens than rows.
        MissingExtraError: sentencepiece is needed and not installed.
        UnsupportedError: a tokenizer that llama.cpp does not have.
    """
    if (folder / "tokenizer.model").is_file():
        found = _sentencepiece(folder)
    elif (folder / "tokenizer.json").is_file():
        found = _byte_level(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        found = _gpt2_files(folder)
    else:
        return (lambda writer: writer.add_tokenizer_model("no_vocab")), "none"
    if len(found.tokens) > vocab_size:
        raise CorruptError(f"{folder}: the tokenizer has {len(found.tokens)} tokens; the model has {vocab_size} rows")
    found.fill(vocab_size)
    settings = _object(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    chat = read_file(template).decode(errors="replace") if template.is_file() else settings.get("chat_template")
    add_bos = settings.get("add_bos_token", found.add_bos)

    def add(writer: Any) -> None:
        found.add(writer)
        for name in ID_KEYS:
            value = (config or {}).get(f"{name}_token_id")
            # Of several end tokens, llama.cpp stores one.
            value = value[0] if isinstance(value, list) and value else value
            if type(value) is int and 0 <= value < vocab_size:
                getattr(writer, f"add_{name}_token_id")(value)
        if isinstance(add_bos, bool):
            writer.add_add_bos_token(add_bos)
        if isinstance(settings.get("add_eos_token"), bool):
            writer.add_add_eos_token(settings["add_eos_token"])
        if isinstance(chat, str):
            writer.add_chat_template(chat)

    return add, found.kind


class _Vocabulary:
    """Tokens by id, with what llama.cpp needs of their kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokens: list[str] = []
        self.types: list[int] = []
        self.scores: list[float] = []
        self.merges: list[str] = []
        self.add_bos: bool | None = None
        self.add_space: bool | None = None

    def place(self, number: int, token: str, kind: int, score: float = 0.0) -> None:
        """Set the token with an id; gaps are filled with unused tokens."""
        self.fill(number + 1)
        self.tokens[number], self.types[number], self.scores[number] = token, kind, score

    def fill(self, count: int) -> None:
        """Add unused tokens up to ``count``."""
        for number in range(len(self.tokens), count):
            self.tokens.append(f"[PAD{number}]")
            self.types.append(UNUSED)
            self.scores.append(-10000.0)

    def add(self, writer: Any) -> None:
        """Add the keys to a ``GGUFWriter``."""
        is_spm = self.kind == "llama"
        writer.add_tokenizer_model("llama" if is_spm else "gpt2")
        writer.add_tokenizer_pre("default" if is_spm else self.kind)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if is_spm:
            writer.add_token_scores(self.scores)
        else:
            writer.add_token_merges(self.merges)
        if self.add_space is not None:
            writer.add_add_space_prefix(self.add_space)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        found = parse_any_json(read_file(path, MAX_TABLE_BYTES), MAX_TABLE_BYTES)
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: must be a JSON object")
    return found


def _byte_level(path: Path) -> _Vocabulary:
    """A byte-level BPE of ``tokenizer.json``."""
    document = _object(path)
    try:
        model = document["model"]
        found = _Vocabulary(_merging(path, model, _pre_tokenizer(path, document)))
        for token, number in model["vocab"].items():
            _place(path, found, number, token, NORMAL)
        found.merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        for token in document.get("added_tokens") or []:
            _place(path, found, token["id"], token["content"], CONTROL if token.get("special") else USER_DEFINED)
        found.add_bos = _begins_with_special(document.get("post_processor"))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"{path}: not a tokenizer file: {error}") from error
    return found


def _place(path: Path, found: _Vocabulary, number: Any, token: Any, kind: int, score: float = 0.0) -> None:
    # A number far beyond the vocabulary would fill the memory with unused tokens.
    if type(number) is not int or not 0 <= number < 1 << 24 or not isinstance(token, str):
        raise CorruptError(f"{path}: a token has an invalid id or text")
    found.place(number, token, kind, score)


def _pre_tokenizer(path: Path, document: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rules that split text."""
    if document["model"].get("type", "BPE") != "BPE":
        raise UnsupportedError(f"{path}: {document['model'].get('type')} is not written to GGUF{NO_TOKENIZER}")
    rules, normalizer = document.get("pre_tokenizer") or {}, document.get("normalizer")
    steps = rules.get("pretokenizers", []) if rules.get("type") == "Sequence" else [rules]
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise UnsupportedError(f"{path}: add_prefix_space is not written to GGUF{NO_TOKENIZER}")
    if normalizer == {"type": "Sequence", "normalizers": []}:
        normalizer = None
    name = None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        name = "gpt-2"
    splits = steps[:-1]
    if kinds == ["Split"] * len(splits) + ["ByteLevel"] and splits and not steps[-1].get("use_regex", True):
        whole = all(step.get("behavior") == "Isolated" and not step.get("invert") for step in splits)
        patterns = tuple(step.get("pattern", {}).get("Regex", "") for step in splits)
        name = SPLITS.get(patterns) if whole else None
    if name is None or (normalizer is not None and (name, normalizer.get("type")) != ("qwen2", "NFC")):
        raise UnsupportedError(
            f"{path}: the rules that split text are none of gpt-2, {', '.join(SPLITS.values())}; llama.cpp would "
            f"tokenize differently{NO_TOKENIZER}"
        )
    return name


def _merging(path: Path, model: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of a split with its merges; refuses settings of BPE that llama.cpp does not have."""
    unlike = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    whole_words = bool(model.get("ignore_merges"))
    found = name if whole_words else WITH_MERGES.get(name, name)
    if whole_words and name != "llama-bpe" and name not in EITHER_MERGES:
        unlike.append("ignore_merges")
    if unlike:
        raise UnsupportedError(f"{path}: llama.cpp's {found} does not have {unlike[0]} of this model{NO_TOKENIZER}")
    return found


def _begins_with_special(processor: Any) -> bool | None:
    """Whether a post-processor puts a special token before a text; None where there is no template."""
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    singles = [step["single"] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    return "SpecialToken" in singles[0][0] if singles else None


def _gpt2_files(folder: Path) -> _Vocabulary:
    """GPT-2's ``vocab.json`` and ``merges.txt``."""
    found = _Vocabulary("gpt-2")
    for token, number in _object(folder / "vocab.json").items():
        # The end token is the only one that no merge makes.
        _place(folder / "vocab.json", found, number, token, CONTROL if token == "<|endoftext|>" else NORMAL)
    lines = read_file(folder / "merges.txt", MAX_TABLE_BYTES).decode(errors="replace").split("\n")
    found.merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    return found


def _sentencepiece(folder: Path) -> _Vocabulary:
    """A ``tokenizer.model``, with the added tokens of ``tokenizer.json`` or ``added_tokens.json``."""
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingExtraError("sentencepiece", "gguf") from error
    path = folder / "tokenizer.model"
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=read_file(path, MAX_TABLE_BYTES))
        count = model.vocab_size()
    except (RuntimeError, ValueError, OSError) as error:
        raise CorruptError(f"{path}: not a model of sentencepiece: {error}") from error
    found = _Vocabulary("llama")
    for number in range(count):
        kinds = ((model.is_unknown, UNKNOWN), (model.is_control, CONTROL), (model.is_unused, UNUSED))
        kind = next((kind for test, kind in (*kinds, (model.is_byte, BYTE)) if test(number)), NORMAL)
        found.place(number, model.id_to_piece(number), kind, model.get_score(number))
    found.add_space = model.encode("a", out_type=str)[0].startswith("▁")
    for number, token, special in _added_tokens(folder):
        if type(number) is int and 0 <= number < count:
            continue  # a token of the model itself
        _place(path, found, number, token, CONTROL if special else USER_DEFINED, -1000.0)
    return found


def _added_tokens(folder: Path) -> list[tuple[Any, Any, bool]]:
    document = _object(folder / "tokenizer.json")
    if document:
        listed = document.get("added_tokens") or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise CorruptError(f"{folder / 'tokenizer.json'}: added_tokens must be objects")
        return [(each.get("id"), each.get("content"), bool(each.get("special"))) for each in listed]
    return [(number, token, True) for token, number in _object(folder / "added_tokens.json").items()]
