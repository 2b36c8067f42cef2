"""The shape of a model, from our configuration or a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .formats._document import read_json


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the costs of a transformer depend on.

    Attributes:
        layers: blocks; for an encoder-decoder model those of the decoder.
        encoder_layers: blocks of the encoder, 0 where there is none.
        gated: whether the MLP has three matrices (SwiGLU and its kin) instead of two.
        experts, experts_per_token: 1 and 1 for a dense model.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    sequence: int
    gated: bool = False
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = True
    encoder_layers: int = 0

    @property
    def attention_params(self) -> int:
        """Weights of the projections of one attention, without biases and norms."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_params(self) -> int:
        """Weights of one MLP (of one expert)."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding table."""
        return self.vocabulary * self.hidden


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length", "sequence_length"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
}
_GATED = ("llama", "mixtral", "mistral", "qwen2")


def from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """The shape that a configuration describes; raises ``UsageError`` naming all that is missing."""

    def find(name: str) -> Any:
        return next((config[key] for key in _NAMES[name] if config.get(key) is not None), None)

    family = str(config.get("model_type") or config.get("family") or "gpt")
    needed = {name: find(name) for name in ("layers", "hidden", "heads", "vocabulary")}
    missing = [f"{name} ({' or '.join(_NAMES[name])})" for name, value in needed.items() if value is None]
    if missing:
        raise UsageError(f"{source}: missing {', '.join(missing)}")
    wrong = [name for name, value in needed.items() if not isinstance(value, int) or value < 1]
    if wrong:
        raise UsageError(f"{source}: {', '.join(wrong)} must be whole numbers above 0")
    hidden, heads = int(needed["hidden"]), int(needed["heads"])
    return ModelSpec(
        family=family,
        layers=int(needed["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config.get("d_kv") or hidden // heads),
        ffn=int(find("ffn") or 4 * hidden),
        vocabulary=int(needed["vocabulary"]),
        sequence=int(find("sequence") or 1024),
        gated=family in _GATED or "gated" in str(config.get("feed_forward_proj", "")),
        experts=int(config.get("num_local_experts") or config.get("num_experts") or 1),
        experts_per_token=int(config.get("num_experts_per_tok") or 1),
        tied=bool(config.get("tie_word_embeddings", family not in _GATED)),
        encoder_layers=int(config.get("num_layers") or 0) if family == "t5" else 0,
    )


def load_spec(path: Path) -> ModelSpec:
    """Read a ``config.json``, or one in a directory."""
    file = path / "config.json" if path.is_dir() else path
    document = read_json(file)
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must hold a JSON object")
    return from_config(document, str(file))
