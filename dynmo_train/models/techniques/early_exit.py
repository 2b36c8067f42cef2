"""Early exit: a token exits after a block when the model is confident; later blocks compute the active tokens only.

Confident adaptive language modeling (Schuster et al. 2022, arXiv:2207.07061, section 3.5) with its three confidence
measures: the *softmax response*, the difference of the two highest probabilities at the exit; *hidden-state
saturation*, the cosine between the stream before and after a sublayer; and a linear *classifier*. Every exit is the
model's own head: all its parameters are tied to ``head``. Exits are trained by their own losses (section 3.2 there;
Elbayad et al. 2020, arXiv:1910.10073).

The softmax response needs the logits of every token: with a large vocabulary it costs as much as an exit saves. The
classifier estimates it from the normalized stream, at the cost of one weight vector. It is trained with the model, by
the binary cross-entropy with the exact response of a sample of the tokens as the target; neither stream nor head gets
a gradient from it. Its minimum is the mean response given the stream, so that thresholds keep their meaning. On the
same sample, the metric ``exit_agreement`` is the share of equal decisions. (The classifier of section 3.5 there is
trained afterwards, and predicts agreement with the last layer, which no earlier pipeline stage has.)

With ``propagate`` the keys and values of exited tokens stay: later blocks compute them from the state in which a token
exited, so that later tokens attend to it (state propagation, section 3.1 there; the same in training, evaluation and
generation). Without it later tokens attend to active tokens only, and an exited token costs nothing.

The loss of an exit may use a sample of the tokens, and of the vocabulary. Of N sampled negatives each stands for
(V - 1) / N ids: the sum of their exponentials is corrected by this factor, the label counts once (Jean et al. 2015,
arXiv:1412.2007; Bengio and Senecal 2008). With all V ids this is the exact loss.

    x_BTD ─▶ gather active tokens ─▶ item ─▶ exit: confidence >= threshold? ─▶ scatter back ─▶ x_BTD
    exited_BT ──────┘                                    └─▶ exited_BT (crosses stage boundaries, without gradient)

Shapes in names: B samples, T tokens, C active tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.random_stream import shared_normal
from ..attention.self_attention import SelfAttention
from ..experts.moe import MoeMlp
from ..layer_list import ItemOutput, ItemSpec, output_of
from ..layers import grouped_linear
from ..layers.feed_forward import Mlp
from ..layers.linear import dense_products_by
from ..layers.softcap import soft_cap, soft_cap_
from ..vocabulary.cross_entropy import chunk_tokens_for
from ..vocabulary.head import Head
from .mixture_of_depths import RoutedBlock
from .token_select import TokenSelection, order_tokens, select_all, select_tokens

# The value that later items read, ``[B, T]`` in the type of the stream: 1 where a token has exited.
EXITED = "exited"
_SELECTION = "_active_tokens"
Measure = Literal["softmax", "saturation", "classifier"]
METRICS = (("exit_share", 1), ("exit_loss", 1))
CLASSIFIER_METRICS = (("exit_agreement", 1),)
# One of this number of tokens has its exact softmax response computed in training, as the target of the classifier.
TOKENS_PER_TARGET = 32
# Untrained, the classifier lets no token exit: sigmoid(-3) is 0.047.
CLASSIFIER_BIAS = -3.0


@dataclass(frozen=True, kw_only=True)
class ExitSettings:
    """Where and when tokens exit.

    Attributes:
        layers: blocks (from 0) after which tokens may exit, ascending.
        loss_weight: weight of the losses of all exits together, shared equally.
        threshold: confidence, 0 to 1, from which a token exits; at 1 none does.
        measure: ``softmax`` response, hidden-state ``saturation``, or the ``classifier`` that estimates the former.
        token_share: fraction of the active tokens whose loss an exit computes in training.
        vocabulary_samples: sampled ids of the vocabulary in the loss of an exit; 0 means the whole vocabulary.
        layer_weights: loss weight of each exit; empty divides ``loss_weight`` equally.
        propagate: whether later tokens attend to exited ones, by keys and values of the state in which they exited.
    """

    layers: tuple[int, ...]
    loss_weight: float
    threshold: float
    measure: Measure
    token_share: float = 1.0
    vocabulary_samples: int = 0
    layer_weights: tuple[float, ...] = ()
    propagate: bool = False

    def weight_of(self, layer: int) -> float:
        """Weight of the loss of the exit after block ``layer``."""
        if self.layer_weights:
            return self.layer_weights[self.layers.index(layer)]
        return self.loss_weight / len(self.layers)


def depth_weights(layers: tuple[int, ...], total: float) -> tuple[float, ...]:
    """Weights of exits that grow with depth: proportional to ``1 + 2 + ... + l`` after ``l`` blocks.

    LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710, section 4.1.2): after 4 and 8 blocks 10 and 36, of 46.

    Args:
        layers: blocks (from 0) after which tokens may exit.
        total: sum of the weights.
    """
    sums = [(layer + 1) * (layer + 2) // 2 for layer in layers]
    return tuple(total * each / sum(sums) for each in sums)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the classifier of an exit learned from a sample of the tokens, float32 scalars.

    Attributes:
        loss: binary cross-entropy with the exact softmax response.
        agreement: share of the tokens whose decision is that of the softmax response.
    """

    loss: torch.Tensor
    agreement: torch.Tensor


class Exit(nn.Module):
    """An exit after an item: the loss of the head on the active tokens, and which of them exit.

    Args:
        head: a copy of the model's head; all its parameters are tied.
        settings: of the model's exits.
        layer: the block that the exit comes after.
        width: of the model; for a classifier.
        device: where the classifier's parameters are created.
    """

    classifier: nn.Linear | None

    def __init__(
        self, head: nn.Module, settings: ExitSettings, layer: int, width: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.head, self.settings, self.weight_of_loss = head, settings, settings.weight_of(layer)
        self.classifier = None
        if settings.measure == "classifier":
            self.classifier = nn.Linear(width, 1, device=device)
            # Constants: what the placement draws from the generator does not change.
            nn.init.zeros_(self.classifier.weight)
            nn.init.constant_(self.classifier.bias, CLASSIFIER_BIAS)

    def confidence(self, before_BCD: torch.Tensor, after_BCD: torch.Tensor) -> torch.Tensor:
        """The confidence of each token, float32 ``[B, C]``, without a gradient.

        Args:
            before_BCD: the stream before the item, ``[B, C, D]``.
            after_BCD: the stream after the item, ``[B, C, D]``.
        """
        with torch.no_grad():
            if self.settings.measure == "softmax":
                return self._response(after_BCD)
            if self.classifier is not None:
                return self._estimate(after_BCD).sigmoid()
            return F.cosine_similarity(before_BCD.float(), after_BCD.float(), dim=-1)

    def exits(self, confidence_BC: torch.Tensor) -> torch.Tensor:
        """Which tokens exit, bool ``[B, C]``; none at threshold 1, whatever is rounded to 1.

        Args:
            confidence_BC: confidence of each token, float32 ``[B, C]``.
        """
        threshold = self.settings.threshold
        return confidence_BC >= threshold if threshold < 1.0 else torch.zeros_like(confidence_BC, dtype=torch.bool)

    def forward(
        self, before_BCD: torch.Tensor, after_BCD: torch.Tensor, labels_BC: torch.Tensor | None, real_BC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide which tokens exit, and compute the exit's loss.

        Args:
            before_BCD: the stream before the item, ``[B, C, D]``.
            after_BCD: the stream after the item, ``[B, C, D]``.
            labels_BC: int64 token ids, ``[B, C]``; None computes no loss.
            real_BC: bool ``[B, C]``, false for padding entries.

        Returns:
            Which tokens exit, bool ``[B, C]``, and the mean loss of the real tokens, a float32 scalar, unweighted; it
            is 0 in evaluation and without labels.
        """
        wants_loss = labels_BC is not None and self.training
        is_sampled = self.settings.token_share < 1.0 or self.settings.vocabulary_samples > 0
        loss = after_BCD.new_zeros((), dtype=torch.float32)
        if labels_BC is not None and wants_loss and not is_sampled and self.settings.measure == "softmax":
            logits_BCV = self.head.logits(after_BCD).float()  # type: ignore[operator]
            top_BC2 = logits_BCV.detach().softmax(-1).topk(2, dim=-1).values
            losses = F.cross_entropy(logits_BCV.flatten(0, 1), labels_BC.reshape(-1), reduction="none")
            real = real_BC.reshape(-1).to(losses.dtype)
            loss = (losses * real).sum() / real.sum().clamp(min=1.0)
            return self.exits(top_BC2[..., 0] - top_BC2[..., 1]) & real_BC, loss
        leaves_BC = torch.zeros_like(real_BC)
        if self.settings.threshold < 1.0:
            # Detached: which tokens exit is a decision, which has no gradient.
            leaves_BC = self.exits(self.confidence(before_BCD.detach(), after_BCD.detach())) & real_BC
        if labels_BC is not None and wants_loss and is_sampled:
            loss = self._sampled_loss(after_BCD, labels_BC, real_BC)
        elif labels_BC is not None and wants_loss:
            # In chunks of tokens: nothing else reads the logits. Not the forward of a head with a second loss.
            loss = Head.forward(self.head, after_BCD, labels_BC, real_BC)  # type: ignore[arg-type] # a copy of a head
        return leaves_BC, loss

    @torch.no_grad()
    def _response(self, x_BCD: torch.Tensor) -> torch.Tensor:
        """The softmax response of each token, float32 ``[B, C]``; the logits of a chunk are in memory at a time."""
        head = cast("Head", self.head)
        x_ND = x_BCD.reshape(-1, x_BCD.shape[-1])
        chunk_tokens = chunk_tokens_for(x_ND.device.type, head.vocabulary)
        weight_VD, bias_V, _ = head.local_rows()
        # One buffer for all chunks: the allocation of new pages took a fifth of the time.
        buffer_PV = x_ND.new_empty(min(chunk_tokens, len(x_ND)) if head.region is None else 0, len(weight_VD))
        parts = []
        for x_PD in x_ND.split(chunk_tokens):
            if head.region is not None:
                logits_PV = head.logits(x_PD[None])[0]
            else:
                logits_PV = buffer_PV[: len(x_PD)]
                torch.mm(head.features(x_PD[None])[0], weight_VD.t(), out=logits_PV)
                if bias_V is not None:
                    logits_PV += bias_V
                soft_cap_(logits_PV, head.softcap)
            parts.append(response_of(logits_PV.float()))
        return torch.cat(parts).view(x_BCD.shape[:2])

    def _estimate(self, x_BCD: torch.Tensor) -> torch.Tensor:
        """The classifier's logit of each token, float32 ``[B, C]``; a gradient reaches its own parameters only."""
        with torch.no_grad():
            features_BCD = self.head.features(x_BCD)  # type: ignore[operator]
        logits_BC1: torch.Tensor = cast("nn.Linear", self.classifier)(features_BCD)
        return logits_BC1[..., 0].float()

    def targets(self, x_BCD: torch.Tensor, real_BC: torch.Tensor) -> Targets:
        """Loss and agreement of the classifier on a uniform sample of the tokens.

        Args:
            x_BCD: the stream after the item, ``[B, C, D]``.
            real_BC: bool ``[B, C]``, false for padding entries.
        """
        tokens = real_BC.numel()
        index_N = _sample(real_BC, max(1, math.ceil(tokens / TOKENS_PER_TARGET)))
        x_1ND = x_BCD.detach().reshape(1, tokens, -1).index_select(1, index_N)
        weights_N = real_BC.reshape(-1).index_select(0, index_N).float()
        weights_N = weights_N / weights_N.sum().clamp(min=1.0)
        response_N, estimate_N = self._response(x_1ND)[0], self._estimate(x_1ND)[0]
        losses_N = F.binary_cross_entropy_with_logits(estimate_N, response_N, reduction="none")
        equal_N = self.exits(estimate_N.detach().sigmoid()) == self.exits(response_N)
        return Targets(loss=(losses_N * weights_N).sum(), agreement=(equal_N * weights_N).sum())

    def _sampled_loss(self, x_BCD: torch.Tensor, labels_BC: torch.Tensor, real_BC: torch.Tensor) -> torch.Tensor:
        """An unbiased estimate of the mean loss over tokens, from a uniform sample of them."""
        tokens = labels_BC.numel()
        count = max(1, math.ceil(self.settings.token_share * tokens))
        x_1ND, labels_1N, real_1N = x_BCD.reshape(1, tokens, -1), labels_BC.view(1, -1), real_BC.reshape(1, -1)
        if count < tokens:
            index_N = _sample(real_BC, count)
            x_1ND, labels_1N, real_1N = (each.index_select(1, index_N) for each in (x_1ND, labels_1N, real_1N))
        samples = self.settings.vocabulary_samples
        vocabulary: int = self.head.vocabulary  # type: ignore[assignment] # a head
        if not samples or samples >= vocabulary:
            # In chunks of tokens: nothing else reads the logits. Not the forward of a head with a second loss.
            return Head.forward(self.head, x_1ND, labels_1N, real_1N)  # type: ignore[arg-type] # a copy of a head
        ids_S = shared_normal((vocabulary,), x_BCD.device).argsort()[:samples]
        losses_N = sampled_cross_entropy(
            self.head.features(x_1ND)[0],  # type: ignore[operator]
            self.head.weight,  # type: ignore[arg-type]
            self.head.bias,  # type: ignore[arg-type]
            labels_1N[0],
            ids_S,
            vocabulary=vocabulary,
            cap=self.head.softcap,  # type: ignore[arg-type]
        )
        weights_N = real_1N[0].to(losses_N.dtype)
        return (losses_N * weights_N).sum() / weights_N.sum().clamp(min=1.0)


def response_of(logits_PV: torch.Tensor) -> torch.Tensor:
    """The softmax response of each token, float32 ``[P]``.

    Args:
        logits_PV: float32 logits ``[P, V]``, which are overwritten.
    """
    top_P2 = logits_PV.topk(2, dim=-1).values
    sums_P = logits_PV.sub_(top_P2[:, :1]).exp_().sum(-1)
    # p1 - p2 = (1 - exp(z2 - z1)) / sum exp(z - z1)
    return -torch.expm1(top_P2[:, 1] - top_P2[:, 0]) / sums_P


def _sample(real_BC: torch.Tensor, count: int) -> torch.Tensor:
    """Indices ``[count]`` of tokens drawn uniformly without replacement, ascending; padding last, where too few are."""
    # The number of tokens is one of the shape, so that nothing is read from the device.
    order_N = shared_normal((real_BC.numel(),), real_BC.device).masked_fill(~real_BC.reshape(-1), math.inf)
    return order_N.argsort(stable=True)[:count].sort().values


def sampled_cross_entropy(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    ids_S: torch.Tensor,
    *,
    vocabulary: int,
    cap: float | None = None,
) -> torch.Tensor:
    """Cross-entropy of each token ``[N]`` with the partition function estimated from sampled ids.

    ``-z_y + log(exp z_y + (V - 1) / n sum_s exp z_s)`` over the n sampled ids s that are not the label y. The sum is an
    unbiased estimate of that over all other ids; with all V ids it is exact.

    Args:
        x_ND: input of the projection, ``[N, D]``.
        weight_VD: weight, ``[V, D]`` or more rows.
        bias_V: bias, ``[V]`` or more, or None.
        labels_N: int64 token ids, ``[N]``.
        ids_S: int64 different ids, ``[S]``, drawn uniformly.
        vocabulary: number of token ids V.
        cap: soft cap of the logits; None means none.
    """
    own_N = (x_ND * weight_VD.index_select(0, labels_N)).sum(1).float()
    logits_NS = F.linear(x_ND, weight_VD.index_select(0, ids_S)).float()
    if bias_V is not None:
        own_N = own_N + bias_V.index_select(0, labels_N)
        logits_NS = logits_NS + bias_V.index_select(0, ids_S)
    own_N, logits_NS = soft_cap(own_N, cap), soft_cap(logits_NS, cap)
    is_label_NS = labels_N[:, None] == ids_S
    negatives_N = (len(ids_S) - is_label_NS.sum(1)).clamp(min=1)
    correction_N = torch.log((vocabulary - 1) / negatives_N)
    others_N = logits_NS.masked_fill(is_label_NS, -math.inf).logsumexp(1) + correction_N
    return torch.logaddexp(own_N, others_N) - own_N


def active_tokens(exited_BT: torch.Tensor) -> TokenSelection:
    """The tokens that have not exited; ``exited_BT`` ``[B, T]`` is 1 where a token has.

    The host reads their number once for all items that are called with this tensor, which no one may write to.
    """
    selected: TokenSelection | None = getattr(exited_BT, _SELECTION, None)
    if selected is None:
        selected = select_tokens(exited_BT == 0)
        setattr(exited_BT, _SELECTION, selected)
    return selected


class ActiveTokens(nn.Module):
    """Mixin for an item's module: runs the item on the active tokens, then its child ``exit`` if it has one.

    Attributes:
        propagates: whether keys and values of exited tokens are computed for later ones.
        reads_exited: whether an exit comes before this item; without one all tokens are active.
        active_inputs: names of the batch tensors that it is called with; ``labels`` goes to the exit.
    """

    propagates: bool
    reads_exited: bool
    active_inputs: tuple[str, ...]

    def plain(self, x_BTD: torch.Tensor, *given: torch.Tensor) -> torch.Tensor | ItemOutput:
        """The item's own forward, on the given tokens ``x_BTD`` ``[B, T, D]``; ``given`` are its batch tensors."""
        return self.on_tokens(x_BTD, *given)

    def on_tokens(self, x_BCD: torch.Tensor, *given: torch.Tensor, **extra: Any) -> torch.Tensor | ItemOutput:
        """The item's own forward, on ``x_BCD`` ``[B, C, D]``.

        Args:
            x_BCD: the stream of the active tokens.
            *given: its batch tensors, ``[B, C]``.
            **extra: its keyword arguments.
        """
        result: torch.Tensor | ItemOutput = super().forward(x_BCD, *given, **extra)
        return result

    def _runs_without_counts(self, x_BTD: torch.Tensor) -> bool:
        """Whether the item has an entry for every token, and its products compute the active ones on the device.

        Otherwise the host reads the largest number of active tokens of a sample: in evaluation, without a kernel for
        such products, in a compiled graph, and where routing or hashing depends on the number of entries.
        """
        is_plain = issubclass(type(self), (Mlp, SelfAttention)) and getattr(self, "sparse", None) is None
        is_compiled = "on_tokens" in vars(self)
        return self.training and is_plain and not is_compiled and grouped_linear.is_fast_device(x_BTD)

    def on_selected(self, x_BTD: torch.Tensor, selected: TokenSelection, *given: torch.Tensor) -> torch.Tensor:
        """The attention of the active tokens to all tokens, ``[B, C, D]``.

        Args:
            x_BTD: the stream; an exited token has the state in which it exited.
            selected: the active tokens.
            *given: the key mask ``[B, T]``, where the model has one.
        """
        attention = cast("SelfAttention", self)
        key_mask_BT = given[0] if given else None
        return attention.of_selected(x_BTD, selected.index_BC, key_mask_BT)[0]

    def forward(self, x_BTD: torch.Tensor, *arguments: torch.Tensor) -> ItemOutput:
        """Apply the item to the active tokens and its exit to the result.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            *arguments: ``exited_BT`` if ``reads_exited``, then the batch tensors of ``active_inputs``, ``[B, T]``.

        Returns:
            The stream ``[B, T, D]``. An item with an exit adds the loss ``exit``, and ``exited`` ``[B, T]`` as a
            further value.
        """
        exited_BT = arguments[0] if self.reads_exited else None
        given = dict(zip(self.active_inputs, arguments[int(self.reads_exited) :], strict=True))
        selected: TokenSelection | None = None
        products: AbstractContextManager[None] = nullcontext()
        if exited_BT is not None and self._runs_without_counts(x_BTD):
            selected = order_tokens(exited_BT == 0)
            products = dense_products_by(grouped_linear.ActiveRows(selected.real_BC).product)
        elif exited_BT is not None:
            selected = active_tokens(exited_BT)
        x_BCD = x_BTD
        extra: dict[str, Any] = {}
        if selected is not None and self.propagates and issubclass(type(self), SelfAttention):
            return ItemOutput(selected.put(x_BTD, self.on_selected(x_BTD, selected, *given.values())))
        if selected is not None:
            x_BCD = selected.take(x_BTD)
            given = {name: selected.take(value) for name, value in given.items()}
        labels_BC = given.pop("labels", None)
        if selected is not None and issubclass(type(self), SelfAttention):
            # The inputs of an attention are key masks: padding entries must not be attended to.
            given = {name: value.bool() & selected.real_BC for name, value in given.items()}
            extra["positions"] = selected.index_BC
        elif selected is not None and issubclass(type(self), MoeMlp):
            extra["real"] = selected.real_BC
        elif selected is not None and issubclass(type(self), RoutedBlock):
            extra = {"positions": selected.index_BC, "real": selected.real_BC}
        with products:
            result = self.on_tokens(x_BCD, *given.values(), **extra)
        y_BCD = output_of(result)
        output = y_BCD if selected is None else selected.put(x_BTD, y_BCD)
        inner = result if isinstance(result, ItemOutput) else ItemOutput(y_BCD)
        # ``_modules``, because ``nn.Module.__getattr__`` raises where an item has no exit.
        exit_ = self._modules.get("exit")
        if not isinstance(exit_, Exit):
            return ItemOutput(output, metrics=inner.metrics, losses=inner.losses)
        if exited_BT is None or selected is None:
            # The first exit of the model: no earlier item wrote this value, and all tokens are active.
            exited_BT = x_BTD.new_zeros(x_BTD.shape[:2])
            selected = select_all(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
        # Entries of padding are tokens that have exited before. They do not exit again, so the sum stays 0 or 1.
        leaves_BC, loss = exit_(x_BCD, y_BCD, labels_BC, selected.real_BC)
        exited_BT = exited_BT.scatter_add(1, selected.index_BC, leaves_BC.to(exited_BT.dtype))
        metrics = {"exit_share": exited_BT.float().mean(), "exit_loss": loss.detach()}
        loss = loss * exit_.weight_of_loss
        if exit_.classifier is not None:
            # In evaluation no target is computed.
            agreement = torch.zeros_like(metrics["exit_share"])
            if self.training and labels_BC is not None:
                targets = exit_.targets(y_BCD, selected.real_BC)
                loss, agreement = loss + targets.loss, targets.agreement
            metrics["exit_agreement"] = agreement
        return ItemOutput(
            output,
            metrics={**inner.metrics, **metrics},
            losses={**inner.losses, "exit": loss},
            side={EXITED: exited_BT},
        )


@functools.cache
def _active_class(kind: type[nn.Module]) -> type[nn.Module]:
    """One class for all items of a kind: a compiler would compile each class again."""
    return type(f"Active{kind.__name__}", (ActiveTokens, kind), {})


def run_on_active_tokens(module: nn.Module, spec: ItemSpec, *, propagate: bool) -> None:
    """Mix ``ActiveTokens`` into the module of an item that reads or writes which tokens have exited.

    ``propagate`` is that of :class:`ExitSettings`.

    The class is changed in place, because a wrapping module would rename the parameters and hide the class from
    ``isinstance`` checks.
    """
    module.__class__ = _active_class(type(module))  # type: ignore[arg-type] # functools wants a hash of the class itself
    module.propagates = propagate  # type: ignore[assignment]
    module.reads_exited = EXITED in spec.reads  # type: ignore[assignment]
    module.active_inputs = spec.inputs  # type: ignore[assignment]
    for child in module.modules():
        if isinstance(child, MoeMlp):
            # Each rank has its own number of active tokens.
            child.has_fixed_tokens = not module.reads_exited
