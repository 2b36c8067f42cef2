"""Fields of Megatron-Bridge's recipes as options of Megatron-LM, which have the same names but for those of ``NAMES``.

A field is ``section.name``: ``train.train_iters`` is ``--train-iters``. A flag that turns something off, ``--no-X`` or
``--disable-X``, stands for the field ``X`` that is false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Fields with another name than the option of Megatron-LM.
NAMES: Mapping[str, str] = {
    "checkpoint.fully_parallel_save": "--ckpt-fully-parallel-save",
    "dataset.blend": "--data-path",
    "dataset.blend_per_split": "--train-data-path",
    "dataset.random_seed": "--seed",
    "dataset.skip_getting_attention_mask_from_dataset": "--no-create-attention-mask-in-dataloader",
    "ddp.average_in_collective": "--ddp-average-in-collective",
    "ddp.check_for_nan_in_grad": "--no-check-for-nan-in-loss-and-grad",
    "ddp.grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "dist.enable_megatron_core_experimental": "--enable-experimental",
    "mixed_precision.grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "mixed_precision.params_dtype": "--bf16",
    "mixed_precision.pipeline_dtype": "--bf16",
    "model.apply_dsa_kernel_fusion": "--dsa-kernel-backend",
    "model.apply_rope_fusion": "--no-rope-fusion",
    "model.bias_activation_fusion": "--no-bias-gelu-fusion",
    "model.csa_compress_ratios": "--experimental-attention-variant",
    "model.layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "model.microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "model.moe_a2a_overlap": "--overlap-moe-expert-parallel-comm",
    "model.mtp_eval_in_bf16": "--experimental-attention-variant",
    "model.num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "model.num_moe_experts": "--num-experts",
    "model.params_dtype": "--bf16",
    "model.pipeline_dtype": "--bf16",
    "model.quant_recipe": "--te-precision-config-file",
    "model.use_fused_mhc": "--enable-mhc-connections",
    "model.use_te_rng_tracker": "--te-rng-tracker",
    "model.use_transformer_engine_full_layer_spec": "--transformer-impl",
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "model.yarn_mscale": "--mscale",
    "model.yarn_mscale_all_dim": "--mscale-all-dim",
    "model.yarn_rotary_scaling_factor": "--rotary-scaling-factor",
    "rng.seed": "--seed",
    "scheduler.max_lr": "--lr",
}
# Fields without an option of Megatron-LM, and why they have no effect on a run of this package.
WITHOUT_OPTION: Mapping[str, str] = {
    "env_vars": "environment of kernels and of collectives; results do not depend on it",
    "comm_overlap": "no effect on results",
    "mixed_precision.autocast_enabled": "parameters and activations have one type",
    "mixed_precision.grad_reduce_in_fp32": "gradients are reduced in float32; --grad-reduce-in-bf16 halves the bytes",
    "tokenizer.use_tokenizer_vocab_size": "the vocabulary size is always the tokenizer's",
    "tokenizer.rank": "every process reads its tokenizer",
    "dataset.do_test": "there is no evaluation after training",
    "dataset.do_validation": "--eval-iters 0 turns it off",
    "model._pipeline_model_parallel_layout_builder": "--pipeline-model-parallel-layout has the layout",
}
# Fields whose values only Megatron-Bridge can use -> what to do instead.
REFUSED: Mapping[str, str] = {
    "model": "the shape is that of a model on the hub: give its sizes, which dynmo-ckpt info prints for its directory",
    "optimizer": "give --optimizer, --lr and --weight-decay",
    "scheduler": "give --lr-decay-style, --lr-warmup-iters and --min-lr",
    "mixed_precision": "give --bf16 or --fp16, and for float8 --fp8-format with --fp8-recipe",
    **dict.fromkeys(
        (
            *("dataset.dataset_kwargs", "dataset.dataset_root", "dataset.hf_output_root", "dataset.preprocessing"),
            *("dataset.hf_validation_proportion", "dataset.max_train_samples"),
        ),
        "datasets are prepared before: use dynmo-prep binarize, or --hf-dataset",
    ),
    "tokenizer.hf_tokenizer_kwargs": "write them into the tokenizer's files",
}
_PRECISIONS = {"bf16_mixed": "--bf16", "fp16_mixed": "--fp16"}
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class FieldWords:
    """A field as a flag of a command line, or why it has none.

    Attributes:
        words: a flag with its values; empty without one.
        kind: ``ignored`` or ``refused`` where there are no words.
        reason: why, or what to do instead.
    """

    words: tuple[str, ...] = ()
    kind: str = ""
    reason: str = ""


def _ignored(reason: str) -> FieldWords:
    return FieldWords((), "ignored", reason)


def flag_of_field(name: str, is_known: Callable[[str], bool]) -> str | None:
    """The option of a field of Megatron-Bridge; None without one.

    Args:
        name: dotted name of the field.
        is_known: whether an option of Megatron-LM exists.
    """
    if name in NAMES:
        return NAMES[name]
    dashed = name.partition(".")[2].replace("_", "-")
    candidates = (f"--{dashed}", f"--no-{dashed}", f"--disable-{dashed}")
    return next((flag for flag in candidates if dashed and is_known(flag)), None)


def field_words(name: str, value: Any, is_known: Callable[[str], bool]) -> FieldWords:
    """A field of a recipe as an option of Megatron-LM.

    Args:
        name: dotted name of the field.
        value: None, a boolean, number, string, or a list of these.
        is_known: whether an option of Megatron-LM exists.
    """
    if (found := _without_flag(name, value)) is not None:
        return found
    flag = flag_of_field(name, is_known)
    if flag is None:
        return FieldWords((), "refused", "has no option here or in Megatron-LM: leave it out")
    is_negative = flag.startswith(("--no-", "--disable-"))
    if isinstance(value, bool):
        return _switch(flag, value, is_negative, is_known)
    if flag == "--bf16":
        return FieldWords((flag,)) if value == "bfloat16" else _ignored("float32 is the default")
    if is_negative:
        return _ignored("is the default of Megatron-LM")
    values = _blend(value) if name == "dataset.blend" else value if isinstance(value, list) else [value]
    return FieldWords((flag, *(_TYPES.get(str(each), str(each)) for each in values)))


def _without_flag(name: str, value: Any) -> FieldWords | None:
    """A field that has no option of Megatron-LM under its name, or is not set; None for others."""
    if name == "dataset.blend" and value is None:
        return FieldWords(("--mock-data",))
    if value is None:
        return _ignored("is not set")
    if name in WITHOUT_OPTION:
        return _ignored(WITHOUT_OPTION[name])
    if name == "mixed_precision" and value in _PRECISIONS:
        return FieldWords((_PRECISIONS[str(value)],))
    return FieldWords((), "refused", REFUSED[name]) if name in REFUSED else None


def _switch(flag: str, value: bool, is_negative: bool, is_known: Callable[[str], bool]) -> FieldWords:
    """A field that is true or false, as a flag."""
    if value != is_negative:
        return FieldWords((flag,))
    negative = f"--no-{flag.removeprefix('--')}"
    if not is_negative and is_known(negative):
        return FieldWords((negative,))
    return _ignored("is the default of Megatron-LM" if is_negative else "is off")


def _blend(value: Any) -> list[Any]:
    """Paths of datasets, with their weights before them where there are any: ``[paths, weights]``."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)):
        return value if isinstance(value, list) else [value]
    paths: list[Any] = value[0]
    weights = value[1]
    if not isinstance(weights, list):
        return paths
    return [word for pair in zip(weights, paths, strict=False) for word in pair]
