"""The shape of a model, from our configuration or a Hugging Face ``config.json``.

Families: GPT, BERT, T5, Llama, Mixtral and their kin. Parameter counts are exact, with biases, norms, positions and the
extra layers of each family's head; tests hold them against the published counts of GPT-2, BERT, T5, Llama and Mixtral.
"""

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
        biases: whether the matrices have biases, and the norms too (LayerNorm instead of RMSNorm).
        positions: rows of a learned position table; 0 where there is none.
        token_types: rows of a table of token types; 0 where there is none.
        relative_buckets: of T5's relative positions, kept by the first block of each stack.
        head_transform: whether the head has a dense layer and a norm before the vocabulary (BERT).
        pooler: whether the head has a pooler and a binary classifier.
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
    biases: bool = True
    positions: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    head_transform: bool = False
    pooler: bool = False

    @property
    def norm_params(self) -> int:
        """Weights of one norm."""
        return self.hidden * (2 if self.biases else 1)

    @property
    def attention_matrices(self) -> tuple[int, int]:
        """Weights of the projections of one attention: queries, keys and values; output."""
        each = self.hidden * self.head_size
        return each * (self.heads + 2 * self.kv_heads), each * self.heads

    def attention_params(self, ranks: int) -> int:
        """All parameters of one attention on one tensor-parallel rank, its norm with it."""
        biases = (self.head_size * (self.heads + 2 * self.kv_heads)) // ranks + self.hidden if self.biases else 0
        return sum(self.attention_matrices) // ranks + biases + self.norm_params

    @property
    def expert_matrices(self) -> tuple[int, ...]:
        """Weights of the matrices of one MLP (of one expert)."""
        return (self.hidden * self.ffn,) * (3 if self.gated else 2)

    def mlp_params(self, ranks: int) -> int:
        """All parameters of one MLP, with all experts, the router and the norm, on one tensor-parallel rank."""
        biases = ((2 if self.gated else 1) * self.ffn // ranks + self.hidden) if self.biases else 0
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.experts * (sum(self.expert_matrices) // ranks + biases) + router + self.norm_params

    @property
    def table_params(self) -> int:
        """Weights of the word table."""
        return self.vocabulary * self.hidden

    def embedding_params(self, ranks: int) -> int:
        """Parameters of the embedding: words, positions, token types."""
        return self.table_params // ranks + (self.positions + self.token_types) * self.hidden

    def head_extra_params(self, ranks: int) -> int:
        """Parameters of the head beside the vocabulary's matrix."""
        extra = self.norm_params
        if self.head_transform:
            extra += self.hidden * self.hidden + self.hidden + self.norm_params + self.vocabulary // ranks
        if self.pooler:
            extra += self.hidden * self.hidden + 3 * self.hidden + 2
        return extra

    def relative_params(self, ranks: int) -> int:
        """Parameters of the relative positions of a stack."""
        return self.relative_buckets * self.heads // ranks

    @property
    def params(self) -> int:
        """All parameters of the model; a tied weight counts once."""
        blocks = self.layers * (self.attention_params(1) + self.mlp_params(1))
        blocks += self.encoder_layers * (self.attention_params(1) + self.mlp_params(1))
        ends = self.embedding_params(1) + self.head_extra_params(1) + (0 if self.tied else self.table_params)
        if self.encoder_layers:
            blocks += self.layers * self.attention_params(1) + 2 * self.relative_params(1)
            ends += self.norm_params
        return blocks + ends


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("padded_vocab_size", "vocab_size"),
    "sequence": ("seq_length", "sequence_length", "encoder_seq_length", "max_position_embeddings", "n_positions"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "sequence_length"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
}
_GATED = ("llama", "mixtral", "mistral", "qwen2")
_GATED_ACTIVATIONS = ("swiglu", "geglu")
_T5_SEQUENCE = 512


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return default if value is None else bool(value)


def _counts(config: Mapping[str, Any], family: str, hidden: int, heads: int) -> dict[str, int]:
    """The whole numbers that a family may leave out."""
    return {
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_size": int(config.get("head_dim") or config.get("d_kv") or config.get("kv_channels") or hidden // heads),
        "experts": int(config.get("num_local_experts") or config.get("num_experts") or 1),
        "experts_per_token": int(config.get("num_experts_per_tok") or config.get("moe_top_k") or 1),
        "encoder_layers": (
            int(config.get("num_encoder_layers") or config.get("num_layers") or 0) if family == "t5" else 0
        ),
        "relative_buckets": (
            int(config.get("relative_attention_num_buckets") or config.get("relative_buckets") or 32)
            if family == "t5" and config.get("position_embedding") in (None, "relative")
            else 0
        ),
    }


def _padded_vocabulary(config: Mapping[str, Any], size: int) -> int:
    """The rows of the word table: our runs pad them to a multiple."""
    multiple = int(config.get("make_vocab_size_divisible_by") or 1) * int(config.get("tensor_model_parallel_size") or 1)
    return -(-size // multiple) * multiple


def _learned_positions(config: Mapping[str, Any], family: str, rows: int) -> int:
    """Rows of the position table."""
    stated = config.get("position_embedding") or config.get("position_embedding_type")
    if stated in ("rotary", "rope", "relative") or (stated is None and family in (*_GATED, "t5")):
        return 0
    return rows


def from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """The shape that a configuration describes; raises ``UsageError`` naming all that is missing."""

    def find(name: str) -> Any:
        return next((config[key] for key in _NAMES[name] if config.get(key) is not None), None)

    family = str(config.get("model_type") or config.get("family") or "gpt")
    needed = {name: find(name) for name in ("layers", "hidden", "heads", "vocabulary")}
    if family == "t5" and needed["layers"] is None:
        needed["layers"] = config.get("num_encoder_layers")
    missing = [f"{name} ({' or '.join(_NAMES[name])})" for name, value in needed.items() if value is None]
    if missing:
        raise UsageError(f"{source}: missing {', '.join(missing)}")
    wrong = [name for name, value in needed.items() if not isinstance(value, int) or value < 1]
    if wrong:
        raise UsageError(f"{source}: {', '.join(wrong)} must be whole numbers above 0")
    hidden, heads = int(needed["hidden"]), int(needed["heads"])
    activation = str(config.get("activation") or config.get("feed_forward_proj") or "")
    gated = family in _GATED or "gated" in activation or activation in _GATED_ACTIVATIONS
    sequence = int(find("sequence") or (_T5_SEQUENCE if family == "t5" else 1024))
    bert = family == "bert"
    return ModelSpec(
        family=family,
        layers=int(needed["layers"]),
        hidden=hidden,
        heads=heads,
        ffn=int(find("ffn") or 4 * hidden),
        vocabulary=_padded_vocabulary(config, int(needed["vocabulary"])),
        sequence=sequence,
        gated=gated,
        tied=_flag(config, "tie_word_embeddings", _flag(config, "tied_embeddings", family not in _GATED)),
        biases=family not in (*_GATED, "t5") and config.get("normalization") != "rmsnorm",
        positions=_learned_positions(config, family, int(find("positions") or sequence)),
        token_types=int(config.get("type_vocab_size") or config.get("num_tokentypes") or (2 if bert else 0)),
        head_transform=bert,
        pooler=_flag(config, "binary_head", bert),
        **_counts(config, family, hidden, heads),
    )


def load_spec(path: Path) -> ModelSpec:
    """Read a ``config.json``, our ``manifest.json`` or ``run.json``, or one of these in a directory."""
    names = ("config.json", "manifest.json", "run.json")
    file = path
    if path.is_dir():
        file = next((path / name for name in names if (path / name).is_file()), path / names[0])
    document = read_json(file)
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must hold a JSON object")
    if document.get("format") == "dynmo.run" and isinstance(document.get("config"), dict):
        return from_config(_flat(document["config"]), str(file))
    if isinstance(document.get("model"), dict):
        document = document["model"]
    return from_config(document, str(file))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run without their concerns."""
    return {name: value for part in config.values() if isinstance(part, dict) for name, value in part.items()}
