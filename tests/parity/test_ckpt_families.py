"""Llama, Mixtral, BERT and T5 between the native format, transformers and legacy Megatron: bytes and logits."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dynmo_ckpt.cli import main
from tests.unit.dynmo_ckpt import families, legacy_families, native_checkpoints

ATOL = {
    "llama": 1e-4,
    "unscaled llama": 1e-4,
    "mixtral": 1e-4,
    "bert": 5e-6,
    "masked": 5e-6,
    "t5": 5e-6,
    "relative t5": 5e-6,
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line in this process as the console script does; checks its exit code."""

    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done.out + done.err
        return SimpleNamespace(stdout=done.out, stderr=done.err)

    return call


def theirs(kind):
    """A small random model of transformers."""
    import transformers as tf

    common = {"vocab_size": 61, "max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **common}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
    if kind in ("llama", "unscaled llama"):
        rope = rope if kind == "llama" else {"rope_type": "default", "rope_theta": 500.0}
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=2, rope_parameters=rope))
    elif kind == "mixtral":
        made = tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    elif kind in ("bert", "masked"):
        name = {"bert": "MegatronBertForPreTraining", "masked": "MegatronBertForMaskedLM"}[kind]
        made = getattr(tf, name)(tf.MegatronBertConfig(**sizes, layer_norm_eps=1e-5))
    elif kind == "relative t5":
        layers = {"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 8}
        made = tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=61, d_model=32, d_ff=48, d_kv=6, num_heads=4, **layers, n_positions=64)
        )
    else:
        both = {
            f"{side}_{f}": n for side in ("encoder", "decoder") for f, n in (("ffn_dim", 48), ("attention_heads", 4))
        }
        config = tf.BlenderbotConfig(d_model=32, encoder_layers=2, decoder_layers=3, **both, **common)
        made = tf.BlenderbotForConditionalGeneration(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.2)
        if kind == "t5":
            made.model.decoder.embed_positions.weight.copy_(made.model.encoder.embed_positions.weight)
            made.final_logits_bias.normal_(0, 0.2)
    return made


def logits(run, native, hf, kind):
    report = run("verify", native, "--hf-logits", hf, "--logits-atol", ATOL[kind], "--format", "json")
    found = json.loads(report.stdout)["logits"]
    assert found["same_best_tokens"]
    assert found["max_abs"] <= ATOL[kind]


def weights(directory):
    files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.parametrize("kind", list(ATOL))
def test_convert_hf_to_native_and_back_keeps_tensors_and_logits(run, tmp_path, kind):
    """Sharded files in; native on tensor ranks and stages; the same tensors out, and the same logits on each side."""
    theirs(kind).save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil--evil.Evil"}}))
    run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", "--tp", 2, "--pp", 2)
    run("convert", tmp_path / "native", tmp_path / "back", "--to", "hf", "--max-shard-size", "30KB")
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    logits(run, tmp_path / "native", tmp_path / "back", kind)
    assert "no tensor differs" in run("diff", tmp_path / "hf", tmp_path / "native").stdout
    if kind == "llama":
        refused = run("convert", tmp_path / "native", tmp_path / "legacy", "--to", "legacy", code=5).stderr
        assert "original_max_position_embeddings" in refused
    elif kind == "relative t5":
        run("convert", tmp_path / "native", tmp_path / "legacy", "--to", "legacy", code=5)
    elif kind != "mixtral":
        run("convert", tmp_path / "native", tmp_path / "legacy", "--to", "legacy", "--tp", 2, "--pp", 2)
        run("convert", tmp_path / "legacy", tmp_path / "again", "--to", "hf", "--max-shard-size", "30KB")
        for path in (tmp_path / "back").glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("name", "labels"), [("MegatronBertForSequenceClassification", 3), ("MegatronBertForMultipleChoice", 1)]
)
def test_convert_finetuned_head_to_legacy_and_back_keeps_logits(run, tmp_path, name, labels):
    """The heads of MNLI and RACE: from transformers to native and legacy Megatron, and back."""
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_labels": labels} if labels > 1 else {}
    torch.manual_seed(0)
    config = tf.MegatronBertConfig(**sizes, vocab_size=61, max_position_embeddings=64, layer_norm_eps=1e-5, **more)
    made = getattr(tf, name)(config).eval()
    made.save_pretrained(tmp_path / "hf")
    run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", "--tp", 2, "--pp", 2)
    model = json.loads((tmp_path / "native" / "manifest.json").read_text())["model"]
    head = "classification" if labels > 1 else "multichoice"
    assert (model["task_head"], model["num_classes"]) == (head, labels if labels > 1 else 4)
    run("verify", tmp_path / "native")
    logits(run, tmp_path / "native", tmp_path / "hf", "bert")
    run("convert", tmp_path / "native", tmp_path / "legacy", "--to", "legacy", "--tp", 2, "--pp", 2)
    last = tmp_path / "legacy" / "iter_0000000" / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(last, weights_only=False)["model"]
    assert list(state) == ["language_model", f"{head if labels == 1 else 'classification'}_head"]
    assert tuple(state[f"{head}_head"]["weight"].shape) == (labels, 32)
    assert "pooler" in state["language_model"]
    run("convert", tmp_path / "legacy", tmp_path / "again", "--to", "hf")
    again, found = getattr(tf, name).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert again.config.num_labels == made.config.num_labels


def native(directory, m, masked=False):
    p = families.parameters(m)
    masks = native_checkpoints.masks(p) if masked else {}
    items = {"t5": ["encoder.embedding", "encoder.layers.0", "encoder.layers.1", "encoder.norm", "decoder.embedding"]}
    stages = items.get(m["family"], ["embedding", *(f"layers.{i}" for i in range(m["num_layers"]))])
    stages = [*stages, *(f"decoder.layers.{i}" for i in range(m.get("num_decoder_layers", 0))), "head"]
    native_checkpoints.save(directory, p | masks, m, partition=[stages], ties=families.ties(m))
    return p


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: inner for key, part in value.items() for name, inner in flat(part, f"{prefix}/{key}").items()}


def zero_padding(tensors, vocabulary):
    """The parameters, with zeros in the rows behind the vocabulary's, which no token reads."""
    for name, value in tensors.items():
        if "embedding.word." in name or name in ("head.weight", "head.bias"):
            tensors[name] = np.where(np.arange(len(value)).reshape(-1, *[1] * (value.ndim - 1)) < vocabulary, value, 0)
    return tensors


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_convert_to_legacy_equals_golden_files(run, tmp_path, family):
    m = getattr(families, family)()
    p = zero_padding(native(tmp_path / "in", m), m["vocab_size"])
    nothing = range(0)
    stages = [(range(1), nothing), (range(1, 3), nothing)]
    counts = "1,2"
    if family == "t5":
        stages, counts = [(range(2), nothing), (nothing, range(1)), (nothing, range(1, 3))], "2,1,2"
    run(
        "convert",
        tmp_path / "in",
        tmp_path / "out",
        "--to",
        "legacy",
        "--tp",
        2,
        "--pp",
        len(stages),
        "--partition",
        counts,
    )
    for rank in range(2):
        for stage in range(len(stages)):
            path = tmp_path / "out" / "iter_0000008" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
            ours = flat(torch.load(path, weights_only=False)["model"])
            expected = flat(legacy_families.chunk(p, m, stages, stage, rank, 2, 3.0))
            expected = {name.replace("_norm.", "_layernorm."): value for name, value in expected.items()}
            assert ours.keys() == expected.keys()
            assert [name for name in ours if not np.array_equal(ours[name].numpy(), expected[name])] == []


@pytest.mark.parametrize(("family", "kind"), [("llama", "llama"), ("bert", "bert"), ("t5", "t5")])
def test_convert_pruned_weights_are_zero(run, tmp_path, family, kind):
    m = getattr(families, family)(tied_embeddings=True)
    native(tmp_path / "in", m, masked=True)
    run("convert", tmp_path / "in", tmp_path / "hf", "--to", "hf")
    logits(run, tmp_path / "in", tmp_path / "hf", kind)
    assert "no tensor differs" in run("diff", tmp_path / "hf", tmp_path / "in").stdout
    run("convert", tmp_path / "in", tmp_path / "legacy", "--to", "legacy", "--tp", 2)
    assert "no tensor differs" in run("diff", tmp_path / "legacy", tmp_path / "in").stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "the input lacks 8 tensors"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"model_type": "falcon"}, "attention and MLP of one input, side by side; the nearest one that is supported"),
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"num_hidden_layers": 1}, "the map has no rule for 9 tensors"),
        ({"num_hidden_layers": 3}, "the input lacks 9 tensors"),
        ({"intermediate_size": 24}, r"has the shape [48, 32]; the model requires [24, 32]"),
    ],
)
def test_convert_unsupported_llama_is_refused(run, tmp_path, changes, message):
    theirs("llama").save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | changes))
    assert message in run("convert", tmp_path / "hf", tmp_path / "out", "--to", "native", code=5).stderr
    assert not (tmp_path / "out").exists()


def test_convert_model_without_hf_architecture_is_refused(run, tmp_path):
    m = families.bert(position_embedding="relative")
    native(tmp_path / "in", m)
    assert (
        "position_embedding = learned only"
        in run("convert", tmp_path / "in", tmp_path / "o", "--to", "hf", code=5).stderr
    )
