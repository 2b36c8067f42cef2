"""What commands and converters choose from: weight types, levels of verification, options of reading and writing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

AUTO = "auto"
# Types of --to gguf only, whose values share a scale.
BLOCK_TYPES = {"q8_0": "Q8_0", "mxfp4": "MXFP4"}


class VerifyLevel(StrEnum):
    """How much ``verify`` checks."""

    HEADER = "header"
    REPLICAS = "replicas"
    FULL = "full"


class Dtype(StrEnum):
    """Types of the weights in a new checkpoint."""

    KEEP = "keep"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    MXFP4 = "mxfp4"

    @property
    def stored(self) -> str | None:
        """The name in safetensors; None keeps the type of the input."""
        return {"fp32": "F32", "fp16": "F16", "bf16": "BF16", **BLOCK_TYPES}.get(self.value)


class SparseFormat(StrEnum):
    """Layouts of pruned weights, as compressed-tensors names them."""

    SPARSE_24 = "sparse-24-bitmask"
    UNSTRUCTURED = "sparse-bitmask"


class ReplicaPolicy(StrEnum):
    """What to do where replicas of a tensor differ."""

    EQUAL = "equal"
    FIRST = "first"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to open a checkpoint of any format.

    Attributes:
        step: the step of a run directory; None: the latest one.
        make_vocab_size_divisible_by: the rows of an imported vocabulary are padded to a multiple of this number.
        vocab_size: the true vocabulary size, for files that do not record it.
        num_attention_heads: the number of heads, for files that do not record it.
        sparse: keep the masks of weights that are stored as sparse rows.
        first_replica: take the first replica where replicas differ, in place of an error.
        untie: turn a head that is stored as a copy of the embedding into a separate weight.
        drop: shell patterns of tensor names of the input that are left out.
        ignore_config: shell patterns of configuration keys and Megatron arguments that are not checked.
        with_optimizer: read the optimizer state too.
        optimizer_if_present: read the optimizer state where the input has one, else the weights alone.
        config: a directory with the ``config.json`` of the model, for files that do not describe it.
        headers_only: read no tensor's bytes; replicas are not compared.
        adapters: directories of peft's adapters that are merged into the weights, in this order.
    """

    step: int | None = None
    make_vocab_size_divisible_by: int = 128
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    sparse: bool = False
    first_replica: bool = False
    untie: bool = False
    drop: tuple[str, ...] = ()
    ignore_config: tuple[str, ...] = ()
    with_optimizer: bool = False
    optimizer_if_present: bool = False
    config: Path | None = None
    headers_only: bool = False
    adapters: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How to write a checkpoint of any format; a format ignores what it has no use for.

    Attributes:
        dtype: type of the weights, as in safetensors; None keeps the type of the input.
        with_optimizer: write the optimizer state too.
        tp: number of tensor-parallel ranks.
        pp: number of pipeline ranks.
        vpp: number of virtual stages of each pipeline rank.
        partition: number of layers of each stage, such as ``7,5,8,4``; None splits evenly.
        checkpoint_version: version of a legacy Megatron checkpoint.
        tokenizer: a directory with the tokenizer's files; None takes those of the input.
        max_shard_bytes: size of the largest weight file, in bytes; None is the default of the format.
        sparse_format: the layout of pruned linear weights of a Hugging Face directory; None writes zeros.
    """

    dtype: str | None = None
    with_optimizer: bool = False
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    partition: str | None = None
    checkpoint_version: float = 3.0
    tokenizer: Path | None = None
    max_shard_bytes: int | None = None
    sparse_format: SparseFormat | None = None
