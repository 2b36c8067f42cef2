"""Loads Hugging Face directories in vLLM on the CPU: the loaded tensors and the log-probabilities of a prompt.

Run: ``python tests/cli/vllm_models.py DIRECTORY...``, in an environment with vLLM's build for CPUs. Each DIRECTORY has
the prompt in ``prompt.json`` and gets ``vllm.npz``: the parameters as ``loaded/NAME`` before vLLM packs them for its
kernels, and ``logprobs``; or ``error``. Layers in 2:4 sparsity are decompressed as vLLM does before it calls its
kernel, which needs a GPU: such a model has no ``logprobs``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Before the import of vLLM, which reads them then.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.models import registry

# The torch implementations of layers. In vLLM 0.32 the rotation of neighbors by its CPU kernel, which DeepSeek has
# without YaRN, is wrong for a part of a head.
SETTINGS = {"compilation_config": {"custom_ops": ["none"]}, "enforce_eager": True, "dtype": "float32"}
SETTINGS |= {"max_model_len": 64, "max_num_seqs": 1, "max_logprobs": -1, "skip_tokenizer_init": True}

# Of what is quantized; vLLM has them for the cache of keys and values of other models, too.
SCALES = ("_scale", "_zero_point")


class SparseWeightsRead(Exception):
    """Decompressed layers are collected; the kernel for them runs on GPUs only."""


def collect(model, found):
    """Copy the parameters of a loaded model into ``found``."""
    for name, parameter in model.named_parameters():
        if not name.endswith(SCALES):
            found[f"loaded/{name}"] = parameter.detach().numpy().copy()
    is_sparse = False
    for name, layer in model.named_modules():
        if hasattr(layer, "bitmask"):
            is_sparse = True
            parts = {"compressed": layer.compressed, "bitmask": layer.bitmask, "layer": layer}
            weight = layer.scheme._decompress_bitmask_compressed_weight(**parts)
            found[f"loaded/{name}.weight"] = weight.numpy()
            for part in ("shape", "compressed", "bitmask"):
                del found[f"loaded/{name}.{part}"]
    if is_sparse:
        raise SparseWeightsRead


def load_in_vllm(directory, prompt, found):
    model = LLM(str(directory), **SETTINGS)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
    (output,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    found["logprobs"] = np.array([[row[token].logprob for token in range(len(row))] for row in rows])


def main(directories):
    found = {}
    pack = base_loader.process_weights_after_loading

    def collect_and_pack(model, *args, **kwargs):
        collect(model, found)
        pack(model, *args, **kwargs)

    base_loader.process_weights_after_loading = collect_and_pack
    # In this process: another one, for each architecture, would import vLLM again.
    registry._run_in_subprocess = lambda function: function()
    scheme = sys.modules.get(f"{compressed_tensors.__package__}.schemes.compressed_tensors_24")
    if scheme is not None:  # releases with 2:4 sparsity: the weights are loaded without the GPU that computes with them
        scheme.sparse_cutlass_supported = lambda: True
        compressed_tensors.CompressedTensorsConfig._check_scheme_supported = staticmethod(lambda *_a, **_k: True)
    for directory in map(Path, directories):
        found.clear()
        try:
            load_in_vllm(directory, json.loads((directory / "prompt.json").read_text()), found)
        except SparseWeightsRead:
            pass
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the result
            found["error"] = np.array(f"{type(error).__name__}: {error}")
        np.savez(directory / "vllm.npz", **found)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
