"""The sharded output layer of a pipeline: passes S and T of the local shards, and the messages between ranks.

The passes E and G of the word table are in ``word_lookups.py``.

One microbatch, with the operations of ``_common/vocabulary_order.py``::

    last stage's rank                                             every rank
    F: send_features    -- normalized stream, compute dtype -->   S: run_shards
    B: loss             <-- nodes of the tree of parts --------
                        -- log-sums of all shards, float32 --->   T: add_gradients

Nothing waits but what needs a message: S for the stream, B of the last stage for the parts, T for the log-sums. Each
kind of message has a process group of its own, in which both ends use the order of the microbatches. Receives are
posted one microbatch ahead, so that a message travels while the rank computes. With tensor parallelism each rank has a
slice of each shard, and messages are between ranks of the same slice; B of the last stage adds the slices up.

With multi-token prediction the stream has the samples of all predictions, in training: S and T compute them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..models.families.multi_token import LOSS_METRIC
from ..models.families.sharded_prediction import PredictionTargets, prediction_item
from ..models.families.vocabulary_family import VocabularyShardedFamily
from ..models.layer_list import ModelFamily
from ..models.vocabulary.vocabulary_shards import (
    WORDS,
    InjectLoss,
    VocabularyPart,
    VocabularyShard,
    merge_tree,
    ranks_of_shards,
    shard_activation_bytes,
    shard_index,
    subtrees,
)
from ..optim.precision import ComputeCopies
from ..parallel.context_parallel import ContextRegion, context_region
from ..parallel.process_groups import World, with_vocabulary_groups
from ..parallel.tensor_parallel import TensorRegion
from .partition import Partition
from .profiler import LayerProfiler
from .word_lookups import WordLookups

Node = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class VocabularyGroups:
    """Process groups of the messages between the ranks of a pipeline, one per kind of message.

    Attributes:
        loss_inputs: Names of the batch tensors that the loss reads: labels and, where there is one, the mask.
        ids_input: Name of the batch tensor of token ids.
        spans: First and last row, exclusive, of this process's slice of each shard, wherever the shard is.
        region: Tensor-parallel ranks, which share each shard; None where there is one.
        features: Normalized streams.
        parts: Parts of the shards.
        sums: Log-sums.
        words: Rows of the word table, and their gradients.
        ahead: The same for the depths of multi-token prediction.
        depths: Weights of the losses of these depths.
        context: Ranks that share the tokens of a sample; None where there is one.
    """

    loss_inputs: tuple[str, ...]
    ids_input: str
    spans: list[tuple[int, int]]
    region: TensorRegion | None
    features: dist.ProcessGroup
    parts: dist.ProcessGroup
    sums: dist.ProcessGroup
    words: tuple[dist.ProcessGroup, dist.ProcessGroup]
    ahead: tuple[dist.ProcessGroup, dist.ProcessGroup]
    depths: tuple[float, ...] = ()
    context: ContextRegion | None = None

    @staticmethod
    def prepare(world: World, family: ModelFamily) -> World:
        """Return the world with the groups that a family needs; every process of a pipeline calls this."""
        return with_vocabulary_groups(world) if isinstance(family, VocabularyShardedFamily) else world

    @classmethod
    def of(
        cls, world: World, family: ModelFamily, region: TensorRegion | None = None, *, weighs_steps: bool = False
    ) -> VocabularyGroups | None:
        """Return the groups of the processes of a run; None for a family whose tables are whole.

        Args:
            world: Processes of the run.
            family: The model.
            region: Tensor-parallel ranks; None where there is one.
            weighs_steps: As of ``ContextRegion``.
        """
        if not isinstance(family, VocabularyShardedFamily):
            return None
        features, parts, sums, rows, gradients, ahead_rows, ahead_gradients = world.groups.vocabulary
        return cls(
            loss_inputs=family.loss_inputs,
            ids_input=family.ids_input,
            spans=[family.local_rows(index, world.tensor_rank) for index in range(family.count)],
            region=region,
            features=features,
            parts=parts,
            sums=sums,
            words=(rows, gradients),
            ahead=(ahead_rows, ahead_gradients),
            depths=family.depths,
            context=context_region(world, weighs_steps=weighs_steps),
        )


@dataclass(frozen=True, kw_only=True)
class VocabularyShape:
    """What the passes of a sharded output layer are built for.

    Attributes:
        count: Number of shards.
        inputs: Names of the batch tensors of the loss: labels and, where there is one, the mask.
        stream: Shape of the normalized stream of a microbatch, ``(B, T, D)``, of one prediction; with sequence
            parallelism of this rank's tokens.
        dtype: dtype of the arithmetic.
        microbatches: Microbatches of a step on this replica.
        total_microbatches: Microbatches of a step on all replicas.
        token_parts: Ranks that share the tokens of the stream (sequence parallelism).
    """

    count: int
    inputs: tuple[str, ...]
    stream: tuple[int, ...]
    dtype: torch.dtype
    microbatches: int
    total_microbatches: int
    token_parts: int = 1

    @property
    def whole_stream(self) -> tuple[int, int, int]:
        """Shape of the stream with the tokens of all ranks, ``(B, T, D)``."""
        samples, tokens, width = self.stream
        return samples, tokens * self.token_parts, width

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        samples, tokens, _ = self.whole_stream
        return samples * tokens

    def stream_of(self, predictions: int) -> tuple[int, ...]:
        """Return the shape of the streams of several predictions."""
        return (predictions * self.stream[0], *self.stream[1:])


class VocabularyPasses:
    """Runs S and T of the local shards, and merges the parts on the rank of the last stage.

    Args:
        shape: Sizes.
        shards: Name -> module of the local shards, in order.
        partition: The active partition.
        world: Processes of the run.
        groups: Process groups of the messages.
        profiler: Measures the shards.
        trains_words: Whether the word table trains.

    Attributes:
        lookups: Passes E and G of the embedding.
        ahead: Those of each depth of multi-token prediction.
    """

    def __init__(
        self,
        shape: VocabularyShape,
        shards: Mapping[str, nn.Module],
        partition: Partition,
        world: World,
        groups: VocabularyGroups,
        profiler: LayerProfiler,
        *,
        trains_words: bool = True,
    ) -> None:
        self.shape, self._groups, self._profiler, self._world = shape, groups, profiler, world
        self._region = groups.region
        self._modules = {name: module for name, module in shards.items() if isinstance(module, VocabularyShard)}
        casts = shape.dtype != torch.float32
        self._copies = {name: ComputeCopies(module, shape.dtype) for name, module in self._modules.items() if casts}
        self._run: dict[str, Callable[..., tuple[VocabularyPart, Callable[..., None]]]] = {
            name: self._copies.get(name, module) for name, module in self._modules.items()
        }
        last = partition.stage_ranks[-1]
        self.is_last = world.pipeline_rank == last
        ranks = sorted(set(partition.stage_ranks))
        self._source = world.global_rank(world.peer(last))
        self._others = {rank: world.global_rank(world.peer(rank)) for rank in ranks if rank != last}
        placed = ranks_of_shards(shape.count, ranks)
        self._nodes = {
            rank: subtrees(placed.index(rank), placed.index(rank) + placed.count(rank), shape.count)
            for rank in ranks
            if rank in placed
        }
        look_up = partial(
            WordLookups,
            stream=shape.whole_stream,
            dtype=shape.dtype,
            microbatches=shape.microbatches,
            spans=groups.spans,
            shards=self._modules,
            copies=self._copies,
            placed=placed,
            world=world,
            profiler=profiler,
        )
        self.lookups = look_up(first=partition.stage_ranks[0], groups=groups.words, trains=trains_words)
        # Here: a copy from the host in each microbatch would wait for the device.
        self._scales_K = torch.tensor([1.0, *groups.depths], device=world.device)
        # The depths train the table behind a frozen front, too, but not one that only adapters change.
        trains_rows = all(module.words.requires_grad for module in self._modules.values())
        self.ahead = tuple(
            look_up(
                first=_rank_of(partition, prediction_item(depth)), groups=groups.ahead, trains=trains_rows, defers=True
            )
            for depth in range(len(groups.depths))
        )
        self._reset()

    def _reset(self) -> None:
        self._training, self._factor, self._predictions = False, 1.0, 1
        self._labels: Sequence[torch.Tensor] = ()
        self._weights: Sequence[torch.Tensor] = ()
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._features: dict[int, tuple[torch.Tensor, dist.Work | None]] = {}
        self._sums: dict[int, tuple[torch.Tensor, dist.Work | None]] = {}
        self._parts: dict[int, dict[Node, VocabularyPart]] = {}
        self._arriving: dict[int, list[dist.Work]] = {}
        self._add: dict[int, dict[str, Callable[..., None]]] = {}
        self._sent: dict[int, list[tuple[dist.Work | None, torch.Tensor]]] = {}

    def begin_step(self, inputs: Mapping[str, torch.Tensor], loss_scale: float, *, training: bool) -> None:
        """Prepare for the first microbatch of a step.

        Args:
            inputs: Batch of the step, tensors ``[samples, ...]``.
            loss_scale: Factor of the loss in the backward.
            training: False evaluates.
        """
        self._reset()
        for copies in self._copies.values():
            copies.refresh()
        self._training = training
        self._factor = loss_scale / self.shape.total_microbatches
        device = self._world.device
        label_name, *mask_name = self.shape.inputs
        labels = inputs[label_name].to(device, non_blocking=True)
        by_microbatch = torch.tensor_split(labels, self.shape.microbatches)
        masks: Sequence[torch.Tensor | None] = [None] * self.shape.microbatches
        if mask_name:
            masks = torch.tensor_split(inputs[mask_name[0]].to(device, non_blocking=True), self.shape.microbatches)
        # An evaluation has the model's own prediction alone.
        depths = len(self.ahead) if training else 0
        targets = PredictionTargets.of(inputs[label_name], by_microbatch, masks, depths, self._groups.context)
        self._labels, self._weights, self._predictions = targets.labels, targets.weights, 1 + depths
        self._expect_features(0)
        self.lookups.begin_step(inputs[self._groups.ids_input], training=training)
        for lookups, ids in zip(self.ahead[:depths], targets.ids, strict=True):
            lookups.begin_step(ids, training=True)

    def end_step(self) -> None:
        """Complete what the last microbatch has left over."""
        for lookups in self._active_lookups():
            lookups.end_step()

    def _active_lookups(self) -> tuple[WordLookups, ...]:
        """Return those of this step: the depths of multi-token prediction take part in training only."""
        return (self.lookups, *self.ahead) if self._training else (self.lookups,)

    def look_up(self, microbatch: int) -> None:
        """E: look up the rows of the embedding, and those of each depth.

        Args:
            microbatch: Microbatch of the step, from 0.
        """
        for lookups in self._active_lookups():
            lookups.look_up(microbatch)

    def add_word_gradients(self, microbatch: int) -> None:
        """G: add the gradients of these rows, in the same order on all ranks.

        Args:
            microbatch: Microbatch of the step, from 0.
        """
        for lookups in self._active_lookups():
            lookups.add_gradients(microbatch)

    def lookup_of(self, name: str) -> Callable[[int], torch.Tensor]:
        """Return what gives the rows of a microbatch that a stage reads by this name."""
        if name == WORDS:
            return self.lookups.words
        return partial(self._words_ahead, int(name.rpartition(".")[2]))

    def _words_ahead(self, depth: int, microbatch: int) -> torch.Tensor:
        """Return the rows that a depth reads, ``[B, T, D]``; of no sample in an evaluation.

        Args:
            depth: Depth of multi-token prediction, from 0.
            microbatch: Microbatch of the step, from 0.
        """
        if self._training:
            return self.ahead[depth].words(microbatch)
        return torch.empty(0, *self.shape.stream[1:], dtype=self.shape.dtype, device=self._world.device)

    def metrics(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return item -> metric -> mean over the microbatches of the last step: the loss of each depth.

        Values are float64 on the device of the last stage; other ranks have none.
        """
        if not self._losses:
            return {}
        losses_MK = torch.stack([torch.stack(self._losses[microbatch]) for microbatch in sorted(self._losses)])
        return {
            prediction_item(depth): {LOSS_METRIC: mean}
            for depth, mean in enumerate(losses_MK.double().mean(0).unbind())
        }

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch whose logits are computed in this step."""
        return self._predictions * self.shape.tokens

    def _expect_features(self, microbatch: int) -> None:
        """Post the receive of a microbatch's stream."""
        if self.is_last or microbatch in self._features or microbatch >= self.shape.microbatches:
            return
        shape = self.shape.stream_of(self._predictions)
        buffer = torch.empty(shape, dtype=self.shape.dtype, device=self._world.device)
        self._features[microbatch] = buffer, dist.irecv(buffer, self._source, group=self._groups.features)

    def _send(self, microbatch: int, tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
        # Kept until T of the microbatch: a send reads its tensor until it has completed.
        self._sent.setdefault(microbatch, []).append((dist.isend(tensor, target, group=group), tensor))

    def send_features(self, microbatch: int, stream: torch.Tensor) -> None:
        """At F of the last stage: send the stream to the other ranks, and post the receives of their parts.

        Args:
            microbatch: Microbatch of the step, from 0.
            stream: Normalized stream, ``[B, T, D]``; with multi-token prediction of the samples of all predictions.
        """
        x_BTD = stream.detach()[: self._predictions * self.shape.stream[0]].contiguous()
        self._features[microbatch] = x_BTD, None
        arriving: list[dist.Work] = []
        parts = self._parts.setdefault(microbatch, {})
        for rank, target in self._others.items():
            self._send(microbatch, x_BTD, target, self._groups.features)
            for node in self._nodes.get(rank, ()):
                part = parts[node] = VocabularyPart.empty(
                    self._tokens, self.shape.stream[-1], self.shape.dtype, x_BTD.device
                )
                works = [dist.irecv(tensor, target, group=self._groups.parts) for tensor in part.tensors]
                arriving += [work for work in works if work is not None]
        self._arriving[microbatch] = arriving

    def run_shards(self, microbatch: int) -> None:
        """S: compute the parts of the local shards, and send them to the rank of the last stage.

        Args:
            microbatch: Microbatch of the step, from 0.
        """
        self._expect_features(microbatch)
        x_BTD, work = self._features.pop(microbatch)
        if work is not None:
            work.wait()
        labels_N = self._labels[microbatch]
        if self._region is not None and self.shape.token_parts > 1:
            x_BTD = self._region.gather_tokens(x_BTD)
        x_ND = x_BTD.flatten(0, -2)
        parts: dict[Node, VocabularyPart] = {}
        add = self._add.setdefault(microbatch, {})
        with self._profiler.busy(), torch.set_grad_enabled(self._training):
            for name, run in self._run.items():
                index = shard_index(name) or 0
                with self._profiler.forward(name):
                    parts[index, index + 1], add[name] = run(x_ND, labels_N)
                rows, width = self._modules[name].output.shape
                self._profiler.set_activation_bytes(
                    name, shard_activation_bytes(rows, width, self._tokens, x_ND.element_size())
                )
            # Behind the products: with NCCL a receive is a kernel that occupies the device until its message is there.
            self._expect_features(microbatch + 1)
            nodes = {node: merge_tree(*node, parts) for node in self._nodes.get(self._world.pipeline_rank, ())}
        if self.is_last:
            self._parts.setdefault(microbatch, {}).update(nodes)
            return
        for part in nodes.values():
            for tensor in part.tensors:
                self._send(microbatch, tensor.detach(), self._source, self._groups.parts)
        if self._training:
            buffer = torch.empty(self._tokens, device=x_ND.device)
            self._sums[microbatch] = buffer, dist.irecv(buffer, self._source, group=self._groups.sums)

    def loss(self, microbatch: int, stream: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
        """At B of the last stage: merge the parts of all shards, and send the log-sums to the other ranks.

        Args:
            microbatch: Microbatch of the step, from 0.
            stream: The stream of :meth:`send_features`, with its graph.
            placeholder: The loss of the microbatch, a float32 scalar that is set here.

        Returns:
            The loss with the gradient of the stream, a float32 scalar.
        """
        for work in self._arriving.pop(microbatch):
            work.wait()
        weights_N = self._weights[microbatch]
        with torch.no_grad():
            whole = merge_tree(0, self.shape.count, self._parts.pop(microbatch))
            if self._region is not None:
                whole = whole.on_all_ranks(self._region)
            own_loss, *further_losses = whole.losses(weights_N, self._predictions)
            loss = own_loss * self._factor
            placeholder.copy_(loss)
            if not self._training:
                return placeholder
            log_sums_N = whole.log_sum()
            if further_losses:
                self._losses[microbatch] = further_losses
            gradient_ND = whole.input_gradient(self._gradient_weights(microbatch))
            samples, *rest = self.shape.whole_stream
            gradient_BTD = self._sum_over_region(gradient_ND.view(self._predictions * samples, *rest))
        for target in self._others.values():
            self._send(microbatch, log_sums_N, target, self._groups.sums)
        self._sums[microbatch] = log_sums_N, None
        injected: torch.Tensor = InjectLoss.apply(stream, loss, gradient_BTD)  # type: ignore[no-untyped-call]
        return injected

    def _gradient_weights(self, microbatch: int) -> torch.Tensor:
        """Return the weight of each token's loss in the backward, float32 ``[N]`` of all predictions."""
        weights_N = self._weights[microbatch] * self._factor
        if self._predictions == 1:
            return weights_N
        return (weights_N.view(self._predictions, -1) * self._scales_K[:, None]).flatten()

    def _sum_over_region(self, gradient_BTD: torch.Tensor) -> torch.Tensor:
        """Sum the slices' gradients of the stream, ``[B, T, D]``; with sequence parallelism those of its tokens."""
        if self._region is None:
            return gradient_BTD
        if self.shape.token_parts > 1:
            return self._region.scatter_tokens(gradient_BTD)
        return self._region.all_reduce(gradient_BTD.contiguous())

    def add_gradients(self, microbatch: int) -> None:
        """T: add the gradients of the local shards, in training, and free the messages of the microbatch.

        Args:
            microbatch: Microbatch of the step, from 0.
        """
        # All receives of these messages were posted before B of the last stage, which T follows.
        for sent, _ in self._sent.pop(microbatch, ()):
            if sent is not None:
                sent.wait()
        add = self._add.pop(microbatch)
        if not self._training:
            return
        log_sums_N, work = self._sums.pop(microbatch)
        if work is not None:
            work.wait()
        weights_N = self._gradient_weights(microbatch)
        with self._profiler.busy():
            for name, add_gradient in add.items():
                with self._profiler.backward((name,)):
                    add_gradient(log_sums_N, weights_N)


def _rank_of(partition: Partition, item: str) -> int:
    """Return the pipeline rank of an item."""
    return next(rank for names, rank in zip(partition.stages, partition.stage_ranks, strict=True) if item in names)
