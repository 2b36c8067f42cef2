"""torchtitan's model checkpoints: a Llama's weights in torch DCP under torchtitan's names; written here.

They are read as any other distributed checkpoint (:mod:`.torch_dcp`), with the ``config.json`` next to them, because
torchtitan's files do not record heads and positions. ``OUT`` is one checkpoint, as ``initial_load_path`` of torchtitan
takes it; rows of queries and keys pair neighbors, as Meta's do.
"""

from __future__ import annotations

import re

from .._common.document import encode_json
from ..formats.choices import WriteOptions
from ..huggingface.files import DTYPE_NAMES
from ..huggingface.models import architecture_of_model, hf_config
from ..huggingface.source_config import export_config
from ..io.errors import UnsupportedError
from ..maps.name_map import layout_of, load_map, to_foreign
from ..megatron.write_core import distributed_files
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan, OutputTensor
from .registry import CheckpointFormat
from .torch_dcp import read_dcp

# Names of the table of llama2.c, which has the same matrices -> torchtitan's.
NAMES = (
    (re.compile(r"tok_embeddings"), "tok_embeddings.weight"),
    (re.compile(r"(w[qkv])\.(\d+)"), r"layers.\2.attention.qkv_linear.\1.weight"),
    (re.compile(r"wo\.(\d+)"), r"layers.\1.attention.wo.weight"),
    (re.compile(r"(w[123])\.(\d+)"), r"layers.\2.feed_forward.\1.weight"),
    (re.compile(r"(attention_norm|ffn_norm)\.(\d+)"), r"layers.\2.\1.weight"),
    (re.compile(r"norm"), "norm.weight"),
    (re.compile(r"output"), "lm_head.weight"),
)


def plan_titan(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a checkpoint of torchtitan's Llama.

    Raises:
        UnsupportedError: another model than a Llama without biases, or weights of several types.
    """
    manifest = checkpoint.manifest
    model, ties = manifest["model"], manifest["ties"]
    kind, _ = architecture_of_model(model)
    if kind != "llama":
        raise UnsupportedError(f"torchtitan: a {kind} is not written under torchtitan's names, only a llama")
    masks = checkpoint.masks()
    mapped = to_foreign(layout_of(load_map("llama2c"), model), checkpoint.weights(), ties, masks)
    dtypes = sorted({item.content.dtype for item in mapped})
    if options.dtype is None and len(dtypes) != 1:
        raise UnsupportedError(f"weights have the types {', '.join(dtypes)}; choose one with --dtype")
    dtype = options.dtype or dtypes[0]
    entries = {}
    for item in mapped:
        name = next(match.expand(new) for rule, new in NAMES if (match := rule.fullmatch(item.name)))
        cast = None if item.content.dtype == dtype else dtype
        tensor = OutputTensor(key=name, shape=item.shape, content=item.content, mask=item.mask, cast=cast)
        entries[name] = [(tuple(0 for _ in item.shape), tensor)]
    data, metadata = distributed_files("", entries)
    config = export_config(manifest.get("source"), model, hf_config(model, DTYPE_NAMES[dtype], None))
    decisions = {
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        "optimizer_tensors_left_out": len(checkpoint.names("optimizer")),
    }
    small = {".metadata": metadata, "config.json": encode_json(config)}
    return ExportPlan(files=(data,), small_files=small, decisions=decisions)


TORCHTITAN = CheckpointFormat(
    name="titan",
    description="torch.distributed.checkpoint under torchtitan's names (Llama); read as dcp",
    marker=".metadata",
    # Recognized as ``dcp``, whose reader distinguishes names.
    detect=lambda _: False,
    read=read_dcp,
    write=plan_titan,
)
