"""Frequencies of rotary positions in numpy, with the scalings that models have; written apart from the trainer's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float64]


def rotary_frequencies(fields: Mapping[str, Any], width: int, tokens: int) -> tuple[Frequencies, float]:
    """Radians per position, float64 ``[width / 2]``, and the factor on cosine and sine.

    Args:
        fields: ``rotary_base`` and ``rotary_scaling``, as in a manifest's ``model``.
        width: number of elements of a head that are rotated.
        tokens: length of the sequence.

    Raises:
        KeyError: an unknown type of scaling.
    """
    base, scaling = float(fields["rotary_base"]), fields["rotary_scaling"]
    exponents = np.arange(0, width, 2) / width
    inverse: Frequencies = base**-exponents
    if scaling is None:
        return inverse, 1.0
    kind, factor = scaling["rope_type"], float(scaling["factor"])
    if kind == "linear":
        return inverse / factor, 1.0
    trained = float(scaling["original_max_position_embeddings"])
    if kind == "dynamic":
        stretch = factor * max(tokens, trained) / trained - (factor - 1)
        return (base * stretch ** (width / (width - 2))) ** -exponents, 1.0
    if kind == "longrope":
        factors = np.asarray(scaling["long_factor" if tokens > trained else "short_factor"], np.float64)
        return inverse / factors, _long_magnitude(scaling, factor, trained)
    turns = trained * inverse / (2 * math.pi)  # of each plane over the length of the training
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * inverse / factor + share * inverse, 1.0
    if kind != "yarn":
        raise KeyError(kind)
    return _yarn(inverse, base, scaling), _magnitude(scaling)


def _yarn(inverse: Frequencies, base: float, scaling: Mapping[str, Any]) -> Frequencies:
    """Section 3.2 of arXiv:2309.00071; the ramp is over the planes."""
    width, trained = 2 * len(inverse), float(scaling["original_max_position_embeddings"])
    fast, slow = scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0
    low, high = (width * math.log(trained / (2 * math.pi * n)) / (2 * math.log(base)) for n in (fast, slow))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(len(inverse)) - low) / (high - low or 0.001), 0, 1)
    result: Frequencies = inverse / float(scaling["factor"]) * ramp + inverse * (1 - ramp)
    return result


def _long_magnitude(scaling: Mapping[str, Any], factor: float, trained: float) -> float:
    """LongRoPE's factor on cosine and sine (Ding et al. 2024, arXiv:2402.13753)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def _magnitude(scaling: Mapping[str, Any]) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    one, other = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(one) / of(other) if one and other else of(1.0)
