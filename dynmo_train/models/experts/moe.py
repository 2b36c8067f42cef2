"""A mixture of experts in place of an MLP: a router sends each token to a few of many MLPs (Shazeer et al. 2017).

The host does not wait for the device, except for the counts of an all-to-all without padded capacity, and for experts
that no grouped product computes::

    x_BTD ─▶ norm ─▶ router ─▶ route ─▶ take_rows ─▶ Experts ─▶ return_rows ─▶ weighted sum ─▶ + x_BTD
               │                 └ RowPlan: which slot fills which row                         ▲
               └▶ shared experts, while rows travel to other processes ────────────────────────┘

Shapes in names: B samples, T tokens, N = B*T tokens of a microbatch, M = N*C slots, C experts per token, R rows that
the experts compute, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...parallel.context_parallel import ContextRegion
from ...parallel.expert_chunks import Hosts
from ...parallel.expert_parallel import CountExchange, RowGroups, SentRows, TokenDispatcher, equal_groups
from ...parallel.expert_replicas import GatheredCounts, ReplicaDispatcher, SentChunks
from ...parallel.random_stream import item_dropout, shared_normal
from ..layer_list import EXPERT_BIAS, ItemOutput
from ..layers.feed_forward import FeedForward
from ..layers.gated import Activation
from ..layers.grouped_linear import can_group, grouped_linear
from .balance_losses import StartedLosses, StepCounts, count_slots, start_losses
from .expert_sums import ExpertSums, chunk_bias, chunk_linear
from .moe_dispatch import RowPlan, plan_rows, return_rows, take_rows, within_capacity
from .moe_routing import balanced_assignment, expert_choice
from .moe_shape import BALANCED, EXPERT_CHOICE, SINKHORN, MoeShape
from .router import best, sinkhorn_choice


class Routing(NamedTuple):
    """The assignment of a microbatch's tokens to experts.

    Attributes:
        rows: rows of each expert; slot ``n * C + c`` is choice ``c`` of token ``n``.
        weights_NC: float32 weights of each token's choices; 0 where the expert dropped the token.
        balance: the balance losses, whose counts of other ranks are on their way.
        z: mean squared log-sum-exp of the router's logits.
        chosen_E: int64 number of slots of each expert before any token was dropped.
    """

    rows: RowPlan
    weights_NC: torch.Tensor
    balance: StartedLosses
    z: torch.Tensor
    chosen_E: torch.Tensor


def route(
    logits_NE: torch.Tensor,
    moe: MoeShape,
    *,
    balanced: bool = False,
    is_fixed: bool = False,
    context: ContextRegion | None = None,
    position_E: torch.Tensor | None = None,
    sequences: int = 1,
    bias_E: torch.Tensor | None = None,
    counts: StepCounts | None = None,
    real_N: torch.Tensor | None = None,
    training: bool = True,
) -> Routing:
    """Choose the experts of highest score for each token; their scores weigh their outputs.

    The result is a function of the microbatch alone, except for the biases and the loss over the batch of a step; ties
    go to the lower expert and the earlier token.

    Args:
        logits_NE: the router's output, ``[N, E]``.
        moe: number of experts per token, capacity and routing.
        balanced: with the routing ``balanced``, assign one expert per token and equal numbers of tokens per expert;
            the weight is the sigmoid of the logit (Lewis et al. 2021, arXiv:2103.16716, section 2). With ``sinkhorn``,
            choose by balanced logits.
        is_fixed: whether N is the same on all ranks that share the experts.
        context: ranks that share the tokens of a sample; see ``start_losses``.
        position_E: int64 place of each expert in the order of the rows; None is the order of the experts.
        sequences: number of sequences of equal length that the tokens are.
        bias_E: float32 bias of each expert, for the choice alone; None is 0.
        counts: counts of the step, in training; None counts this microbatch alone.
        real_N: bool ``[N]``, false for padding, which biases and metrics do not count; None means none.
        training: whether the capacity is that of training.
    """
    # In float32 in every precision: rounding would make ties, and so choices that depend on the dtype.
    logits_NE = logits_NE.float()
    experts = logits_NE.shape[1]
    scores_NE = moe.router.scores(logits_NE)
    if moe.routing == SINKHORN:
        expert_NC, weights_NC = sinkhorn_choice(logits_NE, moe.top_k, balanced=balanced)
    elif moe.routing == BALANCED:
        expert_NC = balanced_assignment(logits_NE)[:, None] if balanced else best(scores_NE, 1)
        weights_NC = logits_NE.gather(1, expert_NC).sigmoid()
    else:
        expert_NC = moe.router.choose(scores_NE, moe.top_k, bias_E)
        weights_NC = moe.router.weights(scores_NE, expert_NC)
    expert_M = expert_NC.reshape(-1)
    # Before tokens are dropped: losses and biases must see the overload that they are to reduce.
    chosen_E = slots_E = count_slots(expert_NC, experts)[0]
    if real_N is not None:
        of_real_M = real_N.to(chosen_E.dtype).repeat_interleave(expert_NC.shape[1])
        chosen_E = torch.zeros_like(slots_E).index_add(0, expert_M, of_real_M)
    if counts is not None and moe.router.expert_bias:
        counts.record(chosen_E)
    highest_NC, highest_E = expert_NC, slots_E
    if not moe.router.chooses_by_scores:
        highest_NC = best(scores_NE, moe.top_k)
        highest_E = count_slots(highest_NC, experts)[0]
    balance = start_losses(
        moe.router.probabilities(scores_NE),
        highest_NC,
        highest_E,
        moe.measured_losses,
        sequences=sequences,
        context=context,
        counts=counts,
    )
    z = logits_NE.logsumexp(-1).square().mean()
    place_M = expert_M if position_E is None else position_E[expert_M]
    if moe.capacity_factor is None:
        return Routing(plan_rows(place_M, experts), weights_NC, balance, z, chosen_E)
    capacity = moe.capacity(len(logits_NE), training=training)
    computed_M = within_capacity(expert_M, weights_NC.detach().reshape(-1), experts, capacity, moe.drop_policy)
    weights_NC = weights_NC * computed_M.view_as(weights_NC)
    rows = plan_rows(place_M, experts, computed_M, capacity, pad=moe.pad_to_capacity, is_fixed=is_fixed)
    return Routing(rows, weights_NC, balance, z, chosen_E)


def counting_layers(item: nn.Module) -> list[MoeMlp]:
    """The layers of an item that count the choices of a step."""
    return [part for part in item.modules() if isinstance(part, MoeMlp) and part.moe.counts_steps]


class LocalRows(NamedTuple):
    """Rows whose experts are all on this process: ``rows_RD`` ``[R, D]``, sorted as ``groups`` states."""

    rows_RD: torch.Tensor
    groups: RowGroups


class Experts(nn.ModuleDict):
    """The experts of a layer on this process, by number; ``dispatcher`` reaches those of other processes.

    With a ``ReplicaDispatcher`` an expert may be on several ranks. Its owner has it as a submodule: parameters,
    gradients and optimizer state. The others have a copy of its weights, which no one but ``ExpertReplicas`` sees.

    Attributes:
        order: All experts by rank, then by number, where this differs from the order of their numbers; else None.
            With replicas rows are in the order of the numbers.
        hosts: With replicas: the ranks that have each expert, its owner first.
        copies: With replicas: experts of other ranks of which this process has the weights.
        sums: With replicas: where weight gradients go.
        before_use: Called once before the copies are read.
    """

    dispatcher: TokenDispatcher | None = None
    order: tuple[int, ...] | None = None
    hosts: tuple[Hosts, ...] = ()
    copies: Mapping[int, FeedForward] = {}
    sums: ExpertSums | None = None
    before_use: Callable[[], None] | None = None
    _order_E: torch.Tensor | None = None

    def order_E(self, device: torch.device) -> torch.Tensor | None:
        """``order`` as an int64 tensor ``[E]``."""
        if self.order is None:
            return None
        # Made once: a copy from the host in each forward would cost time.
        if self._order_E is None or self._order_E.device != device:
            self._order_E = torch.tensor(self.order, device=device)
        return self._order_E

    def position_E(self, device: torch.device) -> torch.Tensor | None:
        """The place of each expert in ``order``, int64 ``[E]``."""
        order_E = self.order_E(device)
        return None if order_E is None else order_E.argsort()

    def exchange_counts(self, groups: RowGroups) -> CountExchange | GatheredCounts | None:
        """Start to exchange the numbers of rows in ``groups`` between processes; None where that is not needed."""
        if isinstance(self.dispatcher, ReplicaDispatcher):
            return self.dispatcher.gather_counts(groups)
        return None if self.dispatcher is None else self.dispatcher.exchange_counts(groups)

    def send(
        self, rows_RD: torch.Tensor, groups: RowGroups, counts: CountExchange | GatheredCounts | None = None
    ) -> SentRows | SentChunks | LocalRows:
        """Start to send rows to the processes of their experts; without other processes they stay here.

        Args:
            rows_RD: rows sorted by expert, ``[R, D]``.
            groups: rows of each of all experts.
            counts: result of ``exchange_counts``.
        """
        if self.dispatcher is None:
            return LocalRows(rows_RD, groups)
        if isinstance(self.dispatcher, ReplicaDispatcher):
            gathered = counts if isinstance(counts, GatheredCounts) else None
            return self.dispatcher.send_chunks(rows_RD, groups, gathered, self.hosts)
        return self.dispatcher.send(rows_RD, groups, counts if isinstance(counts, CountExchange) else None)

    def forward(self, sent: SentRows | SentChunks | LocalRows) -> torch.Tensor:
        """Apply each expert to its rows.

        Args:
            sent: result of ``send``.

        Returns:
            The results in the order of the rows, ``[R, D]``, undefined for rows that belong to no expert.

        Raises:
            ValueError: the rows were sent by another layer's dispatcher.
        """
        if isinstance(sent, LocalRows):
            return self._apply_own(*sent)
        if self.dispatcher is None:
            raise ValueError("rows were sent, but the layer has no dispatcher")
        if isinstance(sent, SentRows):
            return self.dispatcher.run(sent, self._apply_own)
        if self.sums is None or not isinstance(self.dispatcher, ReplicaDispatcher):
            raise ValueError("chunks were sent, but the layer has no replicas")
        if self.before_use is not None:
            wait, self.before_use = self.before_use, None
            wait()
        return self.dispatcher.run_chunks(sent, partial(self._apply_chunks, self.sums))

    def expert(self, number: int) -> FeedForward:
        """Return an expert of this process, its own or a copy.

        Raises:
            KeyError: This process does not have it.
        """
        name = str(number)
        found = self[name] if name in self else self.copies[number]
        if not isinstance(found, FeedForward):
            raise KeyError(number)
        return found

    def _apply_chunks(
        self, sums: ExpertSums, rows_RD: torch.Tensor, experts: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        # Also on a rank without rows: gradients of its experts may come from their copies.
        sums.is_due = sums.is_due or rows_RD.requires_grad
        outputs = []
        for number, rows in zip(experts, rows_RD.split(list(counts)) if counts else (), strict=True):
            expert = self.expert(number)
            outputs.append(expert.transform(rows, partial(self._chunk_product, sums, number, expert)))
        return torch.cat(outputs) if outputs else rows_RD

    def _chunk_product(
        self, sums: ExpertSums, number: int, expert: FeedForward, name: str, x: torch.Tensor
    ) -> torch.Tensor:
        layer = getattr(expert, name)
        x = x if layer.enter is None else layer.enter(x)
        if layer.leave is None:
            return chunk_linear(x, layer.weight, layer.bias, sums, number, name)
        y: torch.Tensor = layer.leave(chunk_linear(x, layer.weight, None, sums, number, name))
        return y if layer.bias is None else chunk_bias(y, layer.bias, sums, number, name)

    def _apply_own(self, rows_RD: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        experts = [expert for expert in self.values() if isinstance(expert, FeedForward)]
        if all(can_group(layers, rows_RD) for layers in zip(*(each.linear_layers() for each in experts), strict=True)):
            return experts[0].transform(
                rows_RD, lambda name, x: grouped_linear([getattr(each, name) for each in experts], x, groups.ends_E)
            )
        counts = groups.host_counts()
        *parts, unused = rows_RD.split([*counts, len(rows_RD) - sum(counts)])
        outputs = [expert(part) for expert, part in zip(experts, parts, strict=True)]
        return torch.cat([*outputs, torch.zeros_like(unused)] if len(unused) else outputs)

    def keep(self, dispatcher: TokenDispatcher, hosts: Sequence[Hosts]) -> None:
        """Remove the experts of other processes; ``dispatcher`` reaches them.

        Args:
            dispatcher: Sends rows to the processes of their experts.
            hosts: Ranks that have each expert, its owner first.
        """
        self.dispatcher, rank = dispatcher, dispatcher.rank
        if isinstance(dispatcher, ReplicaDispatcher):
            self.hosts, self.sums = tuple(hosts), ExpertSums()
            # Not submodules: no optimizer, checkpoint, norm or migration sees them.
            self.copies = {number: self.expert(number) for number, on in enumerate(hosts) if rank in on[1:]}
        else:
            order = sorted(range(len(hosts)), key=lambda expert: (hosts[expert], expert))
            self.order = None if order == list(range(len(hosts))) else tuple(order)
        # Experts keep their global numbers, so that their parameters have the same names at every size.
        for number in [number for number in self if hosts[int(number)][0] != rank]:
            del self[number]


class MoeMlp(nn.Module):
    """``x + weighted sum of the chosen experts of norm(x) + shared experts of norm(x)``, with losses and loads.

    Args:
        moe: number of experts, routing and losses.
        width: model width D.
        inner: width inside each expert.
        activation: a key of ``feed_forward.ACTIVATIONS`` or ``gated.GATED``, or a ``ClampedSwiglu``.
        norm: normalization before the sublayer.
        device: where the parameters are created.
        bias: whether the experts' linear layers have biases.
        post_norm: normalization of the sublayer's output, before dropout and residual; None means none.
        dropout: dropout probability of the output.

    Attributes:
        has_fixed_tokens: whether all ranks that share the experts have the same number of tokens in training.
    """

    has_fixed_tokens = True

    def __init__(
        self,
        *,
        moe: MoeShape,
        width: int,
        inner: int,
        activation: Activation,
        norm: nn.Module,
        device: torch.device,
        bias: bool = True,
        post_norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.moe, self.norm, self.post_norm, self.dropout = moe, norm, post_norm, dropout
        self.context: ContextRegion | None = None  # set by ``join_context``
        self.counts = StepCounts()
        self.router = nn.Linear(width, moe.num_experts, bias=moe.router.bias, device=device)
        if self.router.bias is not None:
            nn.init.zeros_(self.router.bias)
        if moe.router.expert_bias:
            # A buffer of the router in float32, whatever the compute dtype is; ``ItemStore`` stores it with the item.
            bias_E = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
            self.router.register_buffer(EXPERT_BIAS, bias_E, persistent=False)
        self.experts = Experts(
            {
                str(number): FeedForward(width=width, inner=inner, activation=activation, bias=bias, device=device)
                for number in range(moe.num_experts)
            }
        )
        self.shared: FeedForward | None = None
        self.shared_router: nn.Linear | None = None
        if moe.shared_ffn_size:
            self.shared = FeedForward(
                width=width, inner=moe.shared_ffn_size, activation=activation, bias=bias, device=device
            )
            if moe.shared_gate:
                self.shared_router = nn.Linear(width, 1, bias=False, device=device)

    @property
    def expert_bias(self) -> torch.Tensor | None:
        """Biases of the experts, float32 ``[E]``; None where the choice has none."""
        return getattr(self.router, EXPERT_BIAS, None)

    def _shared_output(self, x_ND: torch.Tensor) -> torch.Tensor | None:
        """The output of the shared experts ``[N, D]``; None where there are none."""
        if self.shared is None:
            return None
        y_ND: torch.Tensor = self.shared(x_ND)
        return y_ND if self.shared_router is None else y_ND * self.shared_router(x_ND).sigmoid()

    def _by_token(self, x_ND: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts."""
        choices, rows = routing.weights_NC.shape[1], routing.rows
        # The counts are on their way while the rows are gathered.
        counts = self.experts.exchange_counts(rows.groups)
        sent = self.experts.send(take_rows(x_ND, rows, choices), rows.groups, counts)
        shared_ND = self._shared_output(x_ND)
        y_NCD = return_rows(self.experts(sent), rows, choices)
        y_ND: torch.Tensor = (y_NCD * routing.weights_NC[..., None].to(y_NCD.dtype)).sum(1)
        return y_ND if shared_ND is None else y_ND + shared_ND

    def _by_expert(self, x_ND: torch.Tensor, logits_NE: torch.Tensor, is_fixed: bool) -> tuple[torch.Tensor, int]:
        """Expert choice: the weighted sum, and the number of tokens of each expert."""
        token_EC, weight_EC = expert_choice(logits_NE.float().softmax(-1), self.moe.top_k)
        order_E, position_E = self.experts.order_E(x_ND.device), self.experts.position_E(x_ND.device)
        token_M = token_EC.reshape(-1)
        experts, count = token_EC.shape
        groups = equal_groups(experts, count, x_ND.device, is_fixed=is_fixed)
        counts = self.experts.exchange_counts(groups)
        rows_MD = x_ND.index_select(0, token_M)
        if order_E is not None:
            # After the selection, whose backward adds the gradients of a token in the order of the experts.
            rows_MD = rows_MD.view(experts, count, -1)[order_E].reshape(experts * count, -1)
        sent = self.experts.send(rows_MD, groups, counts)
        shared_ND = self._shared_output(x_ND)
        sorted_MD = self.experts(sent)
        if position_E is not None:
            # Back in the order of the experts, in which the sum below adds.
            sorted_MD = sorted_MD.view(experts, count, -1)[position_E].reshape(experts * count, -1)
        weighted_MD = sorted_MD * weight_EC.reshape(-1, 1).to(sorted_MD.dtype)
        return (torch.zeros_like(x_ND) if shared_ND is None else shared_ND).index_add(0, token_M, weighted_MD), count

    def forward(self, x_BTD: torch.Tensor, *, real: torch.Tensor | None = None) -> ItemOutput:
        """Apply the sublayer with its residual.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            real: bool ``[B, T]``, false for padding entries; None means that there are none.

        Returns:
            The stream ``[B, T, D]``; the weighted losses ``load_balancing`` and ``z``; the metrics of ``MoeShape``.
        """
        moe = self.moe
        x_ND = self.norm(x_BTD).reshape(-1, x_BTD.shape[-1])
        logits_NE = self.router(x_ND)
        if moe.random_logits:
            # The router has the gradient of the numbers, as if they were its own.
            numbers_NE = shared_normal(logits_NE.shape, logits_NE.device).to(logits_NE.dtype)
            logits_NE = numbers_NE + (logits_NE - logits_NE.detach())
        # Expert choice and balanced assignment are not causal, so evaluation routes by token. The number of tokens of
        # a mixture of depths is fixed in training only.
        is_fixed = self.has_fixed_tokens and self.training
        routing = route(
            logits_NE,
            moe,
            balanced=self.training,
            is_fixed=is_fixed,
            context=self.context,
            position_E=self.experts.position_E(logits_NE.device),
            sequences=len(x_BTD),
            bias_E=self.expert_bias,
            # Evaluation and frozen layers have no losses, and change no bias.
            counts=self.counts if moe.counts_steps and self.training and torch.is_grad_enabled() else None,
            real_N=None if real is None else real.reshape(-1),
            training=self.training,
        )
        loads_E = routing.chosen_E
        if moe.routing == EXPERT_CHOICE and self.training:
            y_ND, count = self._by_expert(x_ND, logits_NE, is_fixed)
            loads_E = torch.full_like(loads_E, count)
        else:
            y_ND = self._by_token(x_ND, routing)
        y_BTD = y_ND.view_as(x_BTD)
        if self.post_norm is not None:
            y_BTD = self.post_norm(y_BTD)
        # The counts of other ranks have been on their way while the experts computed.
        balance = routing.balance.finish()
        losses = {name: weight * balance[name] for name, weight in moe.coefficients.items()}
        if moe.z_loss_coeff:
            losses["z"] = moe.z_loss_coeff * routing.z
        return ItemOutput(
            output=x_BTD + item_dropout(y_BTD, self.dropout, self.training),
            metrics={
                **{f"{name}_loss": value for name, value in balance.items()},
                "z_loss": routing.z,
                "expert_tokens": loads_E.float(),
            },
            losses=losses,
        )
