"""Plans a legacy Megatron checkpoint for any topology and checkpoint version. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._common.errors import UsageError
from ..formats.checkpoint_rules import finest_items
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import unlike_family
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..native.reshard import check_divisible, partition_from_counts
from ..tensors.copy_plan import OutputTensor
from ..torch_save.pickles import GlobalName
from ..torch_save.writer import ConstantStorages, NewObject, NewTensor, TorchSaveFile
from .model_sizes import legacy_args, megatron_rows
from .rng_state import rng_states
from .training_progress import adam_groups, grad_scaler, megatron_args, progress_of
from .write_optimizer import mapped_moments, optimizer_tree

# Megatron renamed them in January 2021, after version 3.0; loaders of version 3.0 read both.
OLDER_NAMES = (("language_model.encoder.", "language_model.transformer."), (".self_attention.", ".attention."))
LAYER_NAME = re.compile(r"language_model\.(encoder|decoder)\.layers\.(\d{1,9})\.")
LEGACY = "legacy Megatron"
HEAD_COPY = "word_embeddings_for_head.weight"
WORD = "language_model.embedding.word_embeddings.weight"


def plan_legacy(
    checkpoint: NativeCheckpoint,
    *,
    counts: Sequence[int],
    tensor_parallel_size: int,
    virtual_stages_per_worker: int,
    version: float,
    dtype: str | None = None,
    with_optimizer: bool = False,
) -> tuple[list[TorchSaveFile], dict[str, bytes]]:
    """Plan the files of all ranks, and the file that names the iteration.

    Args:
        checkpoint: the input; pruned weights become zeros.
        counts: number of layers of each stage, in layer order; a T5's encoder comes before its decoder.
        tensor_parallel_size: number of tensor-parallel ranks.
        virtual_stages_per_worker: chunks of each pipeline rank, stored as ``model0``, ``model1``, ...
        version: 0, 1.0, 2.0 or 3.0; decides the row order of query-key-value matrices, and names.
        dtype: type of the weights, as in safetensors; None keeps the type of the input.
        with_optimizer: include the optimizer state.

    Raises:
        UnsupportedError: sizes that the ranks do not divide, or a tensor without a map.
        UsageError: a stage with layers of both a T5's encoder and its decoder.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    check_supported(model, version)
    check_divisible(model, tensor_parallel_size)
    workers = len(counts) // virtual_stages_per_worker
    split_rank = split_stage(model, counts)
    stages = [finest_items(items, dict(model)) for items in partition_from_counts(counts, model)]
    layout = layout_of(
        load_map(f"legacy_{model['family']}", {0.0: "0", 1.0: "1"}.get(version, "2")),
        model,
        foreign_vocab_size=megatron_rows(model, tensor_parallel_size),
    )
    stored = checkpoint.weights()
    masks = checkpoint.masks()
    iteration = f"iter_{checkpoint.manifest['step']:07d}"
    progress = progress_of(checkpoint.manifest)
    args = legacy_args(model, tensor_parallel_size, workers, version, split_rank) | megatron_args(progress)
    files = []
    for rank in range(tensor_parallel_size):
        mapped = to_foreign(layout, stored, ties, masks, rank=rank, ranks=tensor_parallel_size)
        moments = mapped_moments(checkpoint, layout, rank=rank, ranks=tensor_parallel_size) if with_optimizer else {}
        for worker in range(workers):
            tensors: list[OutputTensor] = []
            constants = ConstantStorages()
            chunk_weights = [
                # As in Megatron, chunk ``v`` of a pipeline rank is stage ``v * workers + rank``.
                _chunk_weights(mapped, stages, v * workers + worker, "head.weight" in ties)
                for v in range(virtual_stages_per_worker)
            ]
            chunks = [nested_model(each, version, tensors, dtype) for each in chunk_weights]
            models = {"model": chunks[0]} if len(chunks) == 1 else {f"model{v}": c for v, c in enumerate(chunks)}
            tree = {
                "args": NewObject(GlobalName("argparse", "Namespace"), args),
                "checkpoint_version": version,
                "iteration": checkpoint.manifest["step"],
                **models,
                "rng_state": rng_states(progress.seed, tensor_rank=rank, stage=worker, constants=constants),
            }
            if progress.scheduler is not None:
                tree["opt_param_scheduler"] = dict(progress.scheduler)
            if with_optimizer:
                optimizer = checkpoint.manifest["optimizer"]
                decay = max((group["weight_decay"] for group in optimizer["groups"]), default=0.0)
                scaler = grad_scaler(progress, constants)
                state = optimizer_tree(
                    chunk_weights,
                    moments,
                    {HEAD_COPY: WORD},
                    optimizer["steps"],
                    tensors,
                    dtype=dtype,
                    fields=adam_groups(progress, decay),
                    is_half=scaler is not None,
                )
                tree["optimizer"] = state if scaler is None else {**state, "grad_scaler": scaler}
            folder = f"mp_rank_{rank:02d}" if workers == 1 else f"mp_rank_{rank:02d}_{worker:03d}"
            name = f"{iteration}/{folder}/model_optim_rng.pt"
            files.append(TorchSaveFile(name=name, tensors=tuple(tensors), tree=tree, constants=constants.payloads))
    return files, {"latest_checkpointed_iteration.txt": str(checkpoint.manifest["step"]).encode()}


def check_supported(model: Mapping[str, Any], version: float, program: str = LEGACY) -> None:
    """Check that the names and arguments of legacy Megatron can represent a model.

    Args:
        model: the ``model`` of a manifest.
        version: of the checkpoint format, 0 to 3.0; grouped queries exist since 2.0.
        program: whose checkpoint is written, for messages.

    Raises:
        UnsupportedError: positions, activation, experts or a head that Megatron does not implement.
    """
    if unlike := unlike_family(model):
        fields = ", ".join(f"{name} = {value}" for name, value in unlike.items())
        raise UnsupportedError(f"{program}: {fields} is not supported; use --to hf or native")
    needed = {"position_embedding": "rotary" if model["family"] == "llama" else "learned"}
    needed["activation"] = model["activation"]
    if model["family"] == "llama":
        needed["activation"] = "swiglu"
    elif model["activation"] not in ("gelu", "gelu_tanh"):
        needed["activation"] = "gelu"
    for field, value in needed.items():
        if model.get(field, value) != value:
            raise UnsupportedError(
                f"{program}: {field} {model[field]!r} is not supported, only {value!r}; use --to native"
            )
    if model.get("num_experts"):
        raise UnsupportedError(
            f"{program} cannot store this model's experts: its SwitchMLP routes each token to one expert (here "
            f"{model.get('moe_top_k', 2)}), by a softmax or sigmoid that the files do not record; use --to dcp, hf or "
            "native"
        )
    if model.get("num_key_value_heads", model["num_attention_heads"]) != model["num_attention_heads"] and version < 2:
        raise UnsupportedError(
            f"checkpoint version {version:g} has no grouped queries; use --checkpoint-version 2.0 or 3.0"
        )
    if model["family"] == "bert" and not model["tied_embeddings"] and not model.get("task_head"):
        raise UnsupportedError(f"{program}: the head of a BERT must be tied to its embedding; use --to native")


def split_stage(model: Mapping[str, Any], counts: Sequence[int]) -> int | None:
    """The first stage of a T5's decoder; None for other families, and with one stage.

    Args:
        model: the ``model`` of a manifest.
        counts: number of layers of each stage, in layer order.

    Raises:
        UsageError: a stage has layers of both the encoder and the decoder.
    """
    if model["family"] != "t5" or len(counts) == 1:
        return None
    done = 0
    for stage, count in enumerate(counts):
        if done == model["num_layers"]:
            return stage
        done += count
        if done > model["num_layers"]:
            break
    raise UsageError(
        f"--partition {','.join(map(str, counts))}: one stage has layers of both the encoder, which has "
        f"{model['num_layers']}, and the decoder; choose a partition with a stage boundary between them"
    )


def _chunk_weights(
    mapped: Sequence[MappedTensor], stages: Sequence[Sequence[str]], stage: int, tied: bool
) -> dict[str, MappedTensor]:
    """The weights of one chunk by full name; the last stage has a copy of the embedding for its head."""
    here = tuple(f"{item}." for item in stages[stage])
    # The first stage of the decoder embeds its tokens with its own copy of the tables.
    if "decoder.embedding" in stages[stage] and "encoder.embedding" not in stages[stage]:
        here = (*here, "encoder.embedding.")
    found = {each.name: each for each in mapped if each.source_name.startswith(here)}
    # On a single stage the head reads the table itself, and Megatron stores no copy.
    if stage == len(stages) - 1 and tied and WORD not in found:
        found[HEAD_COPY] = next(each for each in mapped if each.name == WORD)
    return found


def nested_model(
    weights: Mapping[str, MappedTensor], version: float, tensors: list[OutputTensor], dtype: str | None
) -> dict[str, Any]:
    """The ``model`` entry of one chunk.

    Args:
        weights: of the chunk by full name, with global layer numbers.
        version: of the checkpoint format; before 3, some modules have older names.
        tensors: the tensors of the file so far; those of the chunk are appended.
        dtype: the type to write, as in safetensors; None keeps the type of the input.
    """
    first_layer: dict[str, int] = {}
    state: dict[str, Any] = {"language_model": {}}

    def local(match: re.Match[str]) -> str:
        # The first name of a stack has its lowest number: the weights are in layer order.
        begin = first_layer.setdefault(match[1], int(match[2]))
        return f"language_model.{match[1]}.layers.{int(match[2]) - begin}."

    for full_name, each in weights.items():
        name = LAYER_NAME.sub(local, full_name)
        for new, old in OLDER_NAMES if version < 3 else ():
            name = name.replace(new, old)
        _place(state, name, _stored(each, tensors, dtype))
    return state


def _place(state: dict[str, Any], name: str, tensor: NewTensor) -> None:
    """Insert a tensor where Megatron stores it: nested dictionaries, and dotted keys in the innermost one."""
    part, _, rest = name.partition(".")
    inner = state.setdefault(part, {})
    for nested in ("language_model", "embedding"):
        if part == nested:
            part, _, rest = rest.partition(".")
            inner = inner.setdefault(part, {})
    inner[rest] = tensor


def _stored(mapped: MappedTensor, tensors: list[OutputTensor], dtype: str | None) -> NewTensor:
    """A tensor for the tree; its storage is appended to ``tensors``."""
    number = len(tensors)
    key = f"model_optim_rng/data/{number}"
    cast = None if dtype == mapped.content.dtype else dtype
    output = OutputTensor(key=key, shape=mapped.shape, content=mapped.content, mask=mapped.mask, cast=cast)
    tensors.append(output)
    return NewTensor(number, output.dtype, mapped.shape)
