"""The tokenizer of a GGUF file: tokens, scores, types and merges from the files of a Hugging Face directory.

llama.cpp has the pre-tokenizers of known models built in, under names. A wrong name splits text in other places without
a message, so the rules of ``tokenizer.json`` are compared with those of each name, and other rules are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES
from .._common.errors import MissingExtraError
from .._common.protobuf import protobuf_fields
from .._common.special_tokens import special_ids
from ..huggingface.tokenizer import read_object
from ..io.errors import CorruptError, UnsupportedError, short_name, short_names
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
# Messages in a model of sentencepiece, and their fields: number, and value where it is missing.
TRAINER, NORMALIZER = 2, 3
MODEL_TYPE, SPACE_AS_SUFFIX = (3, 1), (24, 0)
CHARACTER_MAP, REMOVE_SPACES = (2, b""), (4, 1)
BPE = 2
_ENDS = {"bos": "begin", "eos": "end"}
_NAMED = ("name", "template")
NO_TOKENIZER = "; --tokenizer with an empty directory writes the model without one"

AddKeys = Callable[[Any], None]


def tokenizer_keys(
    folder: Path, vocab_size: int, models: Sequence[Mapping[str, Any] | None]
) -> tuple[AddKeys, str, Sequence[str]]:
    """A function that adds the tokenizer's keys to a ``GGUFWriter``, the name of its kind, and what differs.

    Args:
        folder: the directory of the tokenizer's files; it may have none.
        vocab_size: number of rows of the embedding; missing tokens are added as unused ones.
        models: the configurations of the model, which have ids of special tokens.

    Raises:
        CorruptError: an invalid file, or more tokens than rows.
        MissingExtraError: sentencepiece is needed and not installed.
        UnsupportedError: a tokenizer that llama.cpp does not have.
    """
    settings = _object(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file():
        found = _sentencepiece(folder, settings, vocab_size)
    elif (folder / "tokenizer.json").is_file():
        found = _byte_level(folder / "tokenizer.json", vocab_size)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        found = _gpt2_files(folder)
    else:
        return (lambda writer: writer.add_tokenizer_model("no_vocab")), "none", ()
    if len(found.tokens) > vocab_size:
        raise CorruptError(f"{folder}: the tokenizer has {len(found.tokens)} tokens; the model has {vocab_size} rows")
    found.fill(vocab_size)
    twice = [token for token, count in Counter(found.tokens).items() if count > 1]
    if twice:
        raise CorruptError(f"{folder}: several ids have the text {short_names(twice)}; llama.cpp does not load them")
    found.differences += _stripping(folder, settings, found)
    chat = _chat_templates(folder, settings)
    ids = _special_ids(found, settings, models)
    adds = _added_around(found, settings, ids)

    def add(writer: Any) -> None:
        found.add(writer)
        for name, number in ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        for name, is_added in adds.items():
            getattr(writer, f"add_add_{name}_token")(is_added)
        if chat:
            writer.add_chat_template(chat)

    return add, found.kind, found.differences


def _special_ids(
    found: _Vocabulary, settings: Mapping[str, Any], models: Sequence[Mapping[str, Any] | None]
) -> dict[str, int]:
    """Ids of special tokens, of several the first one.

    Without an id, llama.cpp takes a number of GPT-2's or Llama's vocabulary. Of several end tokens it stores one; a
    second one is the end of a turn, at which it stops as well.
    """
    listed = special_ids({token: number for number, token in enumerate(found.tokens)}, settings, models)
    ids = {name: numbers[0] for name, numbers in listed.items()}
    ends = listed.get("eos", ())
    return ids | {"eot": ends[1]} if len(ends) > 1 else ids


def _added_around(found: _Vocabulary, settings: Mapping[str, Any], ids: dict[str, int]) -> dict[str, bool]:
    """Whether a text begins with the begin token and ends with the end token: by the settings, else by the template.

    An id that ``ids`` lacks is that of the template's token. llama.cpp puts no other tokens around a text.
    """
    adds = {}
    for name in ("bos", "eos"):
        stated, token = settings.get(f"add_{name}_token"), found.around.get(name)
        if isinstance(stated, bool):
            adds[name] = stated
            continue
        if token in found.tokens:
            ids.setdefault(name, found.tokens.index(token))
        if found.around:
            adds[name] = token is not None and name in ids and found.tokens[ids[name]] == token
        if token is not None and not adds[name]:
            found.differences.append(
                f"llama.cpp puts no {short_name(token)} at the {_ENDS[name]} of a text, as this tokenizer does"
            )
    return adds


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """The chat template, or several with their names; empty where there is none."""
    single, legacy = folder / "chat_template.jinja", _object(folder / "chat_template.json")
    further = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if single.is_file():
        text = read_file(single).decode(errors="replace")
        if not further:
            return text
        named = [{"name": path.stem, "template": read_file(path).decode(errors="replace")} for path in further]
        return [{"name": "default", "template": text}, *named]
    found = settings.get("chat_template") or legacy.get("chat_template")
    if isinstance(found, list):
        pairs = [each for each in found if isinstance(each, dict)]
        if len(pairs) != len(found) or any(type(each.get(key)) is not str for each in pairs for key in _NAMED):
            raise CorruptError(f"{folder}: chat_template must be a text, or objects with a name and a template")
        return [{key: each[key] for key in _NAMED} for each in pairs]
    return found if isinstance(found, str) else ""


class _Vocabulary:
    """Tokens by id, with what llama.cpp needs of their kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokens: list[str] = []
        self.types: list[int] = []
        self.scores: list[float] = []
        self.merges: list[str] = []
        self.around: Mapping[str, str | None] = {}
        self.add_space: bool | None = None
        self.differences: list[str] = []

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
    return read_object(path) if path.is_file() else {}


def _byte_level(path: Path, rows: int) -> _Vocabulary:
    """A byte-level BPE of ``tokenizer.json``, without added tokens beyond the rows of the model."""
    document = _object(path)
    try:
        model = document["model"]
        found = _Vocabulary(_merging(path, model, _pre_tokenizer(path, document)))
        for token, number in model["vocab"].items():
            _place(path, found, number, token, NORMAL)
        found.merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        for token in document.get("added_tokens") or []:
            kind = CONTROL if token.get("special") else USER_DEFINED
            if type(token["id"]) is not int or token["id"] < rows:
                _place(path, found, token["id"], token["content"], kind)
        found.around = _around_text(document.get("post_processor"))
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


def _around_text(processor: Any) -> dict[str, str | None]:
    """The special tokens that a post-processor puts before and after a text; empty where there is no template."""
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    singles = [step["single"] for step in steps if step.get("type") == "TemplateProcessing" and step.get("single")]
    if not singles:
        return {}
    ends = {"bos": singles[0][0], "eos": singles[0][-1]}
    found = {name: part["SpecialToken"]["id"] if "SpecialToken" in part else None for name, part in ends.items()}
    if any(token is not None and not isinstance(token, str) for token in found.values()):
        raise ValueError("a special token of post_processor must be a text")
    return found


def _gpt2_files(folder: Path) -> _Vocabulary:
    """GPT-2's ``vocab.json`` and ``merges.txt``."""
    found = _Vocabulary("gpt-2")
    for token, number in _object(folder / "vocab.json").items():
        # The end token is the only one that no merge makes.
        _place(folder / "vocab.json", found, number, token, CONTROL if token == "<|endoftext|>" else NORMAL)
    lines = read_file(folder / "merges.txt", MAX_TABLE_BYTES).decode(errors="replace").split("\n")
    found.merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    return found


def _sentencepiece(folder: Path, settings: Mapping[str, Any], rows: int) -> _Vocabulary:
    """A ``tokenizer.model``, with the added tokens of the other files, without those beyond the rows of the model."""
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingExtraError("sentencepiece", "gguf") from error
    path = folder / "tokenizer.model"
    payload = read_file(path, MAX_TABLE_BYTES)
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=payload)
        count = model.vocab_size()
        symbols = _user_symbols(payload)
        differing = _spm_differences(path, payload)
    except (RuntimeError, ValueError, OSError) as error:
        raise CorruptError(f"{path}: not a model of sentencepiece: {error}") from error
    found = _Vocabulary("llama")
    found.differences = differing
    try:
        found.around = _around_text(_object(folder / "tokenizer.json").get("post_processor"))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"{folder / 'tokenizer.json'}: not a tokenizer file: {error}") from error
    for number in range(count):
        kinds = ((model.is_unknown, UNKNOWN), (model.is_control, CONTROL), (model.is_unused, UNUSED))
        kind = next((kind for test, kind in (*kinds, (model.is_byte, BYTE)) if test(number)), NORMAL)
        kind = USER_DEFINED if number in symbols else kind
        found.place(number, model.id_to_piece(number), kind, model.get_score(number))
    if found.types.count(BYTE) < 256:
        raise UnsupportedError(
            f"{path}: lacks pieces of bytes (byte_fallback), without which llama.cpp ends at an unknown character"
            f"{NO_TOKENIZER}"
        )
    found.add_space = model.encode("a", out_type=str)[0].startswith("▁")
    for number, token, special in _added_tokens(folder, settings):
        if type(number) is int and number >= max(rows, count):
            continue  # of another modality, such as the images of Gemma 3
        if type(number) is int and 0 <= number < count and found.types[number] in (UNKNOWN, BYTE):
            continue
        # llama.cpp finds these tokens in the text as it is, before spaces are replaced.
        text = token.replace("▁", " ") if isinstance(token, str) and not special else token
        _place(path, found, number, text, CONTROL if special else USER_DEFINED, -1000.0)
    return found


def _stripping(folder: Path, settings: Mapping[str, Any], found: _Vocabulary) -> list[str]:
    """A sentence about added tokens that take the spaces next to them, of the first file that has them."""
    listed = _object(folder / "tokenizer.json").get("added_tokens")
    decoder = settings.get("added_tokens_decoder")
    if not listed and isinstance(decoder, dict):
        listed = list(decoder.values())
    stripping = [
        each["content"]
        for each in listed or []
        if isinstance(each, dict) and (each.get("lstrip") or each.get("rstrip")) and each.get("content") in found.tokens
    ]
    if not stripping:
        return []
    return [f"llama.cpp has tokens for spaces next to {short_names(stripping)}, which this tokenizer removes"]


def _spm_differences(path: Path, payload: bytes) -> list[str]:
    """What llama.cpp does otherwise than a model of sentencepiece, in sentences; what changes plain words is refused.

    llama.cpp merges the pair of pieces with the best score, as BPE; a unigram model chooses the likeliest division.
    """
    message = dict(protobuf_fields(payload))

    def field(of: int, number: int, default: int | bytes) -> int | bytes:
        part = message.get(of)
        return dict(protobuf_fields(part if isinstance(part, bytes) else b"")).get(number, default)

    if field(TRAINER, *MODEL_TYPE) != BPE:
        raise UnsupportedError(f"{path}: model_type is not BPE; llama.cpp would tokenize differently{NO_TOKENIZER}")
    if field(TRAINER, *SPACE_AS_SUFFIX):
        raise UnsupportedError(f"{path}: treat_whitespace_as_suffix is not written to GGUF{NO_TOKENIZER}")
    found = []
    if field(NORMALIZER, *CHARACTER_MAP):
        found.append("llama.cpp does not normalize the characters of a text, as this tokenizer.model does")
    if field(NORMALIZER, *REMOVE_SPACES):
        found.append("llama.cpp has a token for each space, also where this tokenizer.model removes spaces")
    return found


def _user_symbols(payload: bytes) -> set[int]:
    """Numbers of the pieces that sentencepiece takes whole; its package has no function that finds them.

    A model is a message of protobuf: field 1 is a piece, whose field 3 is its type, 4 for such symbols.
    """
    pieces = [piece for field, piece in protobuf_fields(payload) if field == 1 and isinstance(piece, bytes)]
    return {number for number, piece in enumerate(pieces) if (3, USER_DEFINED) in protobuf_fields(piece)}


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[tuple[Any, Any, bool]]:
    """Number, text and whether it is special, of the first file that has them."""
    document, decoder = _object(folder / "tokenizer.json"), settings.get("added_tokens_decoder")
    if document:
        listed = document.get("added_tokens") or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise CorruptError(f"{folder / 'tokenizer.json'}: added_tokens must be objects")
        return [(each.get("id"), each.get("content"), bool(each.get("special"))) for each in listed]
    if decoder:
        if not isinstance(decoder, dict) or not all(isinstance(each, dict) for each in decoder.values()):
            raise CorruptError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be objects")
        numbers = [int(key) if key.isdecimal() and len(key) < 10 else key for key in decoder]
        rows = zip(numbers, decoder.values(), strict=True)
        return [(number, each.get("content"), bool(each.get("special"))) for number, each in rows]
    return [(number, token, True) for token, number in _object(folder / "added_tokens.json").items()]
