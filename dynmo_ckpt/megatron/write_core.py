"""Plans a distributed checkpoint as Megatron-core writes it (``torch_dist``), without torch. Pure.

``__0_0.distcp`` has the tensors, each as ``torch.save`` writes it, ``.metadata`` their places, and ``common.pt``
everything else. Layers are stacked along a first dimension, one chunk each. Optimizer state has the form that
Megatron-core calls ``fully_reshardable``: float32 weights and moments under the names of the weights. An optimizer that
is not distributed has another name for the float32 weights: the same bytes have both.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from .._common.document import encode_json
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import DECODERS, GATED, SIGMOID_GATED, decoder_fields, unlike_family
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor, Writable
from ..torch_save.distributed import Entries, chunks_of, distributed_files
from ..torch_save.pickles import GlobalName
from ..torch_save.writer import (
    ConstantStorages,
    NewObject,
    TorchSaveFile,
)
from .core_decoder import check_decoder, decoder_args
from .core_names import EXTRA_STATE, core_name
from .model_sizes import legacy_args, megatron_rows
from .read_core_decoder import MAP
from .training_progress import adam_groups, grad_scaler, megatron_args, progress_of
from .write import check_supported
from .write_optimizer import MOMENTS, mapped_moments

FULLY = "fully_reshardable"
MASTER, PLAIN_MASTER = "optimizer.state.param.", "optimizer.state.fp32_param."
STACKED_LAYERS, EXPERTS = "decoder.layers.", ".mlp.experts.experts."
WITH_EXTRA_STATE = re.compile(r"\.(linear_\w+|eh_proj|\w*layernorm|enorm|hnorm)$")
FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "linear_q_up_proj": "q_layernorm",
    "linear_kv_up_proj": "kv_layernorm",
}
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")


def plan_core(
    checkpoint: NativeCheckpoint, *, dtype: str | None = None, with_optimizer: bool = False
) -> tuple[list[Writable], dict[str, bytes]]:
    """Plan the files of one iteration, and the small files next to them.

    Args:
        checkpoint: the input; pruned weights become zeros.
        dtype: type of the weights, as in safetensors; None keeps the type of the input.
        with_optimizer: include the optimizer state.

    Raises:
        UnsupportedError: a model that Megatron-core does not compute, or a tensor without a map.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    if model["family"] not in DECODERS:
        raise UnsupportedError(
            f"Megatron-core: the family {model['family']} is not supported, only gpt and llama; use --to native"
        )
    is_own = has_own_map(model)
    if is_own:
        check_decoder(model)
    else:
        check_supported(model, 3.0, "Megatron-core")
    name_map = load_map(MAP) if is_own else load_map(f"legacy_{model['family']}", "2")
    layout = layout_of(name_map, model, foreign_vocab_size=megatron_rows(model, 1))
    stored = checkpoint.weights()
    masks = checkpoint.masks()
    weights = to_foreign(layout, stored, ties, masks)
    buffers = set(checkpoint.names("buffer"))
    entries = _entries("", weights, dtype, model, buffers)
    weights_only = dict(entries)
    if with_optimizer:
        # The masters are float32, whatever the type of the weights.
        trained = [each for each in weights if each.source_name not in buffers]
        entries |= _entries(MASTER, trained, "F32", model)
        moments = mapped_moments(checkpoint, layout, rank=0, ranks=1)
        for kind in MOMENTS:
            entries |= _entries(f"optimizer.state.{kind}.", moments[kind].values(), "F32", model)
    folder = f"iter_{checkpoint.manifest['step']:07d}"
    second = {name: name.replace(MASTER, PLAIN_MASTER, 1) for name in entries if name.startswith(MASTER)}
    empty = {name: [None] for name in extra_states(weights_only, model)}
    data, metadata = distributed_files(f"{folder}/", entries, empty, second)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    small = {
        "latest_checkpointed_iteration.txt": str(checkpoint.manifest["step"]).encode(),
        f"{folder}/.metadata": metadata,
        f"{folder}/metadata.json": encode_json({**about, "common_backend_version": 1}),
    }
    return [data, _common(f"{folder}/common.pt", checkpoint, with_optimizer=with_optimizer)], small


def has_own_map(model: Mapping[str, Any]) -> bool:
    """Whether a decoder has parts that the names of GPT and Llama of legacy Megatron do not have.

    Args:
        model: the ``model`` of a manifest.
    """
    scaling = decoder_fields(model)["rotary_scaling"] or {"rope_type": "llama3"}
    is_plain = not unlike_family(model) and not model.get("num_experts") and not model.get("sliding_window")
    if is_plain and scaling["rope_type"] == "llama3" and model["activation"] not in SIGMOID_GATED:
        return False
    # Megatron-core has no names for an MLP without a gate next to rotary positions here, nor for other families.
    return decoder_fields(model)["position_embedding"] == "rotary" and model["activation"] in GATED


def described_args(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that describe the ``model`` of a manifest.

    Raises:
        UnsupportedError: a rotary scaling, a router or a window that Megatron-core does not have.
    """
    return decoder_args(model) if has_own_map(model) else legacy_args(model, 1, 1, 3.0, None, "Megatron-core")


def _entries(
    prefix: str,
    tensors: Iterable[MappedTensor],
    dtype: str | None,
    model: Mapping[str, Any],
    buffers: Container[str] = (),
) -> Entries:
    """For each Megatron-core name its chunks: begin in the stacked tensor, and the tensor to write."""
    found: Entries = {}
    is_own = has_own_map(model)
    for each in tensors:
        name = each.name if is_own else core_name(each.name)
        # Megatron-core stacks a weight of all layers in one tensor, where all layers are alike. Each layer is written
        # as a chunk of it.
        match = None if model.get("moe_layer_pattern") else LAYER.match(name)
        stacked = LAYER.sub("decoder.layers.", name) if match else name
        cast = None if dtype == each.content.dtype or each.source_name in buffers else dtype
        whole = OutputTensor(key=f"{prefix}{name}", shape=each.shape, content=each.content, mask=each.mask, cast=cast)
        for begin, part in chunks_of(whole):
            chunk = ((int(match[1]), *begin), replace(part, shape=(1, *part.shape))) if match else (begin, part)
            found.setdefault(prefix + stacked, []).append(chunk)
    return {name: sorted(chunks, key=lambda chunk: chunk[0]) for name, chunks in found.items()}


def extra_states(entries: Entries, model: Mapping[str, Any]) -> list[str]:
    """Names of the extra state of modules, which Megatron-core requests of a checkpoint and which has no contents here.

    Its linear layers have it, and with Transformer Engine norms and attention too. Megatron-core gives each layer, and
    each expert, a shard of its own.

    Args:
        entries: the weights.
        model: the ``model`` of a manifest.
    """
    layers, experts = model["num_layers"], model.get("num_experts", 0)
    shards: dict[str, tuple[int, ...]] = {}
    for name in entries:
        module = name.rpartition(".")[0]
        is_stacked = module.startswith(STACKED_LAYERS) and not LAYER.match(module)
        counts: tuple[int, ...] = (layers,) if is_stacked else ()
        counts += (experts,) if EXPERTS in module else ()
        shards |= {each: counts or (1,) for each in _modules(name)}
    return [
        f"{module}.{EXTRA_STATE}/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, counts))}"
        for module, counts in shards.items()
        for place in product(*map(range, counts))
    ]


def _modules(name: str) -> list[str]:
    """The modules with extra state to which a weight belongs; a fused norm is also a module of its own."""
    module, _, part = name.rpartition(".")
    own = [module] if WITH_EXTRA_STATE.search(module) else []
    if module.endswith("linear_proj"):
        own.append(f"{module.removesuffix('linear_proj')}core_attention")
    for linear, norm in FUSED_NORMS.items():
        if part.startswith("layer_norm_") and module.endswith(linear):
            own.append(module.removesuffix(linear) + norm)
    return own


def _common(name: str, checkpoint: NativeCheckpoint, *, with_optimizer: bool) -> TorchSaveFile:
    """``common.pt``: arguments, progress, and the parameter groups without tensors."""
    model, optimizer = checkpoint.manifest["model"], checkpoint.manifest["optimizer"]
    progress, constants = progress_of(checkpoint.manifest), ConstantStorages()
    args = described_args(model) | megatron_args(progress)
    args |= {"use_dist_ckpt": True, "dist_ckpt_format": "torch_dist", "ckpt_format": "torch_dist"}
    tree: dict[str, Any] = {
        "args": NewObject(GlobalName("argparse", "Namespace"), args),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.manifest["step"],
    }
    if progress.scheduler is not None:
        tree["opt_param_scheduler"] = dict(progress.scheduler)
    if with_optimizer:
        steps = set(optimizer["steps"].values())
        if len(steps) > 1:
            raise UnsupportedError(
                f"{checkpoint.directory}: its parameters did {sorted(steps)} optimizer steps; Megatron-core stores one "
                "number; use --no-optimizer or --to native"
            )
        decay = max((group["weight_decay"] for group in optimizer["groups"]), default=0.0)
        # A group lists no parameters: in this form Megatron-core finds the state of a parameter by its name.
        groups = [{**fields, "step": max(steps, default=0)} for fields in adam_groups(progress, decay)]
        inner = {"param_groups": groups, "state": {"common_step": max(steps, default=0)}}
        state: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": FULLY}
        scaler = grad_scaler(progress, constants)
        tree["optimizer"] = state if scaler is None else {**state, "grad_scaler": scaler}
    return TorchSaveFile(name=name, tensors=(), tree=tree, constants=constants.payloads)
