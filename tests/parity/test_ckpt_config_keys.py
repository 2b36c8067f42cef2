"""Every key of a configuration is mapped, known to change no logit, or refused; checked against transformers."""

import importlib
import inspect
import json
import re
import shutil
import sys

import pytest
import torch

from dynmo_ckpt._common.errors import DynmoError
from dynmo_ckpt.cli import main
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.config_keys import complete_config, irrelevant_keys, key_table
from dynmo_ckpt.huggingface.models import ARCHITECTURES, hf_config, hf_model
from dynmo_ckpt.huggingface.source_config import export_config, source_of
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.logits import dtype_argument, fixed_tokens, hf_difference, hf_logits
from tests.tables import table

EIGHT = ReadOptions(make_vocab_size_divisible_by=8)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 31,
    "max_position_embeddings": 64,
}
BLENDERBOT = {f"{s}_{f}": n for s in ("encoder", "decoder") for f, n in (("ffn_dim", 24), ("attention_heads", 4))}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {**SIZES, "num_key_value_heads": 2, "sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "megatron-bert": ("MegatronBertForPreTraining", {**SIZES, "layer_norm_eps": 1e-5}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1}
        | {"num_heads": 4, "relative_attention_num_buckets": 8, "n_positions": 64},
    ),
    "blenderbot": (
        "BlenderbotForConditionalGeneration",
        {"vocab_size": 31, "max_position_embeddings": 64, "encoder_layers": 1, "decoder_layers": 2, "d_model": 16}
        | BLENDERBOT,
    ),
}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS |= {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, "num_key_value_heads": 2, **EXPERTS, "mlp_only_layers": [0]}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None}
WINDOWS = {"head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5, "layer_types": None}
MODELS |= {
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, **WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", {**GROUPED, **WINDOWS, "sliding_window_pattern": 2}),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "sliding_window": 5}),
    "gpt_oss": ("GptOssForCausalLM", {**GROUPED, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LATENT = {key: value for key, value in DEEPSEEK.items() if key.endswith(("_rank", "_head_dim"))}
ROUTED = {key: value for key, value in DEEPSEEK.items() if key not in {*SIZES, *LATENT}} | {"norm_topk_prob": True}
NEWER = {
    "olmo3": ("Olmo3ForCausalLM", {**GROUPED, "num_hidden_layers": 4, "sliding_window": 5}),
    "exaone4": ("Exaone4ForCausalLM", {**GROUPED, "num_hidden_layers": 4, "sliding_window": 5}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5},
    ),
    "granite": (
        "GraniteForCausalLM",
        {**GROUPED, "embedding_multiplier": 3.0, "attention_multiplier": 0.4}
        | {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmoe": ("OlmoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "ministral": ("MinistralForCausalLM", {**GROUPED, **WINDOWS}),
    "seed_oss": ("SeedOssForCausalLM", {**GROUPED, "head_dim": 8}),
    "internlm3": ("LlamaForCausalLM", {**GROUPED, "head_dim": 8}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**GROUPED, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**GROUPED, **EXPERTS, **WINDOWS, "use_sliding_window": True, "shared_expert_intermediate_size": 10}
        | {"mlp_only_layers": [0], "max_window_layers": 2},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {**GROUPED, **ROUTED, "head_dim": 8, "attention_bias": True}),
    "dots1": ("Dots1ForCausalLM", {**GROUPED, **ROUTED, "sliding_window": 5, "max_window_layers": 1}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**SIZES, **LATENT, **ROUTED, "num_key_value_heads": 4}),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 5}),
    "arcee": ("ArceeForCausalLM", GROUPED),
    "jais2": ("Jais2ForCausalLM", GROUPED),
}
MODELS |= NEWER
KINDS = [pytest.param(kind, marks=pytest.mark.complete if kind in NEWER else ()) for kind in MODELS]
# Gemma 3's model of images and text has the same module as that of text.
OF_IMAGES = {"get_text_config", "image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}


def save(directory, kind, **changes):
    """A small random model of transformers; returns it."""
    import transformers as tf

    name, sizes = MODELS[kind]
    made = getattr(tf, name)(tf.AutoConfig.for_model(kind, **{**sizes, **changes})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if kind == "blenderbot":
            made.model.decoder.embed_positions.weight.copy_(made.model.encoder.embed_positions.weight)
    made.save_pretrained(directory)
    return made


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def outcome(directory):
    """``refused``, ``equal`` or ``wrong``, by transformers' logits; ``invalid`` where transformers refuses as well."""
    try:
        checkpoint, _ = open_checkpoint(directory, "hf", EIGHT)
    except DynmoError:
        return "refused"
    try:
        found = hf_difference(checkpoint, directory)
    except CorruptError:
        return "invalid"
    return "equal" if found["max_abs"] < 1e-3 else "wrong"


def other_values(key, value):
    if key in ("rope_parameters", "rope_scaling"):
        return [LLAMA3, {"full_attention": {"rope_theta": 5.0}}, {"rope_type": "linear", "factor": 2.0}]
    if key in ("activation_function", "hidden_act", "feed_forward_proj", "dense_act_fn"):
        return ["relu", "gelu", "silu"]
    if isinstance(value, bool) or value is None:
        return [value is not True]
    return [value * 2] if isinstance(value, int | float) else ["other"]


@pytest.mark.parametrize("kind", KINDS)
def test_config_key_that_changes_logits_is_mapped_or_refused(tmp_path, kind):
    table = key_table()["model_types"][kind]
    values = {**table["mapped"], **{key: options[0] for key, options in table["needs"].items()}, **MODELS[kind][1]}
    values |= {alias: values[key] for alias, key in table.get("aliases", {}).items()}
    values |= {key: False for key in ("tie_encoder_decoder", "add_cross_attention", "is_decoder")}
    save(tmp_path / "made", kind)
    found = {}
    for key, value in values.items():
        for other in other_values(key, value):
            shutil.copytree(tmp_path / "made", tmp_path / "edited")
            edit(tmp_path / "edited", **{key: other})
            found[key, str(other)] = outcome(tmp_path / "edited")
            shutil.rmtree(tmp_path / "edited")
    assert [each for each, result in found.items() if result == "wrong"] == []
    assert "equal" in found.values()
    assert "refused" in found.values()


@table("kind", MODELS)
def test_key_table_every_key_of_transformers_has_a_rule(kind):
    """A key that a new release of transformers reads makes this fail, before it makes a model wrong."""
    module = kind.removesuffix("_text").replace("-", "_")
    # InternLM3 is computed by Llama's classes.
    code = "llama" if kind == "internlm3" else module
    source = inspect.getsource(importlib.import_module(f"transformers.models.{code}.modeling_{code}"))
    settings = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    configs = [value for name, value in vars(settings).items() if name.endswith("Config")]
    made = next(each for each in configs if getattr(each, "model_type", None) == kind)
    read = set(re.findall(r"\bconfig\.([a-z_]+)", source)) | set(made().to_dict())
    read -= OF_IMAGES if kind == "gemma3_text" else set()
    table = key_table()
    own = table["model_types"][kind]
    known = {*own["mapped"], *own["needs"], *own.get("aliases", ()), *irrelevant_keys(own)}
    known |= {*table["every"]["needs"], *irrelevant_keys(table["every"])}
    assert sorted(read - known) == []


@table("kind", MODELS)
def test_key_table_every_key_that_is_read_is_mapped(kind):
    read = set()

    class Recorder(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

    complete = complete_config({"model_type": kind, **MODELS[kind][1]})
    model = ARCHITECTURES[kind].to_model(
        Recorder({key: None if key.startswith("rope_") else v for key, v in complete.items()})
    )
    assert model["family"]
    optional = {"layer_types", "sliding_window", "vocab_size", "original_max_position_embeddings"}
    # Copied with others, once for each type of layers.
    optional |= {"rope_theta", "partial_rotary_factor"} if kind in ("gemma3_text", "olmo3") else set()
    assert set(key_table()["model_types"][kind]["mapped"]) - optional <= read


def test_key_table_refused_family_names_what_is_missing():
    keys = key_table()
    assert not keys["refused"].keys() & keys["model_types"].keys()
    for kind, (lacks, near) in keys["refused"].items():
        with pytest.raises(UnsupportedError, match=f"model_type {kind}: .* lack {re.escape(lacks)}; .* is {near}"):
            complete_config({"model_type": kind})
        assert near in keys["model_types"]


@table(
    ("kind", "changes", "message"),
    [
        ("t5", {"scale_decoder_outputs": False}, "scale_decoder_outputs = False"),
        ("t5", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("t5", {"is_gated_act": True}, "is_gated_act = True"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("llama", {"rope_scaling": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        ("llama", {"rope_parameters": {**LLAMA3, "attention_factor": 2.0}}, "attention_factor"),
        ("llama", {"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, "different rope_theta"),
        ("gpt2", {"hidden_size": 32}, "hidden_size 32 and n_embd 16"),
        ("gpt2", {"residual_multiplier": 0.5}, "no rule for residual_multiplier"),
        ("megatron-bert", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ],
)
def test_open_hf_unsupported_setting_is_refused(tmp_path, kind, changes, message):
    save(tmp_path / "hf", kind)
    edit(tmp_path / "hf", **changes)
    with pytest.raises((CorruptError, UnsupportedError), match=message):
        open_checkpoint(tmp_path / "hf", "hf", EIGHT)


def test_hf_model_absent_keys_have_defaults_of_transformers():
    """A Mistral without the key has a window of 4,096 tokens; a Llama 3 without its own has the model's positions."""
    assert hf_model({"model_type": "mistral"}, 8)["sliding_window"] == 4096
    # It covers all positions; Mistral's transformers do not read layer_types.
    assert "sliding_window" not in hf_model({"model_type": "mistral", "max_position_embeddings": 4096}, 8)
    assert hf_model({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, 8)["sliding_window"] == 4096
    model = hf_model({"model_type": "llama", "rope_parameters": LLAMA3, **SIZES}, 8)
    assert model["rotary_scaling"]["original_max_position_embeddings"] == 64
    assert hf_model({"model_type": "mixtral"}, 8)["num_key_value_heads"] == 8
    # Alike for every decoder: transformers takes the number of heads, or a number of its own.
    heads = {"num_attention_heads": 4, "hidden_size": 64}
    for kind in ("llama", "mistral", "qwen2", "gemma", "olmo2", "phi3"):
        stated = importlib.import_module("transformers").CONFIG_MAPPING[kind](**heads).num_key_value_heads
        assert hf_model({"model_type": kind, **heads}, 8)["num_key_value_heads"] == stated, kind


def test_open_hf_blenderbot_with_untied_tables_is_refused(tmp_path):
    """transformers uses four embeddings, of which DynMo's model has one."""
    save(tmp_path / "hf", "blenderbot", tie_word_embeddings=False)
    with pytest.raises(CorruptError, match=r"embed_tokens.weight and model.shared.weight differ"):
        open_checkpoint(tmp_path / "hf", "hf", EIGHT)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done.out + done.err
        return done.err

    return call


def test_convert_compares_the_logits_of_both_sides(run, tmp_path):
    """The logits detect an ignored key that matters; then no output is kept."""
    save(tmp_path / "hf", "t5")
    messages = run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native")
    assert "logits of input and output differ by" in messages
    messages = run("convert", tmp_path / "native", tmp_path / "half", "--to", "hf", "--dtype", "bf16")
    assert "logits of input and output differ by" in messages
    edit(tmp_path / "hf", scale_decoder_outputs=False)
    ignore = ("--ignore-config", "scale_*")
    messages = run("convert", tmp_path / "hf", tmp_path / "wrong", "--to", "native", *ignore, code=5)
    assert "the logits of input and output differ by" in messages
    assert not (tmp_path / "wrong").exists()
    messages = run("convert", tmp_path / "hf", tmp_path / "wrong", "--to", "native", *ignore, "--no-check-logits")
    assert "logits" not in messages


def as_torch_file(directory, more):
    """Store the weights as ``pytorch_model.bin``, with further tensors."""
    from safetensors.torch import load_file

    torch.save(load_file(directory / "model.safetensors") | more, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def test_convert_of_hf_input_with_causal_masks_compares_the_logits(run, tmp_path):
    """As the GPT-2 of 2019; the map leaves the masks out."""
    save(tmp_path / "hf", "gpt2")
    masks = {"attn.bias": torch.ones(1, 1, 64, 64), "attn.masked_bias": torch.tensor(-1e4)}
    as_torch_file(tmp_path / "hf", {f"transformer.h.0.{name}": mask for name, mask in masks.items()})
    messages = run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native")
    assert "logits of input and output differ by" in messages


def test_convert_of_hf_input_with_dropped_tensors_compares_the_logits(run, tmp_path):
    save(tmp_path / "hf", "gpt2")
    as_torch_file(tmp_path / "hf", {"score.weight": torch.ones(2, 16)})
    assert "score.weight" in run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", code=5)
    messages = run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", "--drop", "*score.weight")
    assert "logits of input and output differ by" in messages


@pytest.mark.parametrize("tied", [False, True])
def test_convert_decoder_with_the_head_of_a_task(run, tmp_path, tied):
    """Its head is left out with --drop; without an output layer, the embedding is that."""
    import transformers as tf

    config = tf.LlamaConfig(**SIZES, num_labels=3, tie_word_embeddings=tied, pad_token_id=0)
    made = tf.LlamaForSequenceClassification(config)
    made.save_pretrained(tmp_path / "hf")
    message = run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native", code=5)
    assert "a LlamaForSequenceClassification: DynMo's decoders have no such head; --drop 'score.*'" in message
    drop = ("--drop", "score.*")
    assert "that of the output is the embedding" in run(
        "convert", tmp_path / "hf", tmp_path / "native", "--to", "native", *drop
    )
    run("convert", tmp_path / "native", tmp_path / "back", "--to", "hf")
    back = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config.tie_word_embeddings
    assert all(torch.equal(back.model.state_dict()[name], value) for name, value in made.model.state_dict().items())


def test_hf_logits_output_with_unexpected_tensors_is_refused(tmp_path):
    save(tmp_path / "hf", "gpt2")
    as_torch_file(tmp_path / "hf", {"score.weight": torch.ones(2, 16)})
    model = hf_model(json.loads((tmp_path / "hf" / "config.json").read_text()), 8)
    tokens = fixed_tokens(model)
    assert hf_logits(tmp_path / "hf", model, tokens, is_source=True)
    with pytest.raises(CorruptError, match=r"unexpected_keys: score.weight$"):
        hf_logits(tmp_path / "hf", model, tokens)


def test_logits_error_of_verify_does_not_name_options_of_convert(run, tmp_path):
    save(tmp_path / "hf", "gpt2")
    run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native")
    as_torch_file(tmp_path / "hf", {"score.weight": torch.ones(2, 16)})
    messages = run("verify", tmp_path / "native", "--hf-logits", tmp_path / "hf", code=4)
    assert "unexpected_keys" in messages
    assert "--no-check-logits" not in messages


@pytest.mark.parametrize(
    ("version", "name"),
    [("4.50.3", "torch_dtype"), ("4.55.0", "torch_dtype"), ("4.56.0", "dtype"), ("5.0.0rc1", "dtype")],
)
def test_dtype_argument_of_each_release_has_its_name(version, name):
    assert dtype_argument(version) == name


def test_convert_model_above_budget_skips_logits(run, tmp_path, monkeypatch):
    import dynmo_ckpt.operations.logits as logits

    monkeypatch.setattr(logits, "BUDGET_PARAMETERS", 100)
    save(tmp_path / "hf", "gpt2")
    messages = run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native")
    assert "were not compared" in messages
    assert "parameters are more than 100" in messages
    messages = run("convert", tmp_path / "hf", tmp_path / "again", "--to", "native", "--check-logits")
    assert "differ by" in messages


@pytest.mark.parametrize("kind", KINDS)
def test_convert_keeps_ids_dropouts_and_generation_settings(run, tmp_path, kind):
    """Through native and its shards on other ranks, back to the same documents; also from Hugging Face in one step."""
    save(tmp_path / "hf", kind)
    keys = json.loads((tmp_path / "hf" / "config.json").read_text())
    dropout = next((key for key in keys if "drop" in key), "initializer_range")
    ids = {"bos_token_id": 1, "eos_token_id": [2, 4], "pad_token_id": 0}
    edit(tmp_path / "hf", **ids, **{dropout: 0.25}, auto_map={"AutoModel": "evil--evil.Evil"})
    generation = {**ids, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    run("convert", tmp_path / "hf", tmp_path / "native", "--to", "native")
    run("reshard", tmp_path / "native", tmp_path / "two", "--tp", "2")
    run("convert", tmp_path / "two", tmp_path / "back", "--to", "hf")
    run("convert", tmp_path / "hf", tmp_path / "half", "--to", "hf", "--dtype", "bf16")
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    del before["auto_map"]
    if kind in ("deepseek_v3", "glm4_moe_lite"):  # transformers leaves both out; vLLM reads them
        before |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, dtype in (("back", "float32"), ("half", "bfloat16")):
        after = json.loads((tmp_path / name / "config.json").read_text())
        assert after == {**before, "dtype": dtype}
        assert json.loads((tmp_path / name / "generation_config.json").read_text()) == generation


def test_export_config_of_changed_model_keeps_valid_ids():
    """After a change of sizes the configuration is made from the model; ids and dropouts stay."""
    config = {
        "model_type": "mistral",
        **SIZES,
        "sliding_window": None,
        "eos_token_id": [2, 4],
        "attention_dropout": 0.3,
    }
    model = hf_model(config, 8)
    changed = {**model, "num_layers": 1}
    source = source_of(config, {"temperature": 0.6})
    made = export_config(source, changed, hf_config(changed, "float32", 7))
    assert (made["eos_token_id"], made["attention_dropout"], made["model_type"]) == ([2, 4], 0.3, "llama")
    assert made["num_hidden_layers"] == 1
    assert export_config(source, model, hf_config(model, "float32", 7))["model_type"] == "mistral"
    # A trainer states neither what has its default nor the same padding.
    stated = {key: value for key, value in model.items() if key not in ("normalization", "rotary_base")}
    stated["padded_vocab_size"] = 128
    assert export_config(source, stated, hf_config(stated, "float32", 7))["model_type"] == "mistral"


def test_source_of_unstorable_document_is_refused():
    with pytest.raises(CorruptError, match="JSON"):
        source_of({"temperature": float("inf")}, None)
