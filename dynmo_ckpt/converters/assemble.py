"""Builds a native checkpoint from what a reader found: the model's sizes, and tensors under foreign names or DynMo's.

Every reader ends here. ``from_map`` takes whole tensors under the names of a table of ``maps/``, ``from_megatron`` the
result of Megatron's readers, and ``from_tensors`` tensors that already have DynMo's names and layouts, which is the
shortest way for a new format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .._common.document import Problem, envelope
from ..formats.checkpoint import BLANK_SEAL, FORMAT, VERSION, model_check
from ..formats.checkpoint_rules import EXPERT_BIASES, block_items
from ..huggingface.files import read_config, read_generation_config
from ..huggingface.models import hf_model
from ..huggingface.source_config import source_of, unlike_config
from ..io.errors import CorruptError, UnsupportedError, errors_of, short_names
from ..maps.name_map import Layout, MappedTensor, layout_of, load_map, model_ties, to_native
from ..megatron.training_progress import in_manifest
from ..native.checkpoint import NativeCheckpoint
from ..tensors.views import Tensor

if TYPE_CHECKING:
    from ..formats.choices import ReadOptions, WriteOptions
    from ..megatron.read import MegatronCheckpoint

FLOATS = ("F64", "F32", "F16", "BF16")
WORDS = ("embedding.word.weight", "encoder.embedding.word.weight")
RNG = {"scheme": "hash(seed,step,microbatch,item)", "seed": 0}


def check_model(model: Mapping[str, Any], source: Path) -> None:
    """Check the ``model`` of a manifest against the format.

    Args:
        model: the ``model``.
        source: the file from which it was derived, for messages.

    Raises:
        CorruptError: a field breaks the format, for example by an impossible size.
    """
    problems: list[Problem] = []
    model_check(model, "", problems)
    if problems:
        raise CorruptError("\n  ".join([f"{source}: impossible sizes", *map(str, problems)]))


def model_from_config(config: Mapping[str, Any], source: Path, options: ReadOptions) -> dict[str, Any]:
    """The ``model`` of a manifest from a ``config.json``.

    Args:
        config: the contents of the file.
        source: the file, for messages.
        options: the padding of the vocabulary, and the keys that are not checked.

    Raises:
        CorruptError: impossible sizes.
        UnsupportedError: another architecture, an unknown key, or a value that DynMo's models do not compute.
    """
    with errors_of(source):
        model = hf_model(config, options.make_vocab_size_divisible_by, options.ignore_config)
    check_model(model, source)
    return model


def from_tensors(
    directory: Path, model: Mapping[str, Any], tensors: Mapping[str, Tensor], *, run_id: str, step: int = 0
) -> NativeCheckpoint:
    """A checkpoint of parameters that have DynMo's names, layouts and true vocabulary rows (``formats/checkpoint.md``).

    Args:
        directory: the input.
        model: the ``model`` of a manifest.
        tensors: the parameters by name, each with its whole shape (not a tensor-parallel slice); a tied tensor is
            stored once.
        run_id: the name of the run.
        step: number of optimizer steps done.

    Raises:
        CorruptError: impossible sizes.
        UnsupportedError: a tensor that belongs to no item of the model, or is not of real numbers.
    """
    check_model(model, directory)
    # With the dot: `layers.1` must not own the tensors of `layers.10`.
    items = tuple(f"{item}." for item in block_items(dict(model)))
    unknown = [name for name in tensors if not name.startswith(items)]
    if unknown:
        raise UnsupportedError(f"{directory}: {len(unknown)} tensors belong to no layer: {short_names(unknown)}")
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    manifest = new_manifest(model, shapes, model_ties(model), run_id=run_id, step=step)
    return NativeCheckpoint(directory=directory, manifest=manifest, tensors=dict(tensors))


def from_map(
    directory: Path,
    model: Mapping[str, Any],
    map_name: str,
    found: Mapping[str, Tensor],
    drop: Sequence[str],
    *,
    run_id: str,
    source: Mapping[str, Any] | None = None,
    variant: str = "",
    untie: bool = False,
) -> tuple[NativeCheckpoint, list[str]]:
    """A checkpoint from whole tensors under the names of a table of ``maps/``.

    Args:
        directory: the input.
        model: the ``model`` of a manifest.
        map_name: the table.
        found: the tensors by foreign name, each with its whole shape (not a tensor-parallel slice).
        drop: shell patterns of foreign names that are left out.
        run_id: the name of the run, after ``from-``.
        source: the ``source`` of the manifest.
        variant: of the table.
        untie: a tied head becomes a separate weight.

    Returns:
        The checkpoint, and remarks for the user.

    Raises:
        CorruptError: tied tensors differ.
        UnsupportedError: tensors that the map does not have, or that are not of real numbers.
    """
    name_map = load_map(map_name, variant)
    if untie and model["tied_embeddings"]:
        model = {**model, "tied_embeddings": False}
        found = {**found, **_separate_head(directory, layout_of(name_map, model), found)}
    layout = layout_of(name_map, model)
    dropped = [name for name in found if any(fnmatchcase(name, pattern) for pattern in drop)]
    tensors = {name: [tensor] for name, tensor in found.items() if name not in dropped}
    ties = model_ties(model)
    # A head may be separate from the word table; depths of multi-token prediction have copies.
    untied = {
        link.native
        for link in layout.links
        if link.shared and link.native in ties and not link.native.startswith("mtp.")
    }
    mapped, pairs = to_native(layout, tensors, ties)
    if pairs:
        from ..tensors.equality import equal_bytes  # imports numpy, which is not needed without pairs
    for pair in pairs:
        if not equal_bytes(pair.one, pair.other):
            # A tie ends only where DynMo's model can store both tensors; elsewhere one of them would be lost.
            if pair.native not in untied:
                raise CorruptError(f"{directory}: {pair.what} differ, where they must be equal")
            ties = {name: target for name, target in ties.items() if name != pair.native}
    if len(ties) != len(model_ties(model)):
        # The links of a tensor that is no longer tied now count as stored.
        mapped, _ = to_native(layout, tensors, ties)
        if model["tied_embeddings"] and "head.weight" not in ties:
            model = {**model, "tied_embeddings": False}
    manifest = new_manifest(model, _shapes(mapped), ties, run_id=f"from-{run_id}")
    if source is not None:
        manifest["source"] = dict(source)
    checkpoint = NativeCheckpoint(
        directory=directory, manifest=manifest, tensors={item.name: item.content for item in mapped}
    )
    return checkpoint, [f"{short_names([name])}: left out by --drop" for name in dropped]


def _separate_head(directory: Path, layout: Layout, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head of a model without a tie, by its foreign name: what is stored, else the embedding.

    Raises:
        UnsupportedError: the architecture has no head of its own.
    """
    names = {link.native: link.foreign for link in layout.links}
    head, word = names.get("head.weight"), next((names[each] for each in WORDS if each in names), "")
    if head is None or word not in found:
        raise UnsupportedError(f"{directory}: --untie: this architecture has no head besides the embedding")
    return {head: found.get(head, found[word])}


def from_megatron(
    found: MegatronCheckpoint, path: Path, iteration: Path, options: ReadOptions
) -> tuple[NativeCheckpoint, list[str]]:
    """A checkpoint from the result of one of Megatron's readers, and remarks for the user.

    Args:
        found: the result.
        path: the input.
        iteration: the directory of the iteration, which may have the tokenizer.
        options: may name the configuration of the model.
    """
    run_id = f"from-{path.resolve().name}"
    manifest = new_manifest(found.model, _shapes(found.tensors), found.ties, run_id=run_id, step=found.step)
    # Only the seed: DynMo's trainer derives random numbers from seed and step, so Megatron's states have no use.
    manifest |= in_manifest(found.progress) | {"rng": {**RNG, "seed": found.progress.seed}}
    remarks = list(found.remarks)
    place = options.config or iteration / "tokenizer"
    if options.config is not None or (place / "config.json").is_file():
        source = source_of(read_config(place), read_generation_config(place))
        manifest["source"] = source
        if options.config is not None and (unlike := unlike_config(source["config"], found.model)):
            remarks.append(f"{place / 'config.json'}: {unlike}; the arguments of the checkpoint decide")
    tensors = {item.name: item.content for item in found.tensors}
    pruned = total = 0
    # equality imports numpy, which a checkpoint without masks does not need.
    if found.masks:
        from ..tensors.equality import count_true
    for name, mask in found.masks.items():
        shape = manifest["tensors"][name]["shape"]
        manifest["tensors"][f"{name}.mask"], tensors[f"{name}.mask"] = _entry("BOOL", shape, "mask"), mask
        total += math.prod(shape)
        pruned += math.prod(shape) - count_true(mask)
    if total:
        manifest["dynamic"]["pruning"] = {"sparsity": pruned / total, "sparsity_by_item": {}}
    if found.optimizer:
        _add_optimizer(manifest, tensors, found)
    checkpoint = NativeCheckpoint(
        directory=path,
        manifest=manifest,
        tensors=tensors,
        scratch=found.scratch,
        tokenizer=iteration / "tokenizer" if (iteration / "tokenizer").is_dir() else None,
    )
    return checkpoint, remarks


def _add_optimizer(manifest: dict[str, Any], tensors: dict[str, Tensor], found: MegatronCheckpoint) -> None:
    """Add Adam's moments. As in Megatron, parameters with one dimension have no weight decay."""
    names = [item.name for item in found.tensors if manifest["tensors"][item.name]["role"] == "parameter"]
    decayed = [name for name in names if len(manifest["tensors"][name]["shape"]) > 1]
    groups = [
        {"name": "decay", "weight_decay": found.weight_decay, "parameters": decayed},
        {"name": "no_decay", "weight_decay": 0.0, "parameters": [n for n in names if n not in set(decayed)]},
    ]
    # Megatron has one number for all parameters; DynMo counts for each, because frozen layers make fewer steps.
    steps = dict.fromkeys(names, found.optimizer_steps)
    add_optimizer_state(manifest, tensors, {item.name: item.content for item in found.optimizer}, steps, groups)


def add_optimizer_state(
    manifest: dict[str, Any],
    tensors: dict[str, Tensor],
    moments: Mapping[str, Tensor],
    steps: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Add the state of AdamW to a manifest and to the tensors of its checkpoint, in place.

    Args:
        manifest: with the parameters.
        tensors: of the checkpoint by name.
        moments: named ``PARAMETER.exp_avg`` and ``PARAMETER.exp_avg_sq``, of F32 or BF16, with the elements of the
            parameter.
        steps: number of updates by parameter.
        groups: each with ``name``, ``weight_decay`` and ``parameters``.
    """
    for name, moment in moments.items():
        shape = manifest["tensors"][name.rpartition(".")[0]]["shape"]
        manifest["tensors"][name], tensors[name] = _entry(moment.dtype, shape, "optimizer"), moment
    manifest["optimizer"] = {"type": "adamw", "steps": dict(steps), "groups": [dict(group) for group in groups]}


def _shapes(mapped: Sequence[MappedTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {item.name: (item.content.dtype, item.shape) for item in mapped}


def _entry(dtype: str, shape: Sequence[int], role: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "role": role, "split_dim": None, "shards": []}


def new_manifest(
    model: Mapping[str, Any],
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    ties: Mapping[str, str],
    *,
    run_id: str,
    step: int = 0,
) -> dict[str, Any]:
    """The manifest of an imported model on one pipeline rank; its shards and files are filled in when it is written.

    Args:
        model: the ``model`` of the manifest.
        shapes: dtype, as in safetensors, and shape of each parameter.
        ties: for each name that is not stored, the name that is.
        run_id: the name of the run.
        step: number of optimizer steps done.

    Raises:
        UnsupportedError: a parameter of another type than real numbers, such as codes of quantized weights.
    """
    codes = [name for name, (dtype, _) in shapes.items() if dtype not in FLOATS]
    if codes:
        raise UnsupportedError(
            f"{short_names(codes)}: has the type {shapes[codes[0]][0]}, and no scale; weights are {', '.join(FLOATS)}"
        )
    return {
        **envelope(FORMAT, VERSION, f"dynmo-ckpt {__version__}"),
        "manifest_crc32": BLANK_SEAL,
        "run_id": run_id,
        "step": step,
        "consumed_train_samples": 0,
        "model": dict(model),
        "topology": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "virtual_stages_per_worker": 1,
            "schedule": "none",
            "world_size": 1,
            "partition": [block_items(dict(model))],
        },
        "dynamic": {"frozen_items": [], "pruning": None, "sparse_thresholds": {}},
        "tensors": {
            name: _entry(dtype, shape, "buffer" if name.endswith(EXPERT_BIASES) else "parameter")
            for name, (dtype, shape) in shapes.items()
        },
        "ties": dict(ties),
        "optimizer": None,
        "data": None,
        "rng": dict(RNG),
        "files": {},
    }


def state_decisions(checkpoint: NativeCheckpoint, options: WriteOptions) -> dict[str, Any]:
    """What ``conversion.json`` records about masks and optimizer state of an export to a Megatron format."""
    return {
        "masks_applied": len(checkpoint.names("mask")),
        "with_optimizer": options.with_optimizer,
        "optimizer_tensors_left_out": 0 if options.with_optimizer else len(checkpoint.names("optimizer")),
    }
