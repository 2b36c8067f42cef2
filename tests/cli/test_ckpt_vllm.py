"""dynmo-ckpt convert --to hf: vLLM's own loader reads every tensor, and vLLM computes the logits of transformers."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dynmo_ckpt.formats.checkpoint import seal
from tests.unit.dynmo_ckpt.small_llama import prune

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = [
    pytest.mark.complete,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's build for CPUs is not installed"),
]

PROMPT = np.random.default_rng(0).integers(3, 288, 40).tolist()
# Head sizes that vLLM's attention on CPUs has, and that of the latents for which its kernel is compiled.
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 288, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
# Windows of 8 positions, which the 40 tokens exceed.
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "tie_word_embeddings": True}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OSS = {**SIZES, "head_dim": 32, "sliding_window": 8, "max_position_embeddings": 4096}
OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {**SIZES, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"v_head_dim": 128, "num_attention_heads": 2, "rms_norm_eps": 1e-6, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 64}
LATENT |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
BOTH_SCALES = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
MODELS = {
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 288}),
    "llama": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 64, "rope_parameters": YARN}),
    "qwen3-experts": ("Qwen3Moe", {**SIZES, **EXPERTS, "norm_topk_prob": True}),
    "qwen3-experts-not-normalized": ("Qwen3Moe", {**SIZES, **EXPERTS, "norm_topk_prob": False}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": LINEAR}),
    "olmo2": ("Olmo2", SIZES),
    "phi3": ("Phi3", {**SIZES, "sliding_window": None}),
    "phi4": ("Phi3", {**SIZES, "hidden_size": 256, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "gpt-oss": ("GptOss", OSS),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "deepseek-v3-yarn": ("DeepseekV3", {**LATENT, "rope_parameters": BOTH_SCALES}),
}
# Their configuration is that of transformers; of the others it is computed from the manifest.
WITH_SOURCE = ("deepseek-v3", "gemma3", "gpt-oss", "llama")
# What vLLM computes as one matrix.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED |= {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}


def save(kind, settings, directory):
    """Save a random model whose norms, biases and sinks differ from 1 and 0; returns it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + noise / 8 if parameter.dim() == 1 else noise * 0.08)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(directory)
    return model


def loaded_tensors(stored, names, kind):
    """The tensors of vLLM with ``names`` from those of transformers' files, and the names of those that are used."""
    used, found = set(), {}

    def take(name):
        used.add(name)
        return stored[name]

    for name in names:
        base = name
        if kind == "GptOss":
            base = name.replace(".attn.", ".self_attn.").replace("model.embedding.", "model.embed_tokens.")
        module, part = base.split(".")[-2:]
        if "routed_experts" in base:
            found[name] = stacked_experts(base.split(".routed_experts.")[0], part, stored, take)
        elif module in FUSED and base not in stored:
            parts = (base.replace(f".{module}.", f".{each}.") for each in FUSED[module])
            found[name] = np.concatenate([take(each) for each in parts])
        elif kind == "GPT2" and re.search(r"c_(attn|proj|fc)\.weight", base):
            found[name] = take(base).T
        else:
            found[name] = take(base)
    return found, used


def stacked_experts(base, part, stored, take):
    if f"{base}.gate_up_proj" in stored:  # GPT-OSS, whose files alternate gate and up
        suffix = "_bias" if part.endswith("bias") else ""
        value = take(f"{base}.{'gate_up' if part.startswith('w13') else 'down'}_proj{suffix}")
        return value if suffix else value.swapaxes(1, 2)
    gate, down, up = ("w1", "w2", "w3") if ".block_sparse_moe." in base else ("gate_proj", "down_proj", "up_proj")
    count = len({name for name in stored if name.startswith(f"{base}.") and name.endswith(f".{down}.weight")})
    parts = (gate, up) if part == "w13_weight" else (down,)
    each = [[take(f"{base}.{i}.{name}.weight") for name in parts] for i in range(count)]
    return np.stack([np.concatenate(one) for one in each])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Folder with the results of vLLM, of one process for all models."""
    folder = tmp_path_factory.mktemp("vllm")
    for name, (kind, settings) in MODELS.items():
        model = save(kind, settings, folder / name / "in")
        with torch.no_grad():
            logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1).numpy()
        np.save(folder / name / "logprobs.npy", logprobs[:-1])
        export(folder / name, keep_source=name in WITH_SOURCE)
    run_vllm(folder / name / "out" for name in MODELS)
    return folder


def export(place, *options, keep_source=True):
    """Convert to a native checkpoint on two tensor ranks, and that to a Hugging Face directory."""
    command = [sys.executable, "-m", "dynmo_ckpt", "convert"]
    words = [place / "in", place / "native", "--to", "native", "--tp", "2", "--no-check-logits"]
    subprocess.run([*command, *words], check=True, capture_output=True)
    if not keep_source:
        path = place / "native" / "manifest.json"
        manifest = json.loads(path.read_bytes())
        del manifest["source"]
        path.write_bytes(seal(manifest))
    words = [place / "native", place / "out", "--to", "hf", "--no-check-logits", *options]
    subprocess.run([*command, *words], check=True, capture_output=True)


def run_vllm(directories):
    directories = list(directories)
    for directory in directories:
        (directory / "prompt.json").write_text(json.dumps(PROMPT))
    program = Path(__file__).with_name("vllm_models.py")
    subprocess.run([sys.executable, program, *directories], check=True, capture_output=True, timeout=1200)


def read_result(directory):
    with np.load(directory / "out" / "vllm.npz") as found:
        return {key: found[key] for key in found.files}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_vllm_loads_every_tensor_and_computes_the_logits(results, name):
    found = read_result(results / name)
    assert "error" not in found, found["error"]
    check_tensors(results / name / "in", loaded_by_vllm(found), MODELS[name][0])
    np.testing.assert_allclose(found["logprobs"], np.load(results / name / "logprobs.npy"), rtol=0, atol=5e-5)


def loaded_by_vllm(found):
    return {key.removeprefix("loaded/"): value for key, value in found.items() if key.startswith("loaded/")}


def check_tensors(directory, loaded, kind):
    """Compare what vLLM has loaded with the files of transformers, bit for bit."""
    stored = safetensors.load_file(directory / "model.safetensors")
    expected, used = loaded_tensors(stored, loaded, kind)
    assert used == stored.keys()
    for name, value in loaded.items():
        rows = len(expected[name])
        assert np.array_equal(value[:rows], expected[name]), name
        # vLLM pads the vocabulary.
        assert len(value) == rows or "embed" in name or name in ("lm_head.weight", "transformer.wte.weight"), name


@pytest.mark.timeout(1800)
def test_vllm_reads_sparse_weights_or_refuses_them(tmp_path):
    """Releases up to 0.18 decompress them to the pruned weights; later ones refuse such a configuration by name."""
    save("Llama", SIZES, tmp_path / "in")
    prune(tmp_path / "in", "sparse-24-bitmask")
    export(tmp_path, "--sparse-format", "sparse-24-bitmask")
    run_vllm([tmp_path / "out"])
    found = read_result(tmp_path)
    if "error" in found:
        assert "Sparsity support has been removed" in str(found["error"])
        return
    assert "logprobs" not in found  # dense layers would have them
    check_tensors(tmp_path / "in", loaded_by_vllm(found), "Llama")
