"""``profile build``: a profile from a model's shape and a device, static or with a scripted trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import __version__
from .analytic import Shape, costs_of, work_of_item
from .costs import ItemCosts
from .devices import BYTES_PER_NUMBER, Device
from .errors import UsageError
from .formats._document import envelope
from .formats.profile import Header, Item, parse_profile
from .modelspec import ModelSpec
from .partition import uniform
from .planning import chain_of
from .problem import Problem, places_of
from .simulate import predict
from .trajectories import Moment


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How the model is run; the command's help says what each option means."""

    workers: int = 1
    microbatches: int = 8
    micro_batch_size: int = 1
    sequence: int | None = None
    schedule: str = "1f1b"
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    data_parallel: int = 1
    recompute: str = "none"
    granularity: str = "layer"
    optimizer_bytes_per_param: int = 12


def _item(name: str, layer: str, kind: str, params: int, boundary: int, options: BuildOptions, tied: str | None) -> Any:
    number = BYTES_PER_NUMBER[options.dtype]
    own = 0 if tied else params
    return {
        "name": name,
        "layer": layer,
        "kind": kind,
        "param_count": params,
        "param_bytes": params * number,
        "gradient_bytes": params * number,
        "optimizer_bytes": own * options.optimizer_bytes_per_param,
        "boundary_bytes": boundary,
        "cut_before": True,
        "tied_to": tied,
    }


def _items(spec: ModelSpec, options: BuildOptions, boundary: int) -> list[dict[str, Any]]:
    t, h = options.tensor_parallel, spec.hidden
    norms = 2 * h

    def block(prefix: str, cross: bool) -> list[dict[str, Any]]:
        attention = spec.attention_params // t + norms
        mlp = spec.experts * spec.expert_params // t + norms + (spec.experts * h if spec.experts > 1 else 0)
        rows = [("attention", attention), ("cross_attention", attention), ("mlp", mlp)]
        return [
            _item(f"{prefix}.{kind}", prefix, kind, params, boundary, options, None)
            for kind, params in rows
            if cross or kind != "cross_attention"
        ]

    embedding = spec.embedding_params // t
    items = []
    first = "embedding"
    if spec.encoder_layers:
        first = "encoder.embedding"
        items.append(_item(first, first, "embedding", embedding, boundary, options, None))
        for index in range(spec.encoder_layers):
            items += block(f"encoder.layers.{index}", cross=False)
        items.append(_item("decoder.embedding", "decoder.embedding", "embedding", embedding, boundary, options, first))
        for index in range(spec.layers):
            items += block(f"decoder.layers.{index}", cross=True)
    else:
        items.append(_item(first, first, "embedding", embedding, boundary, options, None))
        for index in range(spec.layers):
            items += block(f"layers.{index}", cross=False)
    items.append(_item("head", "head", "head", embedding, boundary, options, first if spec.tied else None))
    return items


def build_header(spec: ModelSpec, device: Device, options: BuildOptions, run_id: str) -> dict[str, Any]:
    """The header line of the profile."""
    if options.tensor_parallel < 1 or spec.heads % options.tensor_parallel:
        raise UsageError(f"{spec.heads} heads cannot be shared by {options.tensor_parallel} tensor-parallel ranks")
    sequence = options.sequence or spec.sequence
    boundary = options.micro_batch_size * sequence * spec.hidden * BYTES_PER_NUMBER[options.dtype]
    ranks = options.tensor_parallel * options.data_parallel
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
        },
        "schedule": options.schedule,
        "virtual_stages_per_worker": 1,
        "granularity": options.granularity,
        "microbatches": options.microbatches,
        "micro_batch_size": options.micro_batch_size,
        "tensor_parallel_size": options.tensor_parallel,
        "data_parallel_size": options.data_parallel,
        "expert_parallel_size": 1,
        "link": {"bandwidth_bytes_per_s": device.link_bandwidth_bytes_per_s, "latency_ns": device.link_latency_ns},
        "workers": [
            {
                "worker": worker,
                "ranks": list(range(worker * ranks, (worker + 1) * ranks)),
                "hosts": [f"node{worker}"],
                "device": device.kind,
                "memory_bytes": device.memory_bytes,
                "relative_speed": 1,
                "releasable": worker > 0,
            }
            for worker in range(options.workers)
        ],
        "items": _items(spec, options, boundary),
    }


def build_costs(spec: ModelSpec, header: Header, device: Device, options: BuildOptions) -> ItemCosts:
    """The static costs of the items; of a mixture of experts each token pays for the experts that it meets."""
    shape = Shape(
        tokens=header.micro_batch_size * header.model.sequence_length,
        sequence=header.model.sequence_length,
        hidden=spec.hidden,
        dtype=options.dtype,
        tensor_parallel=options.tensor_parallel,
        recompute=options.recompute,
    )
    t = options.tensor_parallel
    matrices = 3 if spec.gated else 2

    def weights(item: Item) -> tuple[int, ...]:
        if item.kind == "mlp":
            return (spec.hidden * spec.ffn * spec.experts_per_token // t,) * matrices
        if item.kind in ("attention", "cross_attention"):
            each = spec.hidden * spec.head_size // t
            return (each * (spec.heads + 2 * spec.kv_heads), each * spec.heads)
        return (spec.embedding_params // t,)

    works = [work_of_item(item, shape, spec.heads, weights(item)) for item in header.items]
    return costs_of(works, shape, device)


def step_record(header: Header, costs: ItemCosts, step: int) -> dict[str, Any]:
    """A step line as the static uniform partition would have measured it."""
    problem = Problem(
        chain=chain_of(header, costs),
        places=places_of(header),
        schedule=header.schedule,
        microbatches=header.microbatches,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
    )
    timeline = predict(problem, uniform.boundaries(problem))
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
    }


def build_lines(header_document: dict[str, Any], header: Header, moments: Iterator[Moment]) -> Iterator[dict[str, Any]]:
    """The lines of the profile: the header, then each moment's event, if any, and its step."""
    yield header_document
    for moment in moments:
        if moment.event is not None:
            yield {"record": "event", "step": max(0, moment.step - 1), **moment.event}
        yield step_record(header, moment.costs, moment.step)


def header_of(document: dict[str, Any]) -> Header:
    """The header record of a header document."""
    return parse_profile([json.dumps(document).encode()], "the header")[0].header
