"""Which ids are the special tokens of a tokenizer: one rule for data sets, conversions and generation.

::

    tokenizer_config.json, special_tokens_map.json   name tokens, as in transformers the first one with precedence
    config.json, generation_config.json              state ids, those of the model
    otherwise                                        the first of END_TOKENS that is a token

A vocabulary alone does not show its end token: that of Qwen's chat models has ``<|endoftext|>``, and ends at
``<|im_end|>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .document import MAX_TABLE_BYTES, read_any_json

# Later files have precedence.
TOKENIZER_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
MODEL_SETTINGS = ("config.json", "generation_config.json")
ID_KEYS = ("bos", "eos", "pad", "unk")
# Known names of end tokens, in order of preference.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eod>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[EOS]",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|im_end|>",
)
# BERT has no other token at the end of a text.
DOCUMENT_ENDS = (*END_TOKENS, "[SEP]")


def merged_settings(documents: Iterable[Any]) -> dict[str, Any]:
    """What the documents of ``TOKENIZER_SETTINGS`` state, in this order; null states nothing."""
    found: dict[str, Any] = {}
    for document in documents:
        if isinstance(document, Mapping):
            found |= {key: value for key, value in document.items() if value is not None}
    return found


def named_token(settings: Mapping[str, Any], name: str) -> str | None:
    """The special token of a name, such as ``eos``, in the settings of a tokenizer; None where there is none."""
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def stated_ids(models: Iterable[Mapping[str, Any] | None], name: str) -> tuple[int, ...]:
    """The ids of a name, such as ``eos``, in the first configuration of a model that states any."""
    for model in models:
        text = (model or {}).get("text_config")
        for part in (model or {}, text if isinstance(text, Mapping) else {}):
            value = part.get(f"{name}_token_id")
            listed = value if isinstance(value, list) else [value]
            if found := tuple(each for each in listed if type(each) is int and each >= 0):
                return found
    return ()


def special_ids(
    ids: Mapping[str, int],
    settings: Mapping[str, Any],
    models: Sequence[Mapping[str, Any] | None] = (),
    ends: Sequence[str] = END_TOKENS,
) -> dict[str, tuple[int, ...]]:
    """The ids of special tokens by their name in ``ID_KEYS``; a name without a token is missing.

    Args:
        ids: the ids of all tokens.
        settings: of the tokenizer, as of ``merged_settings``.
        models: configurations of the model, those with precedence first.
        ends: names of end tokens where nothing states one.

    Returns:
        For each name the token of the tokenizer, then those of the model. Where nothing states an end, ``bos`` and
        ``pad`` are the token of ``ends``, too.
    """
    # Without a vocabulary, the ids of the model are all that is known.
    rows = set(ids.values())
    found: dict[str, tuple[int, ...]] = {}
    for name in ID_KEYS:
        token = named_token(settings, name)
        numbers = [ids[token]] if token is not None and token in ids else []
        numbers += [at for at in stated_ids(models, name) if at in rows or not rows]
        if numbers:
            found[name] = tuple(dict.fromkeys(numbers))
    end = next((ids[token] for token in ends if token in ids), None)
    if "eos" not in found and end is not None:
        found = {"bos": (end,), "pad": (end,), **found, "eos": (end,)}
    return found


def end_of_document(folder: Path | None, ids: Mapping[str, int], own: int | None = None) -> int | None:
    """The id of the token that ends a document; None where the tokenizer has none.

    Args:
        folder: the folder of the tokenizer's files, with the settings next to them; None has no settings.
        ids: the ids of all tokens.
        own: the id that the file of the vocabulary itself states, below 0 or None for none.

    Raises:
        DocumentError: a file of the settings is invalid.
    """

    def read(name: str) -> Any:
        path = None if folder is None else folder / name
        return read_any_json(path, MAX_TABLE_BYTES) if path is not None and path.is_file() else None

    models = [each for each in map(read, MODEL_SETTINGS) if isinstance(each, Mapping)]
    models.append({"eos_token_id": own})
    found = special_ids(ids, merged_settings(map(read, TOKENIZER_SETTINGS)), models, DOCUMENT_ENDS)
    return found.get("eos", (None,))[0]
