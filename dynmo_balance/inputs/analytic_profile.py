"""``profile build``: a profile from a model's shape and a device, static or with a scripted trajectory.

::

    ModelSpec, Device, BuildOptions --build_header--> header line --header_of--> Header
                                                                                   | build_costs
    scenarios.scenario_steps(technique, dense costs) <-----------------------------+
               | per step: costs, event
               v
    build_lines: header, then events and step records, as a trainer would write them

The profile has the format of a measured one, so every command works on it, and the trainer can replay it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .. import __version__
from .._common.document import envelope
from .._common.errors import UsageError
from ..costs.analytic import ItemWork, MicrobatchShape, costs_of, norm_work, shard_times, work_of_item
from ..costs.cost_window import ItemCosts
from ..costs.devices import BYTES_PER_NUMBER, Device
from ..costs.model_spec import ModelSpec
from ..formats.profile import Header, Item, parse_profile
from ..partition import uniform
from ..planning.plan_builder import problem_of_run
from ..simulation.simulator import predict
from .scenarios import ScenarioStep


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How the model is trained.

    Attributes:
        workers: pipeline workers.
        microbatches: of one step.
        micro_batch_size: samples per microbatch.
        sequence: tokens per sample; None is the model's own.
        schedule, virtual_stages: of the pipeline.
        dtype: of matrix products.
        tensor_parallel, data_parallel: number of ranks.
        context_parallel: number of ranks that share the tokens of a sample; not counted by ``data_parallel``.
        sequence_parallel, recompute, fused_attention: as in ``costs.analytic.MicrobatchShape``.
        granularity: where plans may cut.
        gradient_bytes_per_param, optimizer_bytes_per_param: sizes; None is Adam's.
    """

    workers: int = 1
    microbatches: int = 8
    micro_batch_size: int = 1
    sequence: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    context_parallel: int = 1
    recompute: str = "none"
    fused_attention: bool = False
    granularity: str = "layer"
    gradient_bytes_per_param: int = 4
    optimizer_bytes_per_param: int | None = None
    vocabulary_parallel: int | None = None

    @property
    def state_bytes_per_param(self) -> int:
        """Adam's two moments at four bytes each, and a float32 copy of weights in half precision.

        With weights and float32 gradients a parameter takes 18 bytes in bfloat16 and 16 in float32, as in Megatron-LM.
        """
        if self.optimizer_bytes_per_param is not None:
            return self.optimizer_bytes_per_param
        return 8 if BYTES_PER_NUMBER[self.dtype] == 4 else 12


def _item(name: str, layer: str, kind: str, params: int, boundary: int, options: BuildOptions) -> dict[str, Any]:
    number = BYTES_PER_NUMBER[options.dtype]
    return {
        "name": name,
        "layer": layer,
        "kind": kind,
        "param_count": params,
        "param_bytes": params * number,
        "gradient_bytes": params * options.gradient_bytes_per_param,
        "optimizer_bytes": params * options.state_bytes_per_param,
        "boundary_bytes": boundary,
        "cut_before": True,
        "tied_to": None,
    }


def _tied(spec: ModelSpec, row: dict[str, Any], to: str, options: BuildOptions) -> dict[str, Any]:
    """The item with a copy of the word table of another item: with its gradient, but without its optimizer state."""
    # Each copy computes a gradient, and the sum is applied once: the first copy has the optimizer state.
    table = spec.table_params // options.tensor_parallel
    number = BYTES_PER_NUMBER[options.dtype]
    return {
        **row,
        "param_count": row["param_count"] + table,
        "param_bytes": row["param_bytes"] + table * number,
        "gradient_bytes": row["gradient_bytes"] + table * options.gradient_bytes_per_param,
        "tied_to": to,
    }


def _inner(spec: ModelSpec, options: BuildOptions, kind: str, number: int) -> dict[str, int]:
    """The optional keys of an item of block ``number``, so that its costs can be computed from the profile."""
    sequence, t = options.sequence or spec.sequence, options.tensor_parallel
    is_mlp = kind == "mlp"
    matrices = spec.mlp_matrices(t, number) if is_mlp else spec.attention_matrices(t)
    found = {
        "x_active_param_count": sum(matrices),
        "x_num_matrices": len(matrices),
        "x_inner_width": spec.mlp_width(number) if is_mlp else spec.attention_width,
    }
    keys = spec.keys(number, sequence)
    return found if kind != "attention" or keys == sequence else {**found, "x_attention_window": keys}


def _number_of(layer: str) -> int:
    """The index of a block in its stack: 7 for ``encoder.layers.7``."""
    return int(layer.rpartition(".")[2])


def _items(spec: ModelSpec, options: BuildOptions, boundary: int) -> list[dict[str, Any]]:
    t = options.tensor_parallel

    def item(name: str, layer: str, kind: str, params: int) -> dict[str, Any]:
        """One item with ``params`` parameters on a tensor-parallel rank."""
        return _item(name, layer, kind, params, boundary, options)

    def block(prefix: str, cross: bool, relative: int) -> list[dict[str, Any]]:
        """The items of a block; ``relative`` is the number of parameters of its relative positions."""
        attention = spec.attention_params(t)
        mlp = spec.mlp_params(t, _number_of(prefix))
        rows = [("attention", attention + relative), ("cross_attention", attention), ("mlp", mlp)]
        return [
            item(f"{prefix}.{kind}", prefix, kind, params) | _inner(spec, options, kind, _number_of(prefix))
            for kind, params in rows
            if cross or kind != "cross_attention"
        ]

    def stack(prefix: str, count: int, cross: bool) -> list[dict[str, Any]]:
        """The items of ``count`` blocks."""
        # T5's table of relative positions is in the first block of a stack, and the others use it.
        relative = spec.relative_params(t)
        return [row for i in range(count) for row in block(f"{prefix}layers.{i}", cross, 0 if i else relative)]

    embedding, extra = spec.embedding_params(t), spec.head_extra_params(t)
    if options.vocabulary_parallel is not None:
        embedding -= spec.table_params // t
    if spec.encoder_layers:
        first = "encoder.embedding"
        items = [
            item(first, first, "embedding", embedding),
            *stack("encoder.", spec.encoder_layers, cross=False),
            _tied(spec, item("decoder.embedding", "decoder.embedding", "embedding", spec.norm_params), first, options),
            *stack("decoder.", spec.layers, cross=True),
        ]
    else:
        first = "embedding"
        items = [item(first, first, "embedding", embedding), *stack("", spec.layers, cross=False)]
    if options.vocabulary_parallel is not None:
        return [*items, item("head", "head", "head", extra)]
    if spec.tied:
        return [*items, _tied(spec, item("head", "head", "head", extra), first, options)]
    return [*items, item("head", "head", "head", extra + spec.table_params // t)]


def build_header(spec: ModelSpec, device: Device, options: BuildOptions, run_id: str) -> dict[str, Any]:
    """The header line of the profile.

    Raises:
        UsageError: the tensor-parallel ranks do not divide the heads, the output layer cannot be split into shards, or
            the tokens cannot be split into two chunks for each context-parallel rank.
    """
    shards = options.vocabulary_parallel
    if shards is not None:
        _check_shards(spec, options, shards)
    if options.tensor_parallel < 1 or spec.heads % options.tensor_parallel:
        raise UsageError(
            f"{spec.heads} heads do not divide into {options.tensor_parallel} tensor-parallel ranks; choose a divisor"
        )
    sequence = options.sequence or spec.sequence
    context = options.context_parallel
    if context > 1 and sequence % (2 * context):
        raise UsageError(
            f"--sequence-length {sequence}: must be a multiple of {2 * context} with --context-parallel {context}, two"
            " chunks for each rank"
        )
    boundary = options.micro_batch_size * sequence // context * spec.hidden * BYTES_PER_NUMBER[options.dtype]
    ranks = options.tensor_parallel * options.data_parallel * context
    devices = options.workers * options.tensor_parallel * context
    bandwidth, latency = device.stage_link(devices, options.tensor_parallel)
    return {
        **envelope("dynmo.profile", 1, f"dynmo-plan {__version__}"),
        "record": "header",
        "run_id": run_id,
        "segment": 0,
        "model": {
            "family": spec.family,
            "num_layers": spec.layers + spec.encoder_layers,
            "hidden_size": spec.hidden,
            "sequence_length": sequence,
            "x_num_attention_heads": spec.heads,
            "x_key_value_width": 2 * spec.kv_heads * spec.head_size,
            "x_score_width": spec.score_width,
        },
        "schedule": options.schedule,
        "virtual_stages_per_worker": options.virtual_stages,
        "granularity": options.granularity,
        "microbatches": options.microbatches,
        "micro_batch_size": options.micro_batch_size,
        "tensor_parallel_size": options.tensor_parallel,
        # As in the trainer: gradients are reduced over both.
        "data_parallel_size": options.data_parallel * context,
        **({"x_context_parallel_size": context} if context > 1 else {}),
        "x_sequence_parallel": options.sequence_parallel,
        "x_recompute": options.recompute,
        "x_fused_attention": options.fused_attention,
        "expert_parallel_size": 1,
        "link": {"bandwidth_bytes_per_s": bandwidth, "latency_ns": latency},
        "workers": [
            {
                "worker": worker,
                "ranks": list(range(worker * ranks, (worker + 1) * ranks)),
                "hosts": [f"node{worker}"],
                "device": device.kind,
                "memory_bytes": device.memory_bytes,
                "relative_speed": 1,
                # The host of the first worker has the rendezvous store of the run, so it is never released.
                "releasable": worker > 0,
            }
            for worker in range(options.workers)
        ],
        "items": _items(spec, options, boundary),
        **({} if shards is None else {"x_vocabulary": _shards(spec, options, shards, sequence // context)}),
    }


def _check_shards(spec: ModelSpec, options: BuildOptions, shards: int) -> None:
    """Check that the trainer can split the output layer of a model into shards.

    Raises:
        UsageError: it cannot.
    """
    flag = f"--vocabulary-parallel {shards}"
    if not options.workers <= shards <= spec.vocabulary:
        raise UsageError(
            f"{flag}: must be at least the {options.workers} workers and at most the {spec.vocabulary:,} tokens of the"
            " vocabulary"
        )


def _shards(spec: ModelSpec, options: BuildOptions, shards: int, sequence: int) -> dict[str, int]:
    """The ``x_vocabulary`` of a header: the sizes of all shards of word table and output layer together."""
    # A tensor-parallel rank has a slice of each shard.
    table, number = spec.table_params // options.tensor_parallel, BYTES_PER_NUMBER[options.dtype]
    tokens, params = options.micro_batch_size * sequence, table * (1 if spec.tied else 2)
    return {
        "shards": shards,
        "param_count": params,
        "output_param_count": table,
        "param_bytes": params * number,
        "gradient_bytes": params * options.gradient_bytes_per_param,
        "optimizer_bytes": params * options.state_bytes_per_param,
        # The exponentials of all logits, and for each shard its part of every token.
        "activation_bytes": tokens
        * (table // spec.hidden * number + shards * (spec.hidden * number + (spec.hidden + 3) * 4)),
        "lookup_bytes": tokens * spec.hidden * number // options.tensor_parallel,
    }


def build_costs(spec: ModelSpec, header: Header, device: Device, options: BuildOptions) -> ItemCosts:
    """The static costs of the items; with experts, a token costs those that it is routed to."""
    shape = shape_of(spec, header, options)
    costs = costs_of(works_of(spec, header, shape), shape, device)
    if options.vocabulary_parallel is None:
        return costs
    return replace(costs, vocabulary=shard_times(spec.table_params // options.tensor_parallel, shape, device))


def shape_of(spec: ModelSpec, header: Header, options: BuildOptions) -> MicrobatchShape:
    """The microbatch of a header under these options."""
    return MicrobatchShape(
        tokens=header.micro_batch_size * header.model.sequence_length // options.context_parallel,
        sequence=header.model.sequence_length,
        hidden=spec.hidden,
        dtype=options.dtype,
        tensor_parallel=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute,
        fused_attention=options.fused_attention,
        context_parallel=options.context_parallel,
    )


def works_of(spec: ModelSpec, header: Header, shape: MicrobatchShape) -> list[ItemWork]:
    """The work of each item; with a mixture of experts, a token uses the experts that it is routed to."""
    t = shape.tensor_parallel

    def weights(item: Item) -> tuple[int, ...]:
        if item.kind == "mlp":
            return spec.mlp_matrices(t, _number_of(item.layer))
        if item.kind in ("attention", "cross_attention"):
            return spec.attention_matrices(t)
        # The vocabulary's matrix comes last: ``work_of_item`` takes the number of logits from it.
        transform = (spec.hidden * spec.hidden,) if spec.head_transform else ()
        return (*transform, spec.table_params // t)

    def work(item: Item) -> ItemWork:
        if item.kind == "head" and header.x_vocabulary is not None:
            return norm_work(shape)
        if item.kind not in ("attention", "cross_attention", "mlp"):
            return work_of_item(item, shape, spec.heads, weights(item))
        number = _number_of(item.layer)
        return work_of_item(
            item,
            shape,
            spec.heads,
            weights(item),
            attention=spec.score_width,
            # Windows limit self-attention only; cross-attention sees the whole input.
            keys=spec.keys(number, shape.sequence) if item.kind == "attention" else None,
            key_values=2 * spec.kv_heads * spec.head_size,
            width=spec.mlp_width(number) if item.kind == "mlp" else spec.attention_width,
        )

    return [work(item) for item in header.items]


def step_record(header: Header, costs: ItemCosts, step: int) -> dict[str, Any]:
    """A step line as measured under the static uniform partition."""
    problem = problem_of_run(header, costs)
    timeline = predict(problem, uniform.boundaries(problem))
    shards, times = header.x_vocabulary, costs.vocabulary
    passes = {}
    if shards is not None and times is not None:
        count = shards["shards"]
        fields = {
            "forward_ns": times.forward_ns,
            "backward_ns": times.weight_ns,
            "activation_bytes": shards["activation_bytes"],
        }
        passes = {"x_vocabulary": {name: [total // count] * count for name, total in fields.items()}}
    return {
        "record": "step",
        "step": step,
        "plan_id": 0,
        "step_ns": timeline.step_ns,
        "forward_ns": list(costs.forward_ns),
        "backward_input_ns": list(costs.backward_input_ns),
        "backward_weight_ns": list(costs.backward_weight_ns),
        "activation_bytes": list(costs.activation_bytes),
        "busy_ns": list(timeline.busy_ns),
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
        **passes,
    }


def build_lines(
    header_document: dict[str, Any], header: Header, steps: Iterator[ScenarioStep]
) -> Iterator[dict[str, Any]]:
    """The lines of the profile: the header, then for each step its event, if any, and its costs."""
    yield header_document
    for scenario_step in steps:
        if scenario_step.event is not None:
            yield {"record": "event", "step": max(0, scenario_step.step - 1), **scenario_step.event}
        yield step_record(header, scenario_step.costs, scenario_step.step)


def header_of(document: dict[str, Any]) -> Header:
    """The header record of a header document.

    Raises:
        DocumentError: it violates the format.
    """
    # Through the reader: what this module builds is checked like any other profile.
    return parse_profile([json.dumps(document).encode()], "the header")[0].header
