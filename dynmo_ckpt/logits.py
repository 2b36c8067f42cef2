"""What a GPT checkpoint computes, from its definition, in numpy; layer by layer, so that one layer is held at a time.

Shapes: T tokens, D model width, V true vocabulary, N heads, H head dimension. Source: the pre-norm decoder of GPT-2
(Radford et al. 2019); ``gelu_tanh`` is the approximation of section 2 of Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compare import as_numbers
from .copyplan import OutputTensor, sources
from .errors import MissingExtraError
from .faults import CorruptError
from .io.reading import Reader, open_sources
from .native import NativeCheckpoint
from .panels import panels

Array = NDArray[np.float32]


def load_array(checkpoint: NativeCheckpoint, name: str) -> Array:
    """One tensor as float32 in its stored shape, pruned weights zero; a tied name gives what it is tied to."""
    name = checkpoint.manifest["ties"].get(name, name)
    content = checkpoint.tensors[name]
    shape = tuple(checkpoint.manifest["tensors"][name]["shape"])
    output = OutputTensor(key=name, shape=shape, content=content, mask=checkpoint.tensors.get(f"{name}.mask"))
    with open_sources(sources([output])) as files:
        parts = [
            as_numbers(panel.reshape(-1), content.dtype).astype(np.float32) for panel in panels(output, Reader(files))
        ]
    return np.concatenate(parts).reshape(shape)


def gpt_logits(checkpoint: NativeCheckpoint, tokens_T: NDArray[np.int64]) -> Array:
    """Logits ``[T, V]`` of one sequence."""
    model = checkpoint.manifest["model"]
    words_VD = load_array(checkpoint, "embedding.word.weight")
    x_TD = words_VD[tokens_T] + load_array(checkpoint, "embedding.position.weight")[: len(tokens_T)]
    for i in range(model["num_layers"]):
        x_TD = x_TD + _attention(checkpoint, f"layers.{i}.attention", x_TD)
        x_TD = x_TD + _mlp(checkpoint, f"layers.{i}.mlp", x_TD)
    head_VD = load_array(checkpoint, "head.weight")[: model["vocab_size"]]
    return _norm(checkpoint, "head.norm", x_TD) @ head_VD.T


def _norm(checkpoint: NativeCheckpoint, name: str, x_TD: Array) -> Array:
    centred = x_TD - x_TD.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    epsilon = np.float32(checkpoint.manifest["model"]["layernorm_epsilon"])
    scale = load_array(checkpoint, f"{name}.weight") / np.sqrt(variance + epsilon)
    result: Array = centred * scale + load_array(checkpoint, f"{name}.bias")
    return result


def _linear(checkpoint: NativeCheckpoint, name: str, x: Array) -> Array:
    result: Array = x @ load_array(checkpoint, f"{name}.weight").T + load_array(checkpoint, f"{name}.bias")
    return result


def _attention(checkpoint: NativeCheckpoint, name: str, x_TD: Array) -> Array:
    heads, tokens = checkpoint.manifest["model"]["num_attention_heads"], len(x_TD)
    width = x_TD.shape[1] // heads
    qkv_TN3H = _linear(checkpoint, f"{name}.qkv", _norm(checkpoint, f"{name}.norm", x_TD)).reshape(
        tokens, heads, 3, width
    )
    q, k, v = (qkv_TN3H[:, :, i].transpose(1, 0, 2) for i in range(3))
    scores_NTT = q @ k.transpose(0, 2, 1) / np.float32(math.sqrt(width))
    scores_NTT = np.where(np.tri(tokens, dtype=bool), scores_NTT, -np.inf)
    weights = np.exp(scores_NTT - scores_NTT.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed_TD = (weights @ v).transpose(1, 0, 2).reshape(tokens, -1)
    return _linear(checkpoint, f"{name}.dense", mixed_TD)


def _mlp(checkpoint: NativeCheckpoint, name: str, x_TD: Array) -> Array:
    inner = _linear(checkpoint, f"{name}.fc1", _norm(checkpoint, f"{name}.norm", x_TD))
    if checkpoint.manifest["model"]["activation"] == "gelu_tanh":
        gate = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (inner + np.float32(0.044715) * inner**3))
    else:
        gate = np.vectorize(math.erf, otypes=[np.float32])(inner / np.float32(math.sqrt(2)))
    return _linear(checkpoint, f"{name}.fc2", np.float32(0.5) * inner * (1 + gate))


def hf_difference(checkpoint: NativeCheckpoint, directory: Path, num_tokens: int = 64) -> dict[str, Any]:
    """Compare with what transformers computes in float32 from a Hugging Face directory, on a fixed random sequence.

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
    tokens = np.random.default_rng(0).integers(0, model["vocab_size"], count)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise CorruptError(f"{directory}: transformers reports {kind}: {sorted(map(str, found[kind]))[:5]}")
    with torch.no_grad():
        theirs: Array = loaded.eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    ours = gpt_logits(checkpoint, tokens)
    if theirs.shape != ours.shape:
        raise CorruptError(f"{directory}: logits of the shape {theirs.shape}, expected {ours.shape}")
    return {
        "max_abs": float(np.abs(theirs - ours).max()),
        "tokens": count,
        "same_best_tokens": bool((theirs.argmax(-1) == ours.argmax(-1)).all()),
    }
