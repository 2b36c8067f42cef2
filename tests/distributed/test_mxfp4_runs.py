"""A GPT-OSS whose experts are MXFP4: converted, trained on a pipeline, exported, and computed by transformers."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from tests.distributed.whole_runs import run_command
from tests.distributed.workers import run_workers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(600)]

LENGTH, BATCH, STEPS, RATE = 32, 4, 2, 1e-3
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 16, "rope_theta": 150000.0}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
SIZES |= {"vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 8, "rope_parameters": YARN}
FLAGS = {
    "num-layers": "2",
    "hidden-size": "64",
    "ffn-hidden-size": "64",
    "num-attention-heads": "4",
    "num-query-groups": "2",
    "kv-channels": "16",
    "vocab-size": "128",
    "seq-length": str(LENGTH),
    "max-position-embeddings": "64",
    "activation": "clamped_swiglu",
    "attention-window": "8",
    "layer-types": "sliding,full",
    "num-experts": "4",
    "moe-router-topk": "2",
    "norm-epsilon": "1e-5",
    "rotary-base": "150000",
    "rotary-scaling": json.dumps({name: value for name, value in YARN.items() if name != "rope_theta"}),
    "micro-batch-size": "2",
    "global-batch-size": str(BATCH),
    "train-iters": str(STEPS),
    "lr": str(RATE),
    "lr-decay-style": "constant",
    "weight-decay": "0",
    "clip-grad": "0",
    "adam-beta2": "0.95",
    "moe-aux-loss-coeff": "0",
    "split": "100,0,0",
    "eval-iters": "0",
    "log-interval": "1",
}
SWITCHES = ("--attention-sinks", "--moe-router-bias", "--add-bias-linear", "--untie-embeddings-and-output-weights")


def write_model(folder):
    """A random GPT-OSS as its publisher stores it: codes and scales of the experts, bfloat16 elsewhere."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    random, stored = np.random.default_rng(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            blocks = random.integers(0, 256, (experts, outer, inner // 32, 16), dtype=np.uint8)
            scales = random.integers(119, 123, (experts, outer, inner // 32), dtype=np.uint8)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
        else:
            noise = torch.randn_like(tensor) / 8
            stored[name] = tensor if "weight" in name and tensor.dim() > 1 else tensor + noise
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(document))


def write_one_sequence(prefix):
    """A document of complete periods of a sample's length, so that all samples are the same; returns a sample."""
    period = np.random.default_rng(1).integers(3, 128, LENGTH)
    tokens = np.tile(period, 40).astype("<u2")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    arrays = (np.array([len(tokens)], "<i4"), np.array([0], "<i8"), np.array([0, 1], "<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return torch.from_numpy(tokens[: LENGTH + 1].astype(np.int64))


def dequantized(folder):
    """The model as transformers dequantizes it, in float32."""
    plain = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=plain,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    return model.train()


def train_by_torch(model, sample):
    """The losses of ``STEPS`` steps of Adam on batches of one sample."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    ids, losses = sample[None], []
    for _ in range(STEPS):
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def logits_of(model, sample):
    with torch.no_grad():
        return model.eval()(sample[None]).logits


def convert(*args):
    from typer.testing import CliRunner

    from dynmo_ckpt.cli import app

    done = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model, its run on two stages, and the export of the run; a sample."""
    folder = tmp_path_factory.mktemp("mxfp4")
    (folder / "in").mkdir()
    write_model(folder / "in")
    sample = write_one_sequence(folder / "data")
    options = {**FLAGS, "data-path": folder / "data", "load": folder / "in", "cache-dir": folder / "cache"}
    options |= {"run-dir": folder / "run", "pipeline-model-parallel-size": "2"}
    words = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    results = run_workers(run_command, 2, ["pretrain", "llama", *words, *SWITCHES], joins=False)
    assert [code for code, _ in results] == [0, 0], results
    convert(folder / "run", folder / "out", "--to", "hf")
    return folder, sample


def test_quantized_weights_are_exported_as_transformers_dequantizes_them(trained, tmp_path):
    folder, sample = trained
    convert(folder / "in", tmp_path / "native", "--to", "native")
    convert(tmp_path / "native", tmp_path / "plain", "--to", "hf")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", attn_implementation="eager", dtype=torch.float32
    )
    theirs = dequantized(folder / "in")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    # With several threads products may be added in another order.
    torch.testing.assert_close(logits_of(theirs, sample), logits_of(plain, sample), rtol=0, atol=1e-5)


def test_two_steps_on_a_pipeline_equal_those_of_torch(trained):
    folder, sample = trained
    model = dequantized(folder / "in")
    before = logits_of(model, sample)
    losses = train_by_torch(model.train(), sample)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["lm_loss"] for line in lines if "lm_loss" in line]
    assert found == pytest.approx(losses, abs=2e-5)
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out", attn_implementation="eager", dtype=torch.float32
    )
    expected = logits_of(model, sample)
    moved = (expected - before).abs().max().item()
    assert moved > 0.05
    assert (logits_of(exported, sample) - expected).abs().max().item() < moved / 50
