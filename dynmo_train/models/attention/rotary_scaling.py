"""Frequencies of rotary position embeddings, and how models stretch them to longer sequences.

A scaling is Hugging Face's object: ``rope_type`` and its fields. All types are functions of the positions alone, so
that a table is the same on every worker.

Shapes in names: R rotated width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Scaling = Mapping[str, Any]
Scale = Callable[[torch.Tensor, float, Scaling, torch.Tensor], torch.Tensor]


def rotary_frequencies(width: int, base: float, scaling: Scaling | None, positions: torch.Tensor) -> torch.Tensor:
    """Radians per position of the ``R / 2`` planes, float32 (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

    Args:
        width: R, even.
        base: base of the geometric series of wavelengths.
        scaling: None, or an object whose ``rope_type`` is a key of ``SCALINGS``.
        positions: positions that will be rotated, float32 ``[...]``; their largest is the length for ``dynamic``.

    Raises:
        KeyError: another ``rope_type``, or a field of it is missing.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    frequencies: torch.Tensor = 1.0 / base**exponents
    return frequencies if scaling is None else SCALINGS[scaling["rope_type"]](frequencies, base, scaling, positions)


def rotary_magnitude(scaling: Scaling | None) -> float:
    """The factor on cosine and sine, which scales the attention scores by its square (YaRN, section 3.4)."""
    if scaling is None or scaling["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    factor, given = float(scaling["factor"]), scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling["rope_type"] == "longrope":
        trained = float(scaling["original_max_position_embeddings"])
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    scale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    # DeepSeek's form, where both are given.
    return (
        yarn_magnitude(factor, scale) / yarn_magnitude(factor, of_all)
        if scale and of_all
        else yarn_magnitude(factor, 1.0)
    )


def yarn_magnitude(factor: float, scale: float) -> float:
    """YaRN's factor on cosine and sine, ``0.1 scale ln factor + 1`` (Peng et al. 2023, arXiv:2309.00071, equation 22).

    Args:
        factor: how many times longer sequences become; 1 where it is less.
        scale: DeepSeek's ``mscale``, 1 in the paper.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _linear(frequencies: torch.Tensor, _base: float, scaling: Scaling, _positions: torch.Tensor) -> torch.Tensor:
    """Positions are interpolated (Chen et al. 2023, arXiv:2306.15595)."""
    scaled: torch.Tensor = frequencies / scaling["factor"]
    return scaled


def _dynamic(frequencies: torch.Tensor, base: float, scaling: Scaling, positions: torch.Tensor) -> torch.Tensor:
    """The base grows with the length of the sequence, beyond the length of the training ("dynamic NTK")."""
    width, factor = 2 * len(frequencies), scaling["factor"]
    trained = scaling["original_max_position_embeddings"]
    length = (positions.amax() + 1).clamp(min=trained)
    grown = base * (factor * length / trained - (factor - 1)) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=frequencies.device) / width
    scaled: torch.Tensor = 1.0 / grown**exponents
    return scaled


def _llama3(frequencies: torch.Tensor, _base: float, scaling: Scaling, _positions: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones unchanged, those between interpolated (arXiv:2407.21783)."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    share: torch.Tensor = ((trained / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    scaled: torch.Tensor = (1 - share) * frequencies / factor + share * frequencies
    return scaled


def _yarn(frequencies: torch.Tensor, base: float, scaling: Scaling, _positions: torch.Tensor) -> torch.Tensor:
    """As ``llama3``, with a linear ramp over the planes (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    planes, factor = len(frequencies), scaling["factor"]
    trained = scaling["original_max_position_embeddings"]

    def plane_of(turns: float) -> float:
        """The plane that turns this often over the length of the training."""
        return planes * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

    low, high = plane_of(scaling.get("beta_fast") or 32.0), plane_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * planes - 1)
    place = torch.arange(planes, dtype=torch.float32, device=frequencies.device)
    ramp = ((place - low) / (high - low if high > low else 0.001)).clamp(0.0, 1.0)
    scaled: torch.Tensor = frequencies / factor * ramp + frequencies * (1 - ramp)
    return scaled


def _longrope(frequencies: torch.Tensor, _base: float, scaling: Scaling, positions: torch.Tensor) -> torch.Tensor:
    """A factor for each plane, one list for short and one for long sequences (Ding et al. 2024, arXiv:2402.13753)."""
    short, long = (torch.tensor(scaling[name], device=frequencies.device) for name in ("short_factor", "long_factor"))
    # Of all positions together, as in transformers; not read by the host, which would wait for the device.
    is_long = positions.amax() + 1 > scaling["original_max_position_embeddings"]
    scaled: torch.Tensor = frequencies / torch.where(is_long, long, short)
    return scaled


SCALINGS: Mapping[str, Scale] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
