"""Formats, weight types and levels of verification: what options and operations choose from."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """How closely ``verify`` looks."""

    HEADER = "header"
    REPLICAS = "replicas"
    FULL = "full"


class SourceKind(StrEnum):
    """What an input can be."""

    AUTO = "auto"
    NATIVE = "native"
    HF = "hf"
    LEGACY = "legacy"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"
    LLAMA2C = "llama2c"


class Dtype(StrEnum):
    """Types that weights can be written in."""

    KEEP = "keep"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def stored(self) -> str | None:
        """The name in safetensors; None: as they are."""
        return {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}.get(self.value)


class Agreement(StrEnum):
    """What to do where copies that should be equal differ."""

    EQUAL = "equal"
    FIRST = "first"


class TargetKind(StrEnum):
    """What ``convert`` can write."""

    HF = "hf"
    NATIVE = "native"
    LEGACY = "legacy"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"
