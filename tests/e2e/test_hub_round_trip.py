"""A model of the hub is trained with its own options on a pipeline, and exported with all of its files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.distributed.whole_runs import write_data

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(600)]
transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MODELS = {
    "Qwen3": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},
    "GptOss": {"head_dim": 16, "sliding_window": 8, **EXPERTS},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "truncation": None,
    "padding": None,
    "model": {
        "type": "WordLevel",
        "vocab": {"<unk>": 0, "</s>": 2, **{f"w{at}": at for at in range(3, 90)}},
        "unk_token": "<unk>",
    },
}


def run(*words: object) -> str:
    program = "dynmo_ckpt" if words[0] == "convert" else "dynmo_train"
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def source(request, tmp_path):
    """A directory of a model with random weights, a tokenizer and its settings."""
    import torch

    name = request.param
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    folder = tmp_path / "hub"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "model_max_length": 64, "own": [1]}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def pretrain(family, source, tmp_path, *options):
    data = write_data(tmp_path / "x")
    training = [
        "--seq-length",
        "32",
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "4",
        "--train-iters",
        "2",
        "--eval-iters",
        "0",
    ]
    files = ["--data-path", data, "--cache-dir", tmp_path / "cache", "--run-dir", tmp_path / "run"]
    # So small a rate changes no bit of a weight that is not zero.
    launch = ["launch", "local", "--nproc", 2, "--log-dir", tmp_path / "logs", "--"]
    return run(*launch, "pretrain", family, "--load", source, *training, *files, "--lr", "1e-30", *options)


@pytest.mark.parametrize(
    ("source", "family"),
    [("Qwen3", "llama"), ("Gemma3Text", "llama"), ("GptOss", "gpt"), ("DeepseekV3", "llama")],
    indirect=["source"],
)
def test_model_is_trained_and_exported_with_its_own_options_and_files(source, family, tmp_path, request):
    import torch
    from safetensors.torch import load_file

    is_deepseek_v3 = request.node.callspec.params["source"] == "DeepseekV3"
    own = ["--moe-router-bias-update-rate", "0"] if is_deepseek_v3 else []
    pretrain(family, source, tmp_path, "--use-checkpoint-args", "--weight-decay", "0", *own)
    run("convert", tmp_path / "run", tmp_path / "again", "--to", "hf", "--check-logits")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()
    # vLLM reads these keys, which transformers does not save.
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"} if is_deepseek_v3 else {}
    for name, further in (("config.json", router), ("generation_config.json", {})):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((source / name).read_text()) | further
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-25) for name in before)
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["config_sources"]["model"]["hidden_size"] == "checkpoint"
    assert config["config"]["data"]["tokenizer_model"] == str(source / "tokenizer.json")


@pytest.mark.parametrize("source", ["Qwen3"], indirect=True)
def test_option_that_differs_from_the_checkpoint_is_refused(source, tmp_path):
    with pytest.raises(AssertionError, match="num_key_value_heads is 2 there and 4 here"):
        pretrain("llama", source, tmp_path, "--use-checkpoint-args", "--num-query-groups", "4")


@pytest.mark.parametrize("source", ["Qwen3"], indirect=True)
def test_unreadable_checkpoint_is_one_error(source, tmp_path):
    (source / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(AssertionError, match=r"--use-checkpoint-args: .*cannot read it: .*mamba"):
        pretrain("llama", source, tmp_path, "--use-checkpoint-args")


def test_missing_checkpoint_is_a_warning_and_the_given_options_are_used(tmp_path):
    sizes = [
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "4",
        "--vocab-size",
        "97",
        "--use-checkpoint-args",
    ]
    talk = pretrain("gpt", tmp_path / "run", tmp_path, *sizes)
    assert talk.count("warning: --use-checkpoint-args: no checkpoint in") == 1
    shutil.move(tmp_path / "run", tmp_path / "first")
    pretrain("gpt", tmp_path / "first", tmp_path, "--use-checkpoint-args", "--finetune")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["model"]["num_layers"] == 2
