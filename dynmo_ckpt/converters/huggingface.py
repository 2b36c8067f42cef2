"""Hugging Face directories: ``config.json``, safetensors or ``pytorch_model.bin``, and the tokenizer's files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, encode_json
from ..formats.choices import ReadOptions, WriteOptions
from ..huggingface.decoders import DECODERS
from ..huggingface.deepseek import KINDS as DEEPSEEKS
from ..huggingface.deepseek import prediction_layers
from ..huggingface.files import (
    DTYPE_NAMES,
    WEIGHT_FILES,
    output_tensors,
    plan_files,
    raw_type,
    read_config,
    read_generation_config,
    read_tensors,
    weight_index,
    without_wrappers,
)
from ..huggingface.models import ARCHITECTURES, architecture_of_model, hf_config
from ..huggingface.source_config import export_config, export_generation_config, source_of, with_class_names
from ..huggingface.text_part import has_images, is_head, text_tensors
from ..huggingface.tokenizer import copied_tokenizer, token_id_keys, tokenizer_folder, tokenizer_names
from ..io.errors import UnsupportedError, errors_of, short_names
from ..io.files import read_file
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan, OutputTensor
from ..tensors.views import Tensor
from .assemble import check_model, from_map, model_from_config
from .deepspeed import read_transformers
from .registry import CheckpointFormat

QUANTIZATION_KEY = "quantization_config"
MAX_SHARD_BYTES = 5_000_000_000
RENAMED = "the names of wrappers, such as module. and _orig_mod., are removed"
# Classes of decoders with the head of a task, and the names of such heads.
TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")
TASK_MODULES = ("score", "classifier", "qa_outputs", "v_head", "regression_head")
NO_TOKENIZER = "none; --tokenizer DIR copies that of a directory"


def read_hf(directory: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    """Open a Hugging Face directory as a checkpoint at step 0 without optimizer state.

    Raises:
        CorruptError: a file is missing or broken, the configuration has impossible sizes, or tied tensors differ.
        UnsupportedError: another architecture, or tensors that the map does not have.
    """
    has_weights = any((directory / f"{name}{end}").exists() for name in WEIGHT_FILES for end in ("", ".index.json"))
    if not has_weights and (directory / "latest").is_file():
        # The Trainer of transformers saves a configuration, and DeepSpeed the weights.
        found = read_transformers(directory, options)
        if found is not None:
            return found
    stored = read_config(directory)
    # The output has plain weights, so its configuration must not describe quantized ones.
    config = {key: value for key, value in stored.items() if key != QUANTIZATION_KEY}
    with_images = has_images({"model_type": raw_type(directory)})
    task_head = _task_head(directory, config, options)
    if with_images or task_head:
        # Images: stated twice, with different defaults by release. A model of a task has no output layer at all.
        config["tie_word_embeddings"] = not any(map(is_head, read_tensors(directory, quantized=True)))
    model = model_from_config(config, directory / "config.json", options)
    tensors, computed = _tensors(directory, stored, model, options)
    if with_images:
        tensors, remark = text_tensors(tensors)
        computed = [*computed, remark]
    if task_head and config["tie_word_embeddings"]:
        computed = [*computed, f"a {task_head} has no output layer: that of the output is the embedding"]
    if options.adapters:
        config, model = _with_added_rows(config, model, tensors, options)
    further = prediction_layers(config, set(tensors))
    if further:
        model["mtp_num_layers"] = further
        check_model(model, directory)
    checkpoint, remarks = from_map(
        directory,
        model,
        ARCHITECTURES[config["model_type"]].map,
        tensors,
        options.drop,
        run_id=directory.resolve().name,
        source=source_of(config, read_generation_config(directory)),
        untie=options.untie,
    )
    # Quantized weights have other names too; these are computed anyway. transformers has no language model of a task.
    is_renamed = (
        config["model_type"] != raw_type(directory) or RENAMED in computed or bool(options.adapters or task_head)
    )
    return replace(checkpoint, is_renamed=is_renamed), [*computed, *remarks]


def _task_head(directory: Path, config: Mapping[str, Any], options: ReadOptions) -> str:
    """The class of a decoder with the head of a task, which ``--drop`` leaves out; empty for other models.

    Raises:
        UnsupportedError: the head is not left out.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name.endswith(TASKS) or config.get("model_type") not in (*DECODERS, *DEEPSEEKS, "gpt2"):
        return ""
    heads = [each for each in read_tensors(directory, quantized=True) if each.split(".")[0] in TASK_MODULES]
    remaining = [each for each in heads if not any(fnmatchcase(each, pattern) for pattern in options.drop)]
    if remaining:
        raise UnsupportedError(
            f"{directory}: a {name}: DynMo's decoders have no such head; --drop '{remaining[0].split('.')[0]}.*' "
            f"leaves {short_names(remaining)} out and converts the language model, "
            "whose output layer is then its embedding"
        )
    return name


def _tensors(
    directory: Path, config: Mapping[str, Any], model: Mapping[str, Any], options: ReadOptions
) -> tuple[Mapping[str, Tensor], list[str]]:
    """The plain tensors of a directory, with adapters merged, and remarks for the user."""
    if config.get(QUANTIZATION_KEY) is None and not options.adapters:
        found = read_tensors(directory)
        plain = without_wrappers(found)
        return plain, [] if plain.keys() == found.keys() else [RENAMED]
    # Here, because they import numpy, which `info` of other directories does not need.
    from ..huggingface.adapters import merge_adapters, read_adapter
    from ..huggingface.quantized import dequantized_tensors, quantization_of

    with errors_of(directory / "config.json"):
        quantization = quantization_of(config, options.ignore_config)
    stored = without_wrappers(read_tensors(directory, quantized=quantization is not None))
    tensors, dequantized = dequantized_tensors(stored, quantization)
    adapters = [read_adapter(each, options.ignore_config) for each in options.adapters]
    is_transposed = config.get("model_type") == "gpt2"
    tensors, merged = merge_adapters(tensors, adapters, transposed=is_transposed, tied=model["tied_embeddings"])
    return tensors, [*dequantized, *merged, *_other_tokenizers(directory, options.adapters)]


def _with_added_rows(
    config: dict[str, Any], model: dict[str, Any], tensors: Mapping[str, Tensor], options: ReadOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and model with the number of rows that an adapter has extended the vocabulary to."""
    layout = layout_of(load_map(ARCHITECTURES[config["model_type"]].map), model)
    word = next((link.foreign for link in layout.links if link.native == "embedding.word.weight"), "")
    rows = tensors[word].shape[0] if word in tensors else model["vocab_size"]
    if rows <= model["vocab_size"]:
        return config, model
    multiple = options.make_vocab_size_divisible_by
    grown = {"vocab_size": rows, "padded_vocab_size": -(-rows // multiple) * multiple}
    return {**config, "vocab_size": rows}, {**model, **grown}


def _other_tokenizers(directory: Path, adapters: Sequence[Path]) -> list[str]:
    """A remark for each adapter that was trained with another tokenizer or chat template than that of the base."""
    remarks = []
    for adapter in adapters:
        other = [
            name
            for name in tokenizer_names(adapter)
            if not (directory / name).is_file()
            or read_file(adapter / name, MAX_TABLE_BYTES) != read_file(directory / name, MAX_TABLE_BYTES)
        ]
        if other:
            remarks.append(
                f"{adapter}: {short_names(other)} differ from those of the base, which the output has; --tokenizer "
                f"{adapter} writes those of the adapter"
            )
    return remarks


def plan_hf(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a Hugging Face directory of the architecture of transformers that computes the model.

    Masks become zeros in the weights; the optimizer state is left out. With ``sparse_format`` the weights are read to
    count their zeros.

    Raises:
        CorruptError: a file ends early.
        UnsupportedError: no architecture computes the model, a tensor has no map, or weights do not fit
            ``sparse_format``.
    """
    manifest = checkpoint.manifest
    model, ties = manifest["model"], manifest["ties"]
    if model["tied_embeddings"] != ("head.weight" in ties):
        raise UnsupportedError("manifest.json: model.tied_embeddings and ties disagree about head.weight")
    # Several architectures compute some models: a Phi-3 without window and scaling is a Llama with other names.
    source = manifest.get("source")
    preferred = None if source is None else str(source["config"].get("model_type"))
    name, architecture = architecture_of_model(model, preferred)
    layout = layout_of(load_map(architecture.map), model)
    masks = checkpoint.masks()
    mapped = to_foreign(layout, checkpoint.weights(), ties, masks)
    buffers = set(checkpoint.names("buffer"))
    types = _types([item for item in mapped if item.source_name not in buffers])
    # The configuration has one type: that of most weights. Each tensor keeps its own in the files.
    dtype = options.dtype or types[0]
    stated = [] if source is None else [source["generation_config"], source["config"]]
    folder = tokenizer_folder(checkpoint, options.tokenizer)
    tokenizer = copied_tokenizer(folder, model["vocab_size"], model["max_position_embeddings"], stated)
    tensors: Sequence[OutputTensor] = output_tensors(mapped, options.dtype, buffers)
    sparse = None
    if options.sparse_format is not None:
        # Here, because it imports numpy, which other plans do not need.
        from ..huggingface.sparse_export import sparse_tensors, vllm_remark

        sparse = sparse_tensors(mapped, tensors, options.sparse_format, name)
        tensors = sparse.tensors
    files = tuple(plan_files(tensors, options.max_shard_bytes or MAX_SHARD_BYTES))
    computed = hf_config(model, DTYPE_NAMES[dtype], None, preferred) | token_id_keys(tokenizer, ("bos", "eos"))
    config = with_class_names(export_config(source, model, computed), manifest)
    if sparse is not None:
        config = {**config, QUANTIZATION_KEY: dict(sparse.config)}
    generation = token_id_keys(tokenizer, ("bos", "eos", "pad"))
    if model["family"] == "t5":
        generation["decoder_start_token_id"] = tokenizer.id_of("bos" if "bos" in tokenizer.special else "eos")
    settings = export_generation_config(source, {key: id_ for key, id_ in generation.items() if id_ is not None})
    small = {"config.json": encode_json(config), **tokenizer.files}
    if settings is not None:
        small["generation_config.json"] = encode_json(settings)
    index = weight_index(files)
    if index is not None:
        small["model.safetensors.index.json"] = index
    decisions = {
        "architecture": config["architectures"][0],
        "map": architecture.map,
        "activation_function": config.get("activation_function", config.get("hidden_act")),
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        "eos_token_id": config.get("eos_token_id"),
        "tokenizer": short_names(sorted(tokenizer.files)) or NO_TOKENIZER,
        "optimizer_tensors_left_out": len(checkpoint.names("optimizer")),
    }
    decisions |= {"types": ", ".join(types)} if options.dtype is None and len(types) > 1 else {}
    decisions |= {"tokens_without_row": short_names(tokenizer.beyond)} if tokenizer.beyond else {}
    if sparse is not None:
        decisions |= {
            "sparse_weights": sparse.compressed,
            "dense_linear_weights": sparse.dense,
            "vllm": vllm_remark(str(options.sparse_format), model),
        }
    if name == "megatron-bert" and model["activation"] != "gelu":
        decisions["differs"] = "transformers applies the MLP's activation in the head too; DynMo applies the exact GELU"
    return ExportPlan(files=files, small_files=small, decisions=decisions)


def _types(mapped: Sequence[MappedTensor]) -> list[str]:
    """The types of tensors, that of the most elements first."""
    sizes: Counter[str] = Counter()
    for item in mapped:
        sizes[item.content.dtype] += math.prod(item.shape)
    return sorted(sizes, key=lambda name: (-sizes[name], name))


HUGGING_FACE = CheckpointFormat(
    name="hf",
    description="Hugging Face directory (GPT-2, BERT, T5, Llama, Mixtral, Qwen, Gemma, OLMo, Phi, DeepSeek, GLM, ...)",
    marker="config.json",
    detect=lambda path: (path / "config.json").is_file(),
    read=read_hf,
    write=plan_hf,
    options=("untie", "drop", "adapters"),
)
