"""The shape of a transformer: sizes of its blocks, embedding and head, and the work of a token in each.

``inputs.model_config`` reads it from configurations. Parameter counts are exact, with biases, norms, positions,
routers and the extra layers of each family's head. Tests compare them with published counts and with transformers' own
models.

``*_params`` count everything that is stored and moved. ``*_matrices`` list only what a token is multiplied with: they
determine the operations, and with a mixture of experts they are far fewer. In both, ``ranks`` is the number of
tensor-parallel ranks, and the result is that of one rank: matrices are sliced, norms and output biases are not
(Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): sizes of the latents and heads.

    Attributes:
        query_rank: of the queries' latent; 0 if queries are projected directly.
        kv_rank: of the latent of keys and values.
        nope, rope: widths of the parts of a head's query and key without and with rotary positions.
        value: width of a head's value.
        biases: whether the projections down and the output have biases.
    """

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    biases: bool = False

    def matrices(self, hidden: int, heads: int, ranks: int) -> tuple[int, ...]:
        """Weights of the projections on one tensor-parallel rank; those down to the latents are on every rank.

        Args:
            hidden: hidden size of the model.
            heads: number of attention heads.
            ranks: number of tensor-parallel ranks.
        """
        wide = heads * (self.nope + self.rope)
        queries = (self.query_rank * hidden, wide * self.query_rank // ranks) if self.query_rank else ()
        return (
            *(queries or (wide * hidden // ranks,)),
            (self.kv_rank + self.rope) * hidden,
            heads * (self.nope + self.value) * self.kv_rank // ranks,
            heads * self.value * hidden // ranks,
        )

    def extra_params(self, hidden: int) -> int:
        """Parameters of the norms of the latents, and biases, in a model of hidden size ``hidden``."""
        biases = self.query_rank + self.kv_rank + self.rope + hidden if self.biases else 0
        return self.query_rank + self.kv_rank + biases


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes that the costs of a transformer depend on.

    Attributes:
        layers: number of blocks; of an encoder-decoder model, those of the decoder.
        encoder_layers: number of blocks of the encoder; 0 without one.
        ffn: hidden size of a dense MLP, and of each expert if ``expert_ffn`` is 0.
        gated: whether an MLP has three matrices (such as SwiGLU) instead of two.
        experts, experts_per_token: 1 and 1 for a dense model.
        expert_ffn, shared_ffn: hidden size of an expert, and of all shared experts together.
        first_dense, sparse_step, dense_only: a block has experts from ``first_dense`` on, each ``sparse_step``-th one,
            except for ``dense_only``.
        norm_biases: whether norms have biases (LayerNorm instead of RMSNorm).
        query_biases, output_biases: of the attention's projections in, and of the one out.
        mlp_biases, expert_biases, router_biases: of the matrices of dense MLPs, of experts, of routers.
        block_norms: number of norms of attention, and of the MLP.
        qk_norm: weights of the norms of queries and keys.
        sinks: whether each head has an extra logit in the softmax (GPT-OSS).
        latent: of multi-head latent attention.
        window: tokens that a local block attends to; ``local_layers`` lists the local blocks (repeated).
        positions: rows of a learned position table; 0 without one.
        token_types: rows of a token-type table; 0 without one.
        relative_buckets: of T5's relative positions, in the first block of each stack.
        head_transform: whether the head has a dense layer and a norm before the vocabulary (BERT).
        pooler: whether the head has a pooler and a binary classifier.
        left_out: descriptions of parts that are not modelled, because training does not use them.
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
    expert_ffn: int = 0
    shared_ffn: int = 0
    first_dense: int = 0
    sparse_step: int = 1
    dense_only: tuple[int, ...] = ()
    tied: bool = True
    encoder_layers: int = 0
    norm_biases: bool = True
    query_biases: bool = True
    output_biases: bool = True
    mlp_biases: bool = True
    expert_biases: bool = False
    router_biases: bool = False
    block_norms: int = 1
    qk_norm: int = 0
    sinks: bool = False
    latent: LatentAttention | None = None
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    positions: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    head_transform: bool = False
    pooler: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def norm_params(self) -> int:
        """Weights of one norm."""
        return self.hidden * (2 if self.norm_biases else 1)

    def attention_matrices(self, ranks: int) -> tuple[int, ...]:
        """Weights of the projections of one attention on one of ``ranks`` tensor-parallel ranks."""
        if self.latent is not None:
            return self.latent.matrices(self.hidden, self.heads, ranks)
        each = self.hidden * self.head_size
        return each * (self.heads + 2 * self.kv_heads) // ranks, each * self.heads // ranks

    def attention_params(self, ranks: int) -> int:
        """All parameters of one attention on one of ``ranks`` tensor-parallel ranks, with its norms."""
        extra = self.block_norms * self.norm_params + self.qk_norm + (self.heads // ranks if self.sinks else 0)
        if self.latent is not None:
            extra += self.latent.extra_params(self.hidden)
        else:
            extra += (self.head_size * (self.heads + 2 * self.kv_heads)) // ranks if self.query_biases else 0
            extra += self.hidden if self.output_biases else 0
        return sum(self.attention_matrices(ranks)) + extra

    @property
    def score_width(self) -> int:
        """Heads times the mean of the widths of a key and of a value: what a score costs, forward, over four."""
        if self.latent is None:
            return self.heads * self.head_size
        return self.heads * (self.latent.nope + self.latent.rope + self.latent.value) // 2

    @property
    def attention_width(self) -> int:
        """Numbers a token between the attention's projections: queries, keys and values of all heads."""
        if self.latent is None:
            return self.head_size * (self.heads + 2 * self.kv_heads)
        return self.heads * (2 * self.latent.nope + self.latent.rope + self.latent.value)

    def keys(self, layer: int, sequence: int) -> int:
        """The most tokens that a token of block ``layer`` attends to, of ``sequence`` tokens.

        A causal mask halves the number on average, but the published formulas count the whole square, and so do these.
        """
        local = bool(self.local_layers) and self.local_layers[layer % len(self.local_layers)]
        return min(self.window, sequence) if self.window is not None and local else sequence

    def has_experts(self, layer: int) -> bool:
        """Whether block ``layer``, counted from 0, has experts instead of a dense MLP."""
        # transformers' rule (Qwen 3 MoE): with a step of 2 the blocks 1, 3, 5 have experts.
        chosen = layer >= self.first_dense and (layer + 1) % self.sparse_step == 0
        return self.experts > 1 and chosen and layer not in self.dense_only

    def _matrices(self, width: int, ranks: int) -> tuple[int, ...]:
        return (self.hidden * width // ranks,) * (3 if self.gated else 2) if width else ()

    def _mlp(self, width: int, ranks: int, biases: bool) -> int:
        """All parameters of an MLP of this width."""
        extra = (2 if self.gated else 1) * width // ranks + self.hidden if biases else 0
        return sum(self._matrices(width, ranks)) + extra

    def mlp_params(self, ranks: int, layer: int) -> int:
        """All parameters of block ``layer``'s MLP, with all experts, router and norms, on one of ``ranks`` ranks."""
        norms = self.block_norms * self.norm_params
        if not self.has_experts(layer):
            return self._mlp(self.ffn, ranks, self.mlp_biases) + norms
        # Each rank routes its tokens to all experts, so the router is not sliced.
        router = self.experts * (self.hidden + self.router_biases)
        shared = self._mlp(self.shared_ffn, ranks, self.mlp_biases) if self.shared_ffn else 0
        return (
            self.experts * self._mlp(self.expert_ffn or self.ffn, ranks, self.expert_biases) + shared + router + norms
        )

    def mlp_matrices(self, ranks: int, layer: int) -> tuple[int, ...]:
        """Weights of the matrices that one token uses in the MLP of block ``layer``, on one of ``ranks`` ranks.

        The experts of a token count as one larger matrix of each kind, as if grouped products were as efficient as one.
        """
        if not self.has_experts(layer):
            return self._matrices(self.ffn, ranks)
        routed = [self.experts_per_token * one for one in self._matrices(self.expert_ffn or self.ffn, ranks)]
        return (*routed, *self._matrices(self.shared_ffn, ranks), self.hidden * self.experts)

    def mlp_width(self, layer: int) -> int:
        """Numbers a token between the matrices of a block's MLP, those of a gated one at their share of the traffic.

        An activation reads and writes a number for each unit of width; a gated one reads two and writes one. ``layer``
        is the block, counted from 0.
        """
        width = self.ffn
        if self.has_experts(layer):
            width = self.experts_per_token * (self.expert_ffn or self.ffn) + self.shared_ffn
        return width * 3 // 2 if self.gated else width

    @property
    def table_params(self) -> int:
        """Weights of the word table."""
        return self.vocabulary * self.hidden

    def embedding_params(self, ranks: int) -> int:
        """Parameters of the embedding on one of ``ranks`` ranks: words (sliced), positions, token types."""
        return self.table_params // ranks + (self.positions + self.token_types) * self.hidden

    def head_extra_params(self, ranks: int) -> int:
        """Parameters of the head next to the vocabulary's matrix, on one of ``ranks`` ranks."""
        extra = self.norm_params
        if self.head_transform:
            extra += self.hidden * self.hidden + self.hidden + self.norm_params + self.vocabulary // ranks
        if self.pooler:
            extra += self.hidden * self.hidden + 3 * self.hidden + 2
        return extra

    def relative_params(self, ranks: int) -> int:
        """Parameters of the relative positions of a stack, on one of ``ranks`` ranks."""
        return self.relative_buckets * self.heads // ranks

    @property
    def params(self) -> int:
        """All parameters of the model; a tied weight counts once."""
        attention = self.attention_params(1)
        blocks = sum(attention + self.mlp_params(1, layer) for layer in range(self.layers))
        blocks += sum(attention + self.mlp_params(1, layer) for layer in range(self.encoder_layers))
        ends = self.embedding_params(1) + self.head_extra_params(1) + (0 if self.tied else self.table_params)
        if self.encoder_layers:
            # Cross-attention of the decoder, a table of relative positions per stack, and the encoder's final norm.
            blocks += self.layers * attention + 2 * self.relative_params(1)
            ends += self.norm_params
        return blocks + ends
