"""A reference implementation of all model families in numpy; it loads one tensor at a time.

Shapes: T tokens, S attended tokens, D model width, V true vocabulary, N heads, G key-value heads, H head dimension,
F FFN width, E experts, C classes or choices. Sources: GPT-2 (Radford et al. 2019), Megatron's BERT and T5 (Shoeybi et
al. 2019, arXiv:1909.08053), Llama (Touvron et al. 2023, arXiv:2302.13971), Mixtral (Jiang et al. 2024,
arXiv:2401.04088); ``gelu_tanh`` is the approximation of section 2 of Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.reading import Reader, open_sources
from ..maps.decoder_fields import GATED, SIGMOID_GATED, decoder_fields
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor, sources
from ..tensors.equality import as_numbers
from ..tensors.tiled_copy import panels
from .reference_experts import expert_weights
from .rotary import rotary_frequencies

Array = NDArray[np.float32]
Ids = NDArray[np.int64]


def load_array(checkpoint: NativeCheckpoint, name: str, dtype: str | None = None) -> Array:
    """One tensor as float32 in its stored shape; pruned elements are zero.

    Args:
        checkpoint: the checkpoint.
        name: of the tensor, or a tied name.
        dtype: the type to which it is rounded first, as in safetensors; None: not rounded.
    """
    name = checkpoint.manifest["ties"].get(name, name)
    content = checkpoint.tensors[name]
    shape = tuple(checkpoint.manifest["tensors"][name]["shape"])
    cast = None if dtype == content.dtype else dtype
    mask = checkpoint.tensors.get(f"{name}.mask")
    output = OutputTensor(key=name, shape=shape, content=content, mask=mask, cast=cast)
    with open_sources(sources([output])) as files:
        parts = [
            as_numbers(panel.reshape(-1), cast or content.dtype).astype(np.float32)
            for panel in panels(output, Reader(files))
        ]
    return np.concatenate(parts).reshape(shape)


def model_logits(checkpoint: NativeCheckpoint, tokens: Ids, dtype: str | None = None) -> tuple[Array, Array | None]:
    """The logits of a model.

    Args:
        checkpoint: a model of any family; its attention is causal or bidirectional as in the family.
        tokens: token ids, ``[2, T]`` int64. The second row is the input of a T5's decoder. Token types alternate.
        dtype: the type to which weights are rounded first, as in safetensors; None: not rounded.

    Returns:
        Token logits ``[T, V]`` float32 of the first row, and logits ``[2]`` of BERT's binary head or None. A model with
        a task head has logits ``[C]`` in place of the first: of classes, or of two choices, the rows of ``tokens``.
    """
    return _Model(checkpoint, dtype).logits(tokens)


class _Model:
    def __init__(self, checkpoint: NativeCheckpoint, dtype: str | None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.model: Mapping[str, Any] = checkpoint.manifest["model"]
        self.family: str = self.model["family"]
        self.relative = self.model.get("position_embedding") == "relative"
        self.fields = decoder_fields(self.model)

    def load(self, name: str) -> Array:
        return load_array(self.checkpoint, name, self.dtype)

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def logits(self, tokens: Ids) -> tuple[Array, Array | None]:
        kind = self.model.get("task_head")
        if kind:
            rows = tokens if kind == "multichoice" else tokens[:1]
            return np.concatenate(
                [self.linear(f"head.{kind}", self.pooled(self.encoded(row)))[0] for row in rows]
            ), None
        vocabulary = self.model["vocab_size"]
        if self.family == "t5":
            x_TD = self.embed("encoder.embedding", tokens[0])
            for i in range(self.model["num_layers"]):
                x_TD = self.block(f"encoder.layers.{i}", x_TD, causal=False)
            memory_SD = self.norm("encoder.norm", x_TD)
            x_TD = self.embed("decoder.embedding", tokens[1])
            for i in range(self.model["num_decoder_layers"]):
                x_TD = self.block(f"decoder.layers.{i}", x_TD, causal=True, memory_SD=memory_SD)
            x_TD = self.norm("head.norm", x_TD)
        else:
            x_TD = self.encoded(tokens[0])
        binary = None
        if self.model.get("binary_head"):
            binary = self.linear("head.binary", self.pooled(x_TD))[0]
        if self.family == "bert":
            x_TD = self.norm("head.dense_norm", self.activate(self.linear("head.dense", x_TD)))
        # The T5 of transformers scales the output of the decoder where the head is tied to the embedding.
        if self.relative:
            x_TD = x_TD * np.float32(self.model["hidden_size"] ** -0.5)
        x_TD = x_TD / np.float32(self.fields["logits_scaling"])
        result = x_TD @ self.load("head.weight")[:vocabulary].T
        if self.has("head.bias"):
            result = result + self.load("head.bias")[:vocabulary]
        return _capped(result, self.fields["final_logit_softcapping"]), binary

    def encoded(self, tokens_T: Ids) -> Array:
        """The normalized output ``[T, D]`` of the layers of a family with one stack."""
        x_TD = self.embed("embedding", tokens_T)
        for i in range(self.model["num_layers"]):
            x_TD = self.block(f"layers.{i}", x_TD, causal=self.family != "bert")
        return self.norm("head.norm", x_TD)

    def pooled(self, x_TD: Array) -> Array:
        """The pooled output ``[1, D]`` of the first token, for BERT's binary and task heads."""
        result: Array = np.tanh(self.linear("head.pooler", x_TD[:1]))
        return result

    def embed(self, name: str, tokens_T: Ids) -> Array:
        x_TD: Array = self.load(f"{name}.word.weight")[tokens_T] * np.float32(self.fields["embedding_scale"])
        if self.fields["position_embedding"] == "learned":
            x_TD = x_TD + self.load(f"{name}.position.weight")[: len(tokens_T)]
        types = self.model.get("num_tokentypes", 0)
        if types:
            x_TD = x_TD + self.load(f"{name}.tokentype.weight")[np.arange(len(tokens_T)) % types]
        return x_TD

    def block(self, name: str, x_TD: Array, *, causal: bool, memory_SD: Array | None = None) -> Array:
        attention = self.latent_attention if self.model.get("kv_lora_rank") else self.attention
        x_TD = x_TD + attention(f"{name}.attention", x_TD, causal=causal)
        if memory_SD is not None:
            x_TD = x_TD + self.cross_attention(f"{name}.cross_attention", x_TD, memory_SD)
        inner_TD = self.before(f"{name}.mlp", x_TD)
        experts = self.has(f"{name}.mlp.router.weight")
        return x_TD + self.after(f"{name}.mlp", (self.experts if experts else self.mlp)(f"{name}.mlp", inner_TD))

    def before(self, name: str, x_TD: Array) -> Array:
        """The normalized input of a sublayer."""
        return x_TD if self.fields["norm_placement"] == "post" else self.norm(f"{name}.norm", x_TD)

    def after(self, name: str, y_TD: Array) -> Array:
        """The output of a sublayer, normalized or multiplied where the model does so."""
        y_TD = y_TD * np.float32(self.fields["residual_multiplier"])
        return y_TD if self.fields["norm_placement"] == "pre" else self.norm(f"{name}.post_norm", y_TD)

    def norm(self, name: str, x_TD: Array) -> Array:
        epsilon = np.float32(self.model["layernorm_epsilon"])
        kind = self.fields["normalization"]
        if kind in ("rmsnorm", "rmsnorm_1p") or self.relative:
            scaled: Array = x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + epsilon)
            return scaled * (self.load(f"{name}.weight") + np.float32(kind == "rmsnorm_1p"))
        centered = x_TD - x_TD.mean(-1, keepdims=True)
        scale = self.load(f"{name}.weight") / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
        result: Array = centered * scale + self.load(f"{name}.bias")
        return result

    def linear(self, name: str, x: Array) -> Array:
        result: Array = x @ self.load(f"{name}.weight").T
        return result + self.load(f"{name}.bias") if self.has(f"{name}.bias") else result

    def attention(self, name: str, x_TD: Array, *, causal: bool) -> Array:
        heads = self.model["num_attention_heads"]
        groups = self.model.get("num_key_value_heads", heads)
        # R rows of each group: its query heads, then one key head and one value head.
        shape = (len(x_TD), groups, heads // groups + 2, -1)
        qkv_TGRH = self.linear(f"{name}.qkv", self.before(name, x_TD)).reshape(shape)
        q_TGQH, k_TGH, v_TGH = qkv_TGRH[:, :, :-2], qkv_TGRH[:, :, -2], qkv_TGRH[:, :, -1]
        if self.fields["qk_norm"]:
            q_TGQH = self.norm_heads(f"{name}.query_norm", q_TGQH)
            k_TGH = self.norm_heads(f"{name}.key_norm", k_TGH)
        window = self.window(name)
        without = self.fields["no_rope_freq"]
        if self.fields["position_embedding"] == "rotary" and not (without and without[int(name.split(".")[-2])]):
            is_local = window is not None and self.fields["local_rotary_base"] is not None
            q_TGQH, k_TGH = (self.apply_rotary(x, is_local=is_local) for x in (q_TGQH, k_TGH))
        repeat = heads // groups
        q_NTH = q_TGQH.reshape(len(x_TD), heads, -1).transpose(1, 0, 2)
        k_NTH, v_NTH = (np.repeat(x, repeat, axis=1).transpose(1, 0, 2) for x in (k_TGH, v_TGH))
        bias_NTS = self.relative_bias(name, len(x_TD), causal=causal) if self.relative else None
        if self.fields["attention_scale"] is not None:
            # The scores below are divided by the square root of the head size.
            q_NTH = q_NTH * np.float32(self.fields["attention_scale"] * math.sqrt(q_NTH.shape[-1]))
        mixed_TR = _attend(
            q_NTH,
            k_NTH,
            v_NTH,
            causal=causal,
            bias_NTS=bias_NTS,
            window=window,
            cap=self.fields["attn_logit_softcapping"],
            sinks_N=self.sinks(name, heads),
        )
        return self.after(name, self.linear(f"{name}.dense", mixed_TR))

    def sinks(self, name: str, heads: int) -> Array | None:
        """A further logit of each head's softmax; None without."""
        if self.fields["softmax_off_by_one"]:
            return np.zeros(heads, np.float32)
        return self.load(f"{name}.sinks") if self.fields["attention_sinks"] else None

    def latent_attention(self, name: str, x_TD: Array, *, causal: bool) -> Array:
        """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), by its formulas."""
        model, heads, tokens = self.model, self.model["num_attention_heads"], len(x_TD)
        plain, rotated, latent = model["qk_head_dim"], model["qk_pos_emb_head_dim"], model["kv_lora_rank"]
        x_TD = self.before(name, x_TD)
        query_TR = x_TD
        if model.get("q_lora_rank"):
            query_TR = self.latent_norm(f"{name}.query_latent_norm", self.linear(f"{name}.query_down", x_TD))
        q_TNK = self.linear(f"{name}.query_up", query_TR).reshape(tokens, heads, plain + rotated)
        down_TR = self.linear(f"{name}.kv_down", x_TD)
        latent_TC = self.latent_norm(f"{name}.kv_latent_norm", down_TR[:, :latent])
        kv_TNR = self.linear(f"{name}.kv_up", latent_TC).reshape(tokens, heads, -1)
        turned_TNR = self._rotated(self.pairs(q_TNK[..., plain:]), False)
        key_TNR = np.broadcast_to(self._rotated(self.pairs(down_TR[:, None, latent:]), False), turned_TNR.shape)
        q_NTK = np.concatenate([q_TNK[..., :plain], turned_TNR], -1).transpose(1, 0, 2)
        k_NTK = np.concatenate([kv_TNR[..., :plain], key_TNR], -1).transpose(1, 0, 2)
        scaling = self.fields["rotary_scaling"] or {}
        of_all, factor = scaling.get("mscale_all_dim"), float(scaling.get("factor", 1))
        if of_all and factor > 1:
            q_NTK = q_NTK * np.float32((0.1 * of_all * math.log(factor) + 1) ** 2)
        mixed_TR = _attend(q_NTK, k_NTK, kv_TNR[..., plain:].transpose(1, 0, 2), causal=causal)
        return self.after(name, self.linear(f"{name}.dense", mixed_TR))

    def latent_norm(self, name: str, x: Array) -> Array:
        """RMSNorm of a latent, whose epsilon is not that of the model's other norms."""
        scaled: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-6))
        return scaled * self.load(f"{name}.weight")

    def pairs(self, x: Array) -> Array:
        """Neighboring elements as elements of two halves, where the model rotates neighbors."""
        if not self.model.get("rotary_interleaved", True):
            return x
        return np.concatenate([x[..., ::2], x[..., 1::2]], -1)

    def window(self, name: str) -> int | None:
        """The keys that a token of a layer attends to; None: all. ``name`` is that of its attention."""
        types = self.fields["layer_types"]
        is_local = types is None or types[int(name.split(".")[-2])] == "sliding_attention"
        return self.model.get("sliding_window") if is_local else None

    def norm_heads(self, name: str, x: Array) -> Array:
        """Queries or keys ``[T, ..., H]``, normalized by head, or all heads of a token together."""
        if self.fields["qk_norm"] == "head":
            return self.norm(name, x)
        return self.norm(name, x.reshape(len(x), -1)).reshape(x.shape)

    def relative_bias(self, name: str, tokens: int, *, causal: bool) -> Array:
        """The relative position bias ``[N, T, T]`` of the attention scores (T5, arXiv:1910.10683, section 2.1).

        Args:
            name: of an attention of the stack.
            tokens: number of tokens T.
            causal: keys after the query are masked, so all buckets are for those before it.
        """
        # All layers of a stack share the table of its first layer.
        table_BN = self.load(f"{name.split('.')[0]}.layers.0.attention.relative.weight")
        count, max_distance = len(table_BN), self.model.get("relative_max_distance", 128)
        ahead_TS = np.arange(tokens)[None] - np.arange(tokens)[:, None]
        offset_TS = np.zeros_like(ahead_TS)
        if not causal:
            count //= 2
            offset_TS = (ahead_TS > 0) * count
        gap_TS = np.maximum(-ahead_TS, 0) if causal else np.abs(ahead_TS)
        exact = count // 2
        ratio = np.log(np.maximum(gap_TS, 1).astype(np.float32) / exact) / math.log(max_distance / exact)
        # The first half of the buckets has one distance each, the others logarithmic ranges up to max_distance.
        wide_TS = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
        bias_NTS: Array = table_BN[offset_TS + np.where(gap_TS < exact, gap_TS, wide_TS)].transpose(2, 0, 1)
        return bias_NTS

    def cross_attention(self, name: str, x_TD: Array, memory_SD: Array) -> Array:
        heads = self.model["num_attention_heads"]
        q_TNH = self.linear(f"{name}.query", self.norm(f"{name}.norm", x_TD)).reshape(len(x_TD), heads, -1)
        kv_SN2H = self.linear(f"{name}.key_value", memory_SD).reshape(len(memory_SD), heads, 2, -1)
        q_NTH, k_NSH, v_NSH = (x.transpose(1, 0, 2) for x in (q_TNH, kv_SN2H[:, :, 0], kv_SN2H[:, :, 1]))
        # A bias of zero, because T5's cross-attention has no positions, but unscaled scores as well.
        no_bias = np.zeros(1, np.float32) if self.relative else None
        return self.linear(f"{name}.dense", _attend(q_NTH, k_NSH, v_NSH, causal=False, bias_NTS=no_bias))

    def apply_rotary(self, x: Array, *, is_local: bool = False) -> Array:
        """Rotary embedding of ``x`` ``[T, ..., H]`` by halves of a head (RoFormer, Su et al. 2021, section 3.4.2).

        Args:
            x: queries or keys.
            is_local: with the base of sliding layers.
        """
        width = int(x.shape[-1] * self.fields["rotary_fraction"])
        if width < x.shape[-1]:
            return np.concatenate([self._rotated(x[..., :width], is_local), x[..., width:]], -1)
        return self._rotated(x, is_local)

    def _rotated(self, x: Array, is_local: bool) -> Array:
        width, fields = x.shape[-1], self.fields
        if is_local:
            fields = {"rotary_base": fields["local_rotary_base"], "rotary_scaling": None}
        inverse, magnitude = rotary_frequencies(fields, width, len(x))
        angles = np.outer(np.arange(len(x)), inverse).astype(np.float32)
        # Both halves of a head have the same angles: element i rotates with element i + H / 2.
        angles = np.concatenate([angles, angles], -1).reshape(len(x), *[1] * (x.ndim - 2), width)
        low, high = x[..., : width // 2], x[..., width // 2 :]
        result: Array = x * np.cos(angles) + np.concatenate([-high, low], -1) * np.sin(angles)
        return result * np.float32(magnitude)

    def mlp(self, name: str, x_TD: Array) -> Array:
        if self.model["activation"] in GATED:
            gate_TF, up_TF = self.linear(f"{name}.gate", x_TD), self.linear(f"{name}.up", x_TD)
            if self.model["activation"] == "clamped_swiglu":
                limit = np.float32(self.fields["swiglu_limit"])
                gate_TF, up_TF = np.minimum(gate_TF, limit), np.clip(up_TF, -limit, limit)
            if self.model["activation"] in SIGMOID_GATED:
                up_TF = up_TF + np.float32(self.fields["swiglu_offset"])
            inner_TF: Array = self.activate(gate_TF) * up_TF
            return self.linear(f"{name}.fc2", inner_TF)
        return self.linear(f"{name}.fc2", self.activate(self.linear(f"{name}.fc1", x_TD)))

    def activate(self, x: Array) -> Array:
        if self.model["activation"] == "relu":
            return np.maximum(x, np.float32(0))
        if self.model["activation"] == "squared_relu":
            return np.square(np.maximum(x, np.float32(0)))
        if self.model["activation"] in ("swiglu", *SIGMOID_GATED):
            slope = self.fields["swiglu_alpha"] if self.model["activation"] in SIGMOID_GATED else 1
            silu: Array = x / (1 + np.exp(np.float32(-slope) * x))
            return silu
        if self.model["activation"] in ("gelu_tanh", "geglu"):
            gate = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))
        else:
            # numpy has no erf.
            gate = np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2)))
        result: Array = np.float32(0.5) * x * (1 + gate)
        return result

    def experts(self, name: str, x_TD: Array) -> Array:
        """The weighted experts of each token, and the shared experts."""
        bias = f"{name}.router.expert_bias"
        # Not rounded: the biases are float32 in files of every type.
        bias_E = load_array(self.checkpoint, bias) if self.has(bias) else None
        weights_TE = expert_weights(self.model, self.linear(f"{name}.router", x_TD), bias_E)
        result = np.zeros_like(x_TD)
        for expert in range(self.model["num_experts"]):
            rows = np.flatnonzero(weights_TE[:, expert])
            if rows.size:
                part = self.mlp(f"{name}.experts.{expert}", x_TD[rows])
                result[rows] += weights_TE[rows, expert, None] * part
        if self.model.get("moe_shared_ffn_size"):
            shared_TD = self.mlp(f"{name}.shared", x_TD)
            if self.has(f"{name}.shared_router.weight"):
                shared_TD = shared_TD / (1 + np.exp(-self.linear(f"{name}.shared_router", x_TD)))
            result += shared_TD
        return result


def _capped(x: Array, cap: float | None) -> Array:
    """``x`` with a soft cap; unchanged where that is None."""
    return x if cap is None else np.tanh(x / np.float32(cap)) * np.float32(cap)


def _attend(
    q_NTH: Array,
    k_NSH: Array,
    v_NSH: Array,
    *,
    causal: bool,
    bias_NTS: Array | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks_N: Array | None = None,
) -> Array:
    """Attention ``[T, N x H]``, causal to the last ``window`` keys; a bias, as in T5, is added to unscaled scores.

    ``sinks_N`` is a further score of each head, whose probability is dropped.
    """
    scores_NTS = q_NTH @ k_NSH.transpose(0, 2, 1)
    scores_NTS = scores_NTS / np.float32(math.sqrt(q_NTH.shape[-1])) if bias_NTS is None else scores_NTS + bias_NTS
    scores_NTS = _capped(scores_NTS, cap)
    if causal:
        causal_TT = np.tri(q_NTH.shape[1], dtype=bool)
        if window is not None:
            causal_TT &= ~np.tri(q_NTH.shape[1], k=-window, dtype=bool)
        scores_NTS = np.where(causal_TT, scores_NTS, -np.inf)
    if sinks_N is not None:
        sinks_NT1 = np.broadcast_to(sinks_N[:, None, None], (*scores_NTS.shape[:2], 1))
        scores_NTS = np.concatenate([scores_NTS, sinks_NT1], -1)
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(-1, keepdims=True))
    weights_NTS /= weights_NTS.sum(-1, keepdims=True)
    if sinks_N is not None:
        weights_NTS = weights_NTS[..., :-1]
    mixed: Array = (weights_NTS @ v_NSH).transpose(1, 0, 2).reshape(q_NTH.shape[1], -1)
    return mixed
