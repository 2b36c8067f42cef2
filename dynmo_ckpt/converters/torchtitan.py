"""torchtitan's checkpoints: weights and optimizer state in torch DCP under torchtitan's names; written here.

They are read as any other distributed checkpoint (:mod:`.torch_dcp`), with the ``config.json`` next to them, because
torchtitan's files do not record heads and positions. ``OUT`` is one checkpoint, as ``initial_load_path`` of torchtitan
takes it: with every tensor that its model requests, so a tied head and a bias for balancing are written too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .._common.document import encode_json
from .._common.errors import UsageError
from ..formats.checkpoint_rules import EXPERT_BIASES
from ..formats.choices import WriteOptions
from ..huggingface.files import DTYPE_NAMES
from ..huggingface.models import hf_config
from ..huggingface.source_config import export_config
from ..huggingface.tokenizer import carried_files
from ..io.errors import UnsupportedError
from ..maps.name_map import layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan, OutputTensor
from ..torch_save.distributed import chunks_of, distributed_files
from .registry import MEGATRON_OPTIONS, CheckpointFormat
from .titan_models import PREDICTION_ITEMS, check_computed, titan_model, zero_biases
from .torch_dcp import read_dcp
from .write_titan_optimizer import state_entries


def plan_titan(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a checkpoint of one of torchtitan's models.

    Layers of multi-token prediction are left out: torchtitan's read another hidden state.

    Raises:
        UnsupportedError: a model that torchtitan does not compute, weights of several types, or an optimizer state that
            torchtitan's AdamW cannot load.
        UsageError: another type of weights with optimizer state.
    """
    check_computed(checkpoint.manifest["model"])
    num_weights, num_state = len(checkpoint.weights()), len(checkpoint.names("optimizer"))
    checkpoint = _without_prediction(checkpoint)
    manifest, stored, masks = checkpoint.manifest, checkpoint.weights(), checkpoint.masks()
    model, ties = manifest["model"], manifest["ties"]
    found = titan_model(model)
    layout = layout_of(load_map(found.map, found.variant), model)
    mapped = to_foreign(layout, stored, ties, masks)
    # The bias for balancing is float32 in torchtitan, whatever the type of the weights.
    dtypes = sorted({item.content.dtype for item in mapped if not item.source_name.endswith(EXPERT_BIASES)})
    if options.dtype is None and len(dtypes) != 1:
        raise UnsupportedError(f"weights have the types {', '.join(dtypes)}; choose one with --dtype")
    dtype = options.dtype or dtypes[0]
    if options.with_optimizer and dtypes != [dtype]:
        raise UsageError(
            f"--with-optimizer: torchtitan's weights are the masters of its optimizer; --dtype must keep their type, "
            f"{' or '.join(dtypes)}"
        )
    entries = {}
    for item in mapped:
        own = "F32" if item.source_name.endswith(EXPERT_BIASES) else dtype
        cast = None if item.content.dtype == own else own
        tensor = OutputTensor(key=item.name, shape=item.shape, content=item.content, mask=item.mask, cast=cast)
        entries[item.name] = chunks_of(tensor)
    if not model.get("moe_router_enable_expert_bias"):
        # torchtitan's loader requires them in a model that is trained with its balancing, the default.
        for name, bias in zero_biases(model).items():
            entries[name] = [((0,), OutputTensor(key=name, shape=bias.shape, content=bias))]
    state, objects = state_entries(checkpoint, layout) if options.with_optimizer else ({}, {})
    data, metadata = distributed_files("", entries | state, objects)
    config = export_config(manifest.get("source"), model, hf_config(model, DTYPE_NAMES[dtype], None))
    decisions: dict[str, Any] = {
        "tied_written_twice": sorted(ties),
        "masks_applied": len(masks),
        "with_optimizer": options.with_optimizer,
        "optimizer_tensors_left_out": 0 if options.with_optimizer else num_state,
    }
    if len(stored) != num_weights:
        decisions["prediction_tensors_left_out"] = num_weights - len(stored)
    small = {".metadata": metadata, "config.json": encode_json(config)}
    small |= carried_files(checkpoint, options.tokenizer, "")
    return ExportPlan(files=(data,), small_files=small, decisions=decisions)


def _without_prediction(checkpoint: NativeCheckpoint) -> NativeCheckpoint:
    """A checkpoint without its layers of multi-token prediction."""
    manifest = checkpoint.manifest
    entries, ties = (
        {name: value for name, value in manifest[field].items() if not name.startswith(PREDICTION_ITEMS)}
        for field in ("tensors", "ties")
    )
    model = {name: value for name, value in manifest["model"].items() if name != "mtp_num_layers"}
    return replace(checkpoint, manifest={**manifest, "model": model, "tensors": entries, "ties": ties})


TORCHTITAN = CheckpointFormat(
    name="titan",
    description="torch.distributed.checkpoint under torchtitan's names, with its optimizer state; read as dcp",
    marker=".metadata",
    # Recognized as ``dcp``, whose reader distinguishes names.
    detect=lambda _: False,
    read=read_dcp,
    write=plan_titan,
    stores_optimizer=True,
    options=MEGATRON_OPTIONS,
)
