"""A small Llama in a Hugging Face directory, plain or in float8, and an adapter."""

import json

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}


def small_llama(directory, **changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": False}
        | changes
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def quantize_fp8(directory):
    """Replace the projections of a directory by float8 blocks; returns the plain weights by name."""
    tensors = safetensors.load_file(directory / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        blocks = torch.rand(-(-tensors[name].shape[0] // 16), -(-tensors[name].shape[1] // 8)) / 8 + 0.01
        wide = blocks.repeat_interleave(16, 0).repeat_interleave(8, 1)[: len(tensors[name]), : tensors[name].shape[1]]
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = blocks
        expected[name] = tensors[name].float() * wide
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return tensors | expected


def prune(directory, layout, dtype=torch.float32):
    """Prune the projections of a directory: two of four by magnitude, or nine tenths at random."""
    tensors = safetensors.load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name]
        if layout == "sparse-24-bitmask":
            order = weight.abs().reshape(-1, 4).argsort(1, descending=True).argsort(1)
            tensors[name] = weight * (order < 2).reshape(weight.shape)
        else:
            tensors[name] = weight * (torch.rand(weight.shape) < 0.1)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def save_adapter(tmp_path, tensors=None, **config):
    """Write an adapter of q_proj without peft."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    if tensors is None:
        tensors = {f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2)}
    safetensors.save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
