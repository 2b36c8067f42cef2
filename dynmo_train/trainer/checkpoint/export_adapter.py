"""Exports a checkpoint with LoRA adapters: as a PEFT adapter, or as a native checkpoint with merged weights.

layers.0.attention.qkv.adapter.lora_A.q_proj
  --peft-->  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     adapter_model.safetensors
  --merge--> layers.0.attention.qkv.weight + alpha / rank * B A                 step-NNNNNNNN/
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..._common.document import encode_json, write_whole
from ..._common.errors import UsageError
from ...formats.checkpoint import Checkpoint, build_manifest, commit, find_checkpoint, new_staging, open_checkpoint
from ...formats.checkpoint.manifest import RunMetadata
from ...formats.checkpoint.writer import dtype_name, write_shard
from ...formats.os_errors import reason
from ...models.layer_list import ModelFamily, expert_biases_of, parameters_of
from ...models.lora import FIELD, LoraSettings, is_adapter, merge_adapters, stored_settings
from ...models.registry import family_of_manifest
from .peft_layout import layout_of, peft_config, peft_tensors

ADAPTER_NAME = re.compile(
    r"layers\.(?P<layer>\d+)\.(?P<part>attention|mlp)\.\w+\.adapter\.(?P<side>lora_[AB])\.(?P<projection>\w+)"
)
MODULES = {"attention": "self_attn", "mlp": "mlp"}


def open_adapted(load: Path) -> tuple[Checkpoint, LoraSettings]:
    """The newest complete checkpoint of a run with adapters, and its adapters.

    Raises:
        UsageError: there is no checkpoint, or it has no adapters.
    """
    checkpoint = open_checkpoint(find_checkpoint(load, weights_only=True))
    settings = stored_settings(checkpoint.manifest["model"])
    if settings is None:
        raise UsageError(
            f"{checkpoint.directory}: the model has no adapters; give a run of pretrain with --lora-rank, or export the"
            " whole model with dynmo-ckpt convert"
        )
    return checkpoint, settings


def export_peft(load: Path, output: Path, base_model: str | None) -> int:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT reads them; the number of tensors.

    Args:
        load: run or checkpoint with adapters.
        output: the directory; must not exist, or be empty.
        base_model: name or path of the base model for PEFT; None leaves it to the reader.

    Raises:
        UsageError: the checkpoint has no adapters, transformers has no such model, or ``output`` has files.
    """
    from safetensors.torch import save

    checkpoint, settings = open_adapted(load)
    model = checkpoint.manifest["model"]
    try:
        layout = layout_of(model, checkpoint.manifest.get("source"))
    except UsageError as error:
        raise UsageError(f"{checkpoint.directory}: {error}") from error
    _check_empty(output)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model["num_layers"]):
        tensors |= peft_tensors(layout, settings, layer, _adapters_of_layer(checkpoint, layer))
    config = peft_config(layout, settings, base_model)
    try:
        output.mkdir(parents=True, exist_ok=True)
        # The configuration last: a reader finds a whole adapter or none.
        write_whole(output / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_whole(output / "adapter_config.json", encode_json(config))
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written: {reason(error)}") from error
    return len(tensors)


def peft_name(name: str) -> str:
    """The name that PEFT has for a tensor of an adapter.

    Raises:
        ValueError: the tensor is not an adapter's.
    """
    found = ADAPTER_NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not a tensor of an adapter")
    layer, part, side, projection = found["layer"], MODULES[found["part"]], found["side"], found["projection"]
    return f"base_model.model.model.layers.{layer}.{part}.{projection}.{side}.weight"


def _adapters_of_layer(checkpoint: Checkpoint, layer: int) -> dict[str, dict[str, torch.Tensor]]:
    """Projection -> ``lora_A`` and ``lora_B`` of a layer."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    names = [name for name in checkpoint.names("parameter") if name.startswith(f"layers.{layer}.")]
    for name, tensor in checkpoint.load([name for name in names if is_adapter(name)]).items():
        matched = ADAPTER_NAME.fullmatch(name)
        if matched is not None:
            found.setdefault(matched["projection"], {})[matched["side"]] = tensor
    return found


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: already exists; give a new directory, or remove it")


def export_merged(load: Path, output: Path) -> Path:
    """Write a native checkpoint whose weights have the adapters added, without optimizer state.

    Args:
        load: run or checkpoint with adapters.
        output: folder of the checkpoint; must not exist, or be empty.

    Returns:
        The directory of the checkpoint.

    Raises:
        UsageError: the checkpoint has no adapters, or ``output`` has files or cannot be written.
    """
    checkpoint, _ = open_adapted(load)
    _check_empty(output)
    manifest = checkpoint.manifest
    model = {name: value for name, value in manifest["model"].items() if name != FIELD}
    # Checkpoints store no padding rows.
    family = family_of_manifest({**manifest["model"], "padded_vocab_size": manifest["model"]["vocab_size"]})
    try:
        output.mkdir(parents=True, exist_ok=True)
        staging = new_staging(output, manifest["step"])
        try:
            reports = [_write_item(staging, number, tensors) for number, tensors in _merged_items(checkpoint, family)]
            if (checkpoint.directory / "tokenizer").is_dir():
                shutil.copytree(checkpoint.directory / "tokenizer", staging / "tokenizer")
            metadata = RunMetadata(
                run_id=manifest["run_id"],
                step=manifest["step"],
                consumed_train_samples=manifest["consumed_train_samples"],
                model=model,
                topology=manifest["topology"],
                dynamic={**manifest["dynamic"], "frozen_items": []},
                ties=manifest["ties"],
                optimizer=None,
                data=manifest["data"],
                source=manifest.get("source"),
                rng=manifest["rng"],
                extra={},
            )
            document = build_manifest(metadata, reports, written_by=f"dynmo-train {__version__}")
            return commit(output, manifest["step"], staging, document)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written: {reason(error)}") from error


def _merged_items(checkpoint: Checkpoint, family: ModelFamily) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Number and stored tensors of each item, one item at a time: parameters, and biases of experts."""
    for number, item in enumerate(family.items):
        module = family.build(item.name, torch.device("meta"))
        # A tied copy is not stored, and has no adapter.
        names = [name for name in parameters_of(item.name, module) if checkpoint.stored_name(name) == name]
        loaded = checkpoint.load(names)
        weights = {name.removeprefix(f"{item.name}."): tensor for name, tensor in loaded.items()}
        module.load_state_dict(weights, strict=False, assign=True)
        merge_adapters(module)
        tensors = {name: each.detach() for name, each in parameters_of(item.name, module).items() if name in loaded}
        biases = expert_biases_of(item.name, module)
        yield number, tensors | checkpoint.load(biases)


def _write_item(staging: Path, number: int, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Write the shard file of an item; the entries of its tensors for the manifest."""
    if not tensors:
        return []
    file = f"model-{number:05d}.safetensors"
    checksums = write_shard(staging, file, tensors)
    return [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "role": "buffer" if name.endswith("expert_bias") else "parameter",
            "file": file,
            "key": name,
            "index": [[0, size] for size in tensor.shape],
            "crc32": checksums[name],
        }
        for name, tensor in tensors.items()
    ]
