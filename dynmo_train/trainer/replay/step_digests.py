"""Digests of the tensors of one training step, equal on every partition, schedule and number of pipeline ranks.

On every rank::

    Engine.launch_step
      | StageModule.forward -> activation          digest of the output; a hook on it digests its gradient
      | ItemStage, a microbatch -> accumulated     digest of the sum of the weight gradients up to this microbatch
      | Engine.prepare_gradients -> gradients      digest of the gradient of each parameter
    observe_weights before and after the step      digest of each parameter
      |
      v
    gathered_digests: all ranks -> the order of the computation

A tensor that several ranks have is recorded by one of them. What an item writes belongs to the pipeline rank that runs
it, and a microbatch to one replica, so that no name contains a rank; slices of tensor, context and expert parallelism
have a number (``part``).
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...data.batch import Batch
from ...formats.step_digests import (
    DIRECTIONS,
    DigestLayout,
    Direction,
    TensorDigest,
    TensorKey,
    tensor_of_record,
    tensor_record,
)
from ...models.layer_list import parameters_of
from ...models.sharding import is_of_expert, needs_whole_stream
from ...parallel.fsdp import accumulated_gradients
from ...parallel.process_groups import World, all_gather_objects
from ..engine import Engine
from ..step_result import StepResult


def tensor_digest(key: TensorKey, tensor: torch.Tensor) -> TensorDigest:
    """The digest of a tensor, on the host; waits for the device.

    Args:
        key: which tensor it is.
        tensor: any shape, dtype and device.
    """
    values = tensor.detach().to("cpu")
    dtype = _dtype_name(values)
    digest = hashlib.blake2b(f"{dtype} {','.join(map(str, values.shape))}\n".encode(), digest_size=16)
    digest.update(_bytes_of(values))
    is_float = values.is_floating_point()
    nonfinite = int(values.isfinite().logical_not().sum()) if is_float else 0
    return TensorDigest(key=key, dtype=dtype, shape=tuple(values.shape), nonfinite=nonfinite, digest=digest.hexdigest())


class DigestObserver:
    """Records the digests of this rank's tensors in one step.

    Args:
        engine: engine of this rank.
        copy_keys: tensors to copy to the host, too.

    Attributes:
        digests: key -> digest of each recorded tensor.
        copies: key -> copy of each tensor of ``copy_keys``, on the CPU.
    """

    def __init__(self, engine: Engine, copy_keys: Iterable[TensorKey] = ()) -> None:
        self._engine, self._world = engine, engine.world
        self._copy_keys = frozenset(copy_keys)
        self.digests: dict[TensorKey, TensorDigest] = {}
        self.copies: dict[TensorKey, torch.Tensor] = {}
        dims, world = engine.world.dims, engine.world
        self._token_part = world.context_rank * dims.tensor + world.tensor_rank
        # Without sequence parallelism the tensor-parallel ranks have equal activations.
        self._has_own_tokens = engine.settings.sequence_parallel or world.tensor_rank == 0

    def _record(self, key: TensorKey, tensor: torch.Tensor) -> None:
        # A split backward may pass a hook twice, with the same gradient.
        if key in self.digests:
            return
        self.digests[key] = tensor_digest(key, tensor)
        if key in self._copy_keys:
            self.copies[key] = tensor.detach().to("cpu", copy=True)

    def activation(self, item: str, microbatch: int, output: torch.Tensor) -> None:
        """Record the ``output`` of an item, of any shape, in a ``microbatch``, and its gradient."""
        if not self._has_own_tokens:
            return
        place: dict[str, Any] = {"item": item, "microbatch": microbatch, "part": self._token_part}
        self._record(TensorKey(direction="activation", **place), output)
        if output.requires_grad:
            gradient = TensorKey(direction="activation_gradient", **place)
            output.register_hook(lambda grad: self._record(gradient, grad))

    def accumulated(self, items: Sequence[str], microbatch: int) -> None:
        """Record what the microbatches of this replica up to ``microbatch`` have added to the weight gradients.

        Args:
            items: items of a stage.
            microbatch: global microbatch index.
        """
        for item in items:
            module = self._engine.item_store.modules[item]
            sums_tokens = self._engine.settings.sequence_parallel and not needs_whole_stream(module)
            for name, gradient, is_sum in self._accumulated_of(item, module):
                is_slice = self._engine.item_store.sharding.split_dim(name) is not None or sums_tokens
                if not is_slice and self._world.tensor_rank:
                    continue
                # Context-parallel ranks have the gradients of their tokens; with a sum per microbatch each rank has its
                # rows of those of all replicas.
                part = self._world.data_rank if is_sum else self._world.context_rank
                part = part * self._world.dims.tensor + self._world.tensor_rank
                key = TensorKey(
                    direction="accumulated_gradient", item=item, parameter=name, microbatch=microbatch, part=part
                )
                self._record(key, gradient)

    def _accumulated_of(self, item: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Global name, gradient so far, and whether it is the local rows of a sum over the replicas."""
        if self._engine.item_store.sharding.fsdp is not None:
            if self._world.device.type == "cuda":
                # FSDP2 sums on streams of its own.
                torch.cuda.synchronize(self._world.device)
            for child, gradient, is_sum in accumulated_gradients(module):
                yield f"{item}.{child}", gradient, is_sum
            return
        pending = getattr(module, "pending", None)
        for name, parameter in parameters_of(item, module).items():
            found = parameter.grad
            if pending is not None and pending.is_of(parameter):
                found = pending.accumulated()
            if found is not None:
                yield name, found, False

    def gradients(self) -> None:
        """Record the gradients of the local parameters; see ``StepObserver``."""
        for item, name, parameter in self._engine.item_store.parameters():
            if parameter.grad is not None:
                self._record_part("weight_gradient", item, name, parameter.grad)

    def observe_weights(self, direction: Direction) -> None:
        """Record the local parameters. Every rank calls this: with ZeRO it is a collective over the replicas.

        Args:
            direction: ``initial_weight`` or ``weight``.
        """
        for item, name, parameter in self._engine.item_store.parameters():
            self._record_part(direction, item, name, parameter)

    def _record_part(self, direction: Direction, item: str, name: str, tensor: torch.Tensor) -> None:
        """Record this rank's part of a parameter or of its gradient, gathered over the replicas that shard it."""
        store, world = self._engine.item_store, self._world
        sharding = store.sharding
        if sharding.fsdp is not None:
            rows = parameters_of(item, store.blueprint(item))[name].shape[0]
            tensor = sharding.gather_rows(name, tensor.detach(), rows)
        is_copy = world.data_rank >= world.dims.expert or name in self._engine.family.ties
        if is_copy or not sharding.is_writer(name):
            return
        part = world.tensor_rank if sharding.split_dim(name) is not None else 0
        if sharding.dispatcher is not None and is_of_expert(name):
            part += sharding.dispatcher.rank * world.dims.tensor
        self._record(TensorKey(direction=direction, item=item, parameter=name, part=part), tensor)


def observed_step(
    engine: Engine, batch: Batch, advance: int, copy_keys: Iterable[TensorKey] = ()
) -> tuple[StepResult, DigestObserver]:
    """Execute a step and record its tensors. Every rank calls this.

    Args:
        engine: engine of this rank.
        batch: samples of the step.
        advance: number of samples by which the learning-rate schedule advances.
        copy_keys: tensors to copy to the host.
    """
    observer = DigestObserver(engine, copy_keys)
    observer.observe_weights("initial_weight")
    engine.profiler.observer = observer
    try:
        result = engine.train_step(batch, sampled=False, advance=advance)
    finally:
        engine.profiler.observer = None
    observer.observe_weights("weight")
    return result, observer


def layout_of(engine: Engine) -> DigestLayout:
    """The layout of an engine, as far as it decides which tensors are comparable."""
    dims, settings = engine.world.dims, engine.settings
    is_sharded = engine.item_store.sharding.fsdp is not None
    return DigestLayout(
        tensor_parallel_size=dims.tensor,
        context_parallel_size=dims.context,
        replicas=dims.replicas,
        expert_parallel_size=dims.expert,
        sequence_parallel=settings.sequence_parallel,
        vocabulary_shards=len(engine.partition.shards),
        is_sharded=is_sharded,
        sums_microbatches=is_sharded and settings.zero_sync_microbatches,
    )


def gathered_digests(world: World, names: Sequence[str], observer: DigestObserver) -> tuple[TensorDigest, ...]:
    """The digests of all ranks in the order of the computation, equal on every rank. Every rank calls this.

    Args:
        world: process groups.
        names: names of all items, in list order.
        observer: observer of this rank, after the step.
    """
    order = {name: at for at, name in enumerate(names)}
    found: dict[TensorKey, TensorDigest] = {}
    for of_rank in all_gather_objects(world, [tensor_record(each) for each in observer.digests.values()]):
        for each in map(tensor_of_record, of_rank):
            found.setdefault(each.key, each)

    def place(key: TensorKey) -> tuple[int, int, int, str, int]:
        at = order[key.item]
        in_order = -at if key.direction in ("activation_gradient", "accumulated_gradient") else at
        microbatch = -1 if key.microbatch is None else key.microbatch
        return DIRECTIONS.index(key.direction), microbatch, in_order, key.parameter or "", key.part

    return tuple(found[key] for key in sorted(found, key=place))


def gathered_copies(world: World, observer: DigestObserver) -> dict[TensorKey, torch.Tensor]:
    """The copied tensors of all ranks, on the CPU, equal on every rank. Every rank calls this."""
    own = [
        {
            **vars(key),
            "dtype": _dtype_name(copy),
            "shape": list(copy.shape),
            "bytes": b64encode(_bytes_of(copy)).decode(),
        }
        for key, copy in observer.copies.items()
    ]
    found: dict[TensorKey, torch.Tensor] = {}
    for each in (each for of_rank in all_gather_objects(world, own) for each in of_rank):
        dtype, shape, payload = getattr(torch, each.pop("dtype")), each.pop("shape"), b64decode(each.pop("bytes"))
        flat = torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)
        found[TensorKey(**each)] = flat.reshape(shape)
    return found


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor in row-major order, little-endian, as all hosts that torch supports here are."""
    # As bytes, because numpy has no bfloat16.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def nonfinite_tensors(digests: Iterable[TensorDigest]) -> Iterator[TensorDigest]:
    """Those with an element that is not finite, in order."""
    return (each for each in digests if each.nonfinite)
