"""Compares the logits of a checkpoint, computed from the model's definition, with those of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MissingExtraError
from .faults import CorruptError
from .hf_models import hf_config
from .native import NativeCheckpoint
from .reference_model import Array, model_logits


def hf_difference(checkpoint: NativeCheckpoint, directory: Path, num_tokens: int = 64) -> dict[str, Any]:
    """Compare with what transformers computes in float32 from a Hugging Face directory, on fixed random sequences.

    Returns:
        The largest absolute difference of a logit, the number of tokens, and whether all best tokens are the same.

    Raises:
        MissingExtraError: transformers is not installed.
        CorruptError: transformers finds missing or unexpected weights.
    """
    try:
        import torch

        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError("transformers", "dev") from error
    model = checkpoint.manifest["model"]
    count = min(num_tokens, model["max_position_embeddings"])
    tokens = np.random.default_rng(0).integers(0, model["vocab_size"], (2, count))
    opened = getattr(transformers, hf_config(model, "float32", None)["architectures"][0])
    loaded, found = opened.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise CorruptError(f"{directory}: transformers reports {kind}: {sorted(map(str, found[kind]))[:5]}")
    first, second = torch.from_numpy(tokens)[:, None]
    inputs = {"input_ids": first}
    if model["family"] == "bert":
        inputs["token_type_ids"] = torch.arange(count)[None] % max(1, model.get("num_tokentypes", 0))
    if model.get("task_head") == "multichoice":
        types = inputs["token_type_ids"].expand(2, -1)[None]
        inputs = {"input_ids": torch.from_numpy(tokens)[None], "token_type_ids": types}
    if model["family"] == "t5":
        inputs["decoder_input_ids"] = second
    with torch.no_grad():
        out = loaded.eval()(**inputs)
    theirs: Array = (out.prediction_logits if "prediction_logits" in out else out.logits)[0].numpy()
    ours, binary = model_logits(checkpoint, tokens)
    if theirs.shape != ours.shape:
        raise CorruptError(f"{directory}: logits of the shape {theirs.shape}, expected {ours.shape}")
    gaps = [float(np.abs(theirs - ours).max())]
    if binary is not None:
        gaps.append(float(np.abs(out.seq_relationship_logits[0].numpy() - binary).max()))
    return {
        "max_abs": max(gaps),
        "tokens": count,
        "same_best_tokens": bool((theirs.argmax(-1) == ours.argmax(-1)).all()),
    }
