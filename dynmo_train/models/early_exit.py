"""Early exit: a token exits after a block when the model is confident; later blocks compute the active tokens only.

Confident adaptive language modeling (Schuster et al. 2022, arXiv:2207.07061, section 3.5) with two confidence measures:
the *softmax response*, the difference of the two highest probabilities at the exit, and *hidden-state saturation*, the
cosine between the stream before and after a sublayer. Every exit is the model's own head: all its parameters are tied
to ``head``. Exits are trained by their own losses (section 3.2 there; Elbayad et al. 2020, arXiv:1910.10073).

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

from ..parallel.random_stream import normal
from . import grouped_linear
from .blocks import Mlp, SelfAttention
from .head import Head
from .layer_list import ItemOutput, ItemSpec, output_of
from .linear import dense_products_by
from .mixture_of_depths import RoutedBlock
from .moe import MoeMlp
from .token_select import TokenSelection, order_tokens, select_all, select_tokens

# The value that later items read, ``[B, T]`` in the type of the stream: 1 where a token has exited.
EXITED = "exited"
_SELECTION = "_active_tokens"
Measure = Literal["softmax", "saturation"]
# Tokens whose logits are in memory at a time for the softmax response.
RESPONSE_TOKENS = 1024
METRICS = (("exit_share", 1), ("exit_loss", 1))


@dataclass(frozen=True, kw_only=True)
class ExitSettings:
    """Where and when tokens exit.

    Attributes:
        layers: blocks (from 0) after which tokens may exit, ascending.
        loss_weight: weight of the losses of all exits together, shared equally.
        threshold: confidence, 0 to 1, from which a token exits.
        measure: ``softmax`` response or hidden-state ``saturation``.
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


class Exit(nn.Module):
    """An exit after an item: the loss of the head on the active tokens, and which of them exit.

    Args:
        head: a copy of the model's head; all its parameters are tied.
        settings: of the model's exits.
        layer: the block that the exit comes after.
    """

    def __init__(self, head: nn.Module, settings: ExitSettings, layer: int) -> None:
        super().__init__()
        self.head, self.settings, self.weight_of_loss = head, settings, settings.weight_of(layer)

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
        # Detached: which tokens exit is a decision, which has no gradient.
        confidence_BC = F.cosine_similarity(before_BCD.detach().float(), after_BCD.detach().float(), dim=-1)
        if is_sampled or not wants_loss:
            if self.settings.measure == "softmax":
                confidence_BC = self._response(after_BCD)
            if wants_loss and labels_BC is not None:
                loss = self._sampled_loss(after_BCD, labels_BC, real_BC)
        elif self.settings.measure == "softmax":
            logits_BCV = self.head.logits(after_BCD).float()  # type: ignore[operator]
            top_BC2 = logits_BCV.detach().softmax(-1).topk(2, dim=-1).values
            confidence_BC = top_BC2[..., 0] - top_BC2[..., 1]
            if labels_BC is not None:
                losses = F.cross_entropy(logits_BCV.flatten(0, 1), labels_BC.reshape(-1), reduction="none")
                real = real_BC.reshape(-1).to(losses.dtype)
                loss = (losses * real).sum() / real.sum().clamp(min=1.0)
        elif labels_BC is not None:
            # In chunks of tokens: nothing else reads the logits. Not the forward of a head with a second loss.
            loss = Head.forward(self.head, after_BCD, labels_BC, real_BC)  # type: ignore[arg-type] # a copy of a head
        return (confidence_BC >= self.settings.threshold) & real_BC, loss

    @torch.no_grad()
    def _response(self, x_BCD: torch.Tensor) -> torch.Tensor:
        """The softmax response of each token, ``[B, C]``; the logits of a chunk of tokens are in memory at a time."""
        parts = []
        for x_1PD in x_BCD.reshape(1, -1, x_BCD.shape[-1]).split(RESPONSE_TOKENS, dim=1):
            logits_1PV = self.head.logits(x_1PD).float()  # type: ignore[operator]
            top_1P2 = (logits_1PV.topk(2, dim=-1).values - logits_1PV.logsumexp(-1, keepdim=True)).exp()
            parts.append(top_1P2[0, :, 0] - top_1P2[0, :, 1])
        return torch.cat(parts).view(x_BCD.shape[:2])

    def _sampled_loss(self, x_BCD: torch.Tensor, labels_BC: torch.Tensor, real_BC: torch.Tensor) -> torch.Tensor:
        """An unbiased estimate of the mean loss over tokens, from a uniform sample of them."""
        tokens = labels_BC.numel()
        count = max(1, math.ceil(self.settings.token_share * tokens))
        x_1ND, labels_1N, real_1N = x_BCD.reshape(1, tokens, -1), labels_BC.view(1, -1), real_BC.reshape(1, -1)
        if count < tokens:
            # Padding last. The number of tokens is one of the shape, so that nothing is read from the device.
            order_N = normal((tokens,), x_BCD.device).masked_fill(~real_1N[0], math.inf).argsort(stable=True)
            index_N = order_N[:count].sort().values
            x_1ND, labels_1N, real_1N = (each.index_select(1, index_N) for each in (x_1ND, labels_1N, real_1N))
        samples = self.settings.vocabulary_samples
        vocabulary: int = self.head.vocabulary  # type: ignore[assignment] # a head
        if not samples or samples >= vocabulary:
            # In chunks of tokens: nothing else reads the logits. Not the forward of a head with a second loss.
            return Head.forward(self.head, x_1ND, labels_1N, real_1N)  # type: ignore[arg-type] # a copy of a head
        ids_S = normal((vocabulary,), x_BCD.device).argsort()[:samples]
        losses_N = sampled_cross_entropy(
            self.head.features(x_1ND)[0],  # type: ignore[operator]
            self.head.weight,  # type: ignore[arg-type]
            self.head.bias,  # type: ignore[arg-type]
            labels_1N[0],
            ids_S,
            vocabulary=vocabulary,
        )
        weights_N = real_1N[0].to(losses_N.dtype)
        return (losses_N * weights_N).sum() / weights_N.sum().clamp(min=1.0)


def sampled_cross_entropy(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    ids_S: torch.Tensor,
    *,
    vocabulary: int,
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
    """
    own_N = (x_ND * weight_VD.index_select(0, labels_N)).sum(1).float()
    logits_NS = F.linear(x_ND, weight_VD.index_select(0, ids_S)).float()
    if bias_V is not None:
        own_N = own_N + bias_V.index_select(0, labels_N)
        logits_NS = logits_NS + bias_V.index_select(0, ids_S)
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
        if selected is not None and self.propagates and hasattr(self, "qkv"):
            return ItemOutput(selected.put(x_BTD, self.on_selected(x_BTD, selected, *given.values())))
        if selected is not None:
            x_BCD = selected.take(x_BTD)
            given = {name: selected.take(value) for name, value in given.items()}
        labels_BC = given.pop("labels", None)
        if selected is not None and hasattr(self, "qkv"):
            # The inputs of an attention are key masks: padding entries must not be attended to.
            given = {name: value.bool() & selected.real_BC for name, value in given.items()}
            extra["positions"] = selected.index_BC
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
        return ItemOutput(
            output,
            metrics={**inner.metrics, "exit_share": exited_BT.float().mean(), "exit_loss": loss.detach()},
            losses={**inner.losses, "exit": loss * exit_.weight_of_loss},
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
