"""LoRA and DoRA adapters: merged weights equal those of peft's merge_and_unload."""

import json

import numpy as np
import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.adapters import merge_adapters, read_adapter
from dynmo_ckpt.huggingface.files import read_config, read_tensors
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from tests.tables import table
from tests.unit.dynmo_ckpt.huggingface.test_quantized import numbers
from tests.unit.dynmo_ckpt.small_llama import quantize_fp8, save_adapter, small_llama

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

# peft calls a deprecated property of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft():
    return pytest.importorskip("peft", reason="peft is not installed")


def gpt2(directory, **settings):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    config = transformers.GPT2Config(**{**sizes, **settings})
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def trained(directory, target, seed=0, dtype=None, **settings):
    """Save an adapter with random weights at ``target``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft().get_peft_model(model, peft().LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 4)
    if dtype is not None:
        adapted.to(dtype)
    adapted.save_pretrained(target)
    return target


def expected(directory, *adapters):
    """The state dict of the base with adapters merged by peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft().PeftModel.from_pretrained(model, adapters[0], adapter_name="0")
    for number, adapter in enumerate(adapters[1:], 1):
        adapted.load_adapter(adapter, adapter_name=str(number))
    names = [str(number) for number in range(len(adapters))]
    return adapted.merge_and_unload(adapter_names=names).state_dict()


def merged(directory, *adapters):
    config = read_config(directory)
    tied = config["tie_word_embeddings"] if "tie_word_embeddings" in config else config["model_type"] == "gpt2"
    found, _ = merge_adapters(
        read_tensors(directory),
        [read_adapter(adapter) for adapter in adapters],
        transposed=config["model_type"] == "gpt2",
        tied=tied,
    )
    return {name: numbers(tensor) for name, tensor in found.items()}


def assert_equal(found, merged_by_peft, atol=1e-6):
    changed = {name: value for name, value in merged_by_peft.items() if name in found}
    assert len(changed) == len(found)
    for name, value in changed.items():
        np.testing.assert_allclose(found[name], value.float().numpy(), rtol=0, atol=atol, err_msg=name)


@table(
    "settings",
    [
        {"target_modules": LINEARS, "r": 4, "lora_alpha": 7},
        {"target_modules": LINEARS, "r": 4, "lora_alpha": 7, "use_rslora": True},
        {"target_modules": LINEARS, "r": 4, "use_dora": True, "lora_alpha": 7},
        {"target_modules": [*LINEARS, "lm_head"], "r": 2},
        {"target_modules": ["embed_tokens", "q_proj"], "r": 2, "lora_alpha": 5},
        {"target_modules": ["embed_tokens", "lm_head"], "r": 2, "lora_alpha": 5, "use_dora": True},
        {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        {"target_modules": ["q_proj", "o_proj"], "r": 2, "bias": "all"},
        {"target_modules": ["q_proj", "o_proj"], "r": 2, "bias": "lora_only"},
        {"target_modules": ["q_proj", "o_proj"], "r": 2, "lora_bias": True, "lora_alpha": 3},
        {"target_modules": ["q_proj"], "r": 2, "trainable_token_indices": {"embed_tokens": [3, 5, 60]}},
        {"target_modules": ["q_proj"], "r": 2, "trainable_token_indices": [1, 63]},
        {
            "target_modules": LINEARS,
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*_proj": 6},
            "alpha_pattern": {"model.layers.0.self_attn.k_proj": 3, "(up|down)_proj": 20},
        },
    ],
)
def test_merged_llama_equals_that_of_peft(tmp_path, settings):
    base = small_llama(tmp_path / "base", attention_bias=True)
    adapter = trained(base, tmp_path / "adapter", **settings)
    found = merged(base, adapter)
    assert_equal(found, expected(base, adapter))
    plain = safetensors.load_file(base / "model.safetensors")
    assert any(not np.array_equal(found[name], plain[name].numpy()) for name in found)


def small_experts(directory, kind):
    """A model whose experts are one matrix each in the file, or all in one tensor (GPT-OSS)."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "pad_token_id": None,
    }
    own = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **own, intermediate_size=16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "GptOss"])
@pytest.mark.parametrize("is_swapped", [True, False])
def test_parameters_of_all_experts_are_merged_by_the_definition(tmp_path, kind, is_swapped):
    """As peft's merge_and_unload with 0.21.2; before, ``in`` was the first dimension of a parameter."""
    model = small_experts(tmp_path / "base", kind)
    experts, rank, scale = model.model.layers[0].mlp.experts, 3, 8 / 3
    numbers_of = torch.Generator().manual_seed(1)
    tensors, is_stacked = {}, kind == "GptOss"
    for name, prefix in (("gate_up_proj", "base_layer."), ("down_proj", "")):
        weight = getattr(experts, name)
        last_is_in = is_swapped and not is_stacked
        rows, columns = weight.shape[1:] if last_is_in else weight.shape[:0:-1]
        a = torch.randn(4 * rank, columns, generator=numbers_of)
        b = torch.randn(rows, rank * 4, generator=numbers_of)
        product = torch.einsum("ore,eri->eoi", b.view(rows, rank, 4), a.view(4, rank, columns)) * scale
        with torch.no_grad():
            weight += product if last_is_in else product.transpose(1, 2)
        tensors |= {
            f"base_model.model.model.layers.0.mlp.experts.{prefix}lora_{each}.weight": value
            for each, value in (("A", a), ("B", b))
        }
    target = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = save_adapter(tmp_path, tensors, r=rank, lora_alpha=8, target_parameters=target)
    model.save_pretrained(tmp_path / "merged")
    found = merged(tmp_path / "base", adapter)
    for name, value in safetensors.load_file(tmp_path / "merged" / "model.safetensors").items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-5, err_msg=name)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    with pytest.raises(CorruptError, match="must have the rank 2 for each expert"):
        merged(tmp_path / "base", adapter)


@pytest.mark.parametrize("dora", [False, True])
def test_merged_gpt2_equals_that_of_peft(tmp_path, dora):
    base = gpt2(tmp_path / "base")
    modules = ["c_attn", "c_proj", "c_fc"]
    adapter = trained(base, tmp_path / "adapter", target_modules=modules, r=2, fan_in_fan_out=True, use_dora=dora)
    assert_equal(merged(base, adapter), expected(base, adapter))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("vocabulary", [32, 64])
def test_merged_head_of_gpt2_is_not_transposed(tmp_path, vocabulary, dora):
    """The head is a Linear among Conv1D; of 32 rows and columns, both directions fit."""
    base = gpt2(tmp_path / "base", tie_word_embeddings=False, vocab_size=vocabulary)
    settings = {"target_modules": ["c_attn", "lm_head"], "r": 4, "use_dora": dora, "fan_in_fan_out": True}
    adapter = trained(base, tmp_path / "adapter", **settings)
    assert_equal(merged(base, adapter), expected(base, adapter), atol=2e-6)


def test_two_adapters_are_added(tmp_path):
    base = small_llama(tmp_path / "base")
    pair = [trained(base, tmp_path / str(n), seed=n, target_modules=["q_proj", "up_proj"], r=2 + n) for n in (1, 2)]
    assert_equal(merged(base, *pair), expected(base, *pair))


def test_two_adapters_of_one_module_are_refused_where_one_is_dora(tmp_path):
    base = small_llama(tmp_path / "base")
    one = trained(base, tmp_path / "one", target_modules=["q_proj"], r=2)
    two = trained(base, tmp_path / "two", target_modules=["q_proj"], r=2, use_dora=True)
    with pytest.raises(UnsupportedError, match="changed by two adapters"):
        merged(base, one, two)


def test_adapter_in_bfloat16_is_merged_into_a_bfloat16_base(tmp_path):
    base = small_llama(tmp_path / "base", dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    adapter = trained(base, tmp_path / "adapter", target_modules=LINEARS, r=4, dtype=torch.bfloat16)
    found, merged_by_peft = merged(base, adapter), expected(base, adapter)
    # peft rounds the product before the sum; here the sum is rounded once: at most one unit in the last place apart.
    for name, value in merged_by_peft.items():
        if name in found:
            np.testing.assert_allclose(found[name], value.float().numpy(), rtol=2**-7, atol=2**-9, err_msg=name)


def test_adapter_is_merged_into_dequantized_weights(tmp_path):
    plain, base = small_llama(tmp_path / "plain"), small_llama(tmp_path / "base")
    values = quantize_fp8(base)
    stored = {name: value.float() for name, value in values.items() if not name.endswith("_scale_inv")}
    safetensors.save_file(stored, plain / "model.safetensors", {"format": "pt"})
    adapter = trained(plain, tmp_path / "adapter", target_modules=LINEARS, r=4)
    merged_by_peft = expected(plain, adapter)
    checkpoint, remarks = open_checkpoint(base, options=ReadOptions(adapters=(adapter,)))
    assert any("14 tensors are merged" in remark for remark in remarks)
    found = numbers(checkpoint.tensors["layers.1.mlp.fc2.weight"])
    np.testing.assert_allclose(found, merged_by_peft["model.layers.1.mlp.down_proj.weight"].numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_change_of_a_tied_embedding_is_refused(tmp_path, settings):
    base = small_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = trained(base, tmp_path / "adapter", r=2, **settings)
    with pytest.raises(UnsupportedError, match=r"whose head is its embedding|has no tensor lm_head"):
        merged(base, adapter)


def test_rows_of_tied_embeddings_equal_those_of_peft(tmp_path):
    base = small_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = trained(base, tmp_path / "a", r=2, target_modules=["q_proj"], trainable_token_indices=[2, 9])
    merged_by_peft = expected(base, adapter)
    assert_equal(merged(base, adapter), merged_by_peft)
    assert torch.equal(merged_by_peft["lm_head.weight"], merged_by_peft["model.embed_tokens.weight"])


def test_pickled_adapter_equals_the_safetensors_one(tmp_path):
    base, adapter = small_llama(tmp_path / "base"), save_adapter(tmp_path)
    merged_by_peft = merged(base, adapter)
    stored = safetensors.load_file(adapter / "adapter_model.safetensors")
    torch.save(stored, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    found = merged(base, adapter)
    assert all(np.array_equal(found[name], merged_by_peft[name]) for name in merged_by_peft)


@table(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("use_qalora", True),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("arrow_config", {"top_k": 1}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"n": 1}),
        ("use_bdlora", {"n": 1}),
        ("velora_config", {"n": 1}),
        ("megatron_config", {"n": 1}),
        *(
            ("init_lora_weights", name)
            for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "x")
        ),
        ("new_setting", None),
        ("rank_pattern", {"(a+)+x": 2}),
        ("rank_pattern", {"a" * 300: 2}),
    ],
)
def test_setting_that_is_not_merged_is_refused_by_name(tmp_path, setting, value):
    with pytest.raises(UnsupportedError, match=setting):
        read_adapter(save_adapter(tmp_path, **{setting: value}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", True),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": -1}),
        ("alpha_pattern", {"(q_proj": 2}),
    ],
)
def test_invalid_setting_is_refused(tmp_path, setting, value):
    with pytest.raises(CorruptError, match=setting):
        read_adapter(save_adapter(tmp_path, **{setting: value}))


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({f"{MODULE}.lora_A.weight": torch.ones(2, 64)}, "pairs"),
        ({f"{MODULE}.lora_magnitude_vector": torch.ones(64)}, "pairs"),
        ({f"{MODULE}.lora_A.weight": torch.ones(2, 32), f"{MODULE}.lora_B.weight": torch.ones(64, 2)}, "does not fit"),
        ({f"{MODULE}.lora_A.weight": torch.ones(3, 64), f"{MODULE}.lora_B.weight": torch.ones(64, 3)}, "ranks"),
        ({f"{MODULE}.lora_A.weight": torch.ones(2, 64), f"{MODULE}.lora_B.weight": torch.ones(64, 4)}, "ranks"),
        ({f"{MODULE}.weight": torch.ones(2, 64)}, "does not fit"),
        ({f"{MODULE}.weight": torch.ones(64, 64, dtype=torch.int32)}, "I32"),
        ({"base_model.model.model.embed_tokens.trainable_tokens_delta": torch.ones(1, 64)}, "trainable_token_indices"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors, named):
    base = small_llama(tmp_path / "base")
    with pytest.raises(CorruptError, match=named):
        merged(base, save_adapter(tmp_path, tensors))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapter_of_a_changed_base_would_be_merged_wrongly(tmp_path, start):
    """peft takes the first product out of the base again; without that, the sum is another model."""
    base = small_llama(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], r=2, init_lora_weights=start)
    with pytest.raises(UnsupportedError, match=f"init_lora_weights = '{start}'"):
        merged(base, adapter)
    by_peft = expected(base, adapter)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": True}))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(merged(base, adapter)[name] - by_peft[name].numpy()).max() > 0.01


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_start_that_leaves_the_base_is_merged_as_by_peft(tmp_path, start):
    base = small_llama(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], r=2, init_lora_weights=start)
    assert_equal(merged(base, adapter), expected(base, adapter))


@pytest.mark.parametrize(("dora", "stated"), [(True, False), (False, True)])
def test_magnitudes_that_contradict_the_configuration_are_refused(tmp_path, dora, stated):
    base = small_llama(tmp_path / "base")
    tensors = {f"{MODULE}.lora_A.weight": torch.ones(2, 64), f"{MODULE}.lora_B.weight": torch.ones(64, 2)}
    parts = {f"{MODULE}.lora_magnitude_vector": torch.ones(64)} if dora else {}
    with pytest.raises(CorruptError, match=f"lora_magnitude_vector; .* use_dora = {stated}"):
        merged(base, save_adapter(tmp_path, tensors | parts, use_dora=stated))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("base_model.model.model.layers.9.self_attn.q_proj.weight", "no tensor"),
        ("model.layers.0.self_attn.q_proj.weight", "must begin with"),
        (f"{MODULE}.lora_C.weight", "no rule"),
        (f"{MODULE}.lora_A.default.weight", "no rule"),
    ],
)
def test_tensor_of_no_module_is_refused_by_name(tmp_path, name, named):
    base = small_llama(tmp_path / "base")
    with pytest.raises(UnsupportedError, match=named):
        merged(base, save_adapter(tmp_path, {name: torch.ones(64, 64)}))


def test_adapter_applies_to_hugging_face_directories_only(tmp_path):
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="--adapter"):
        open_checkpoint(tmp_path / "native", options=ReadOptions(adapters=(tmp_path,)))


def test_head_of_gpt2_is_merged_without_peft(tmp_path):
    base = gpt2(tmp_path / "base", tie_word_embeddings=False, vocab_size=32)
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    tensors = {"base_model.model.lm_head.lora_A.weight": down, "base_model.model.lm_head.lora_B.weight": up}
    expected_head = safetensors.load_file(base / "model.safetensors")["lm_head.weight"] + 2 * up @ down
    found = merged(base, save_adapter(tmp_path, tensors))["lm_head.weight"]
    np.testing.assert_allclose(found, expected_head.numpy(), rtol=0, atol=4e-6)


def test_tied_embedding_is_refused_without_peft(tmp_path):
    base = small_llama(tmp_path / "base", tie_word_embeddings=True)
    module = "base_model.model.model.embed_tokens"
    tensors = {f"{module}.lora_embedding_A": torch.ones(2, 64), f"{module}.lora_embedding_B": torch.ones(64, 2)}
    with pytest.raises(UnsupportedError, match="whose head is its embedding"):
        merged(base, save_adapter(tmp_path, tensors))


@table(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"proj": 10}}, 2.0),
        ({"alpha_pattern": {"q_proj": 10, "layers.0.*": 6}}, 5.0),
        ({"r": 7, "rank_pattern": {r".*attn\.q_proj": 2}}, 2.0),
    ],
)
@table("dora", [False, True])
def test_merged_matrix_is_that_of_the_formula(tmp_path, config, scale, dora):
    base = small_llama(tmp_path / "base")
    torch.manual_seed(1)
    down, up, magnitude = torch.randn(2, 64), torch.randn(64, 2), torch.rand(64)
    tensors = {f"{MODULE}.lora_A.weight": down, f"{MODULE}.lora_B.weight": up}
    parts = {f"{MODULE}.lora_magnitude_vector": magnitude} if dora else {}
    adapter = save_adapter(tmp_path, tensors | parts, **config, use_dora=dora)
    name = "model.layers.0.self_attn.q_proj.weight"
    merged_by_peft = safetensors.load_file(base / "model.safetensors")[name].double() + scale * (
        up.double() @ down.double()
    )
    if dora:
        merged_by_peft = magnitude[:, None] * merged_by_peft / merged_by_peft.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(merged(base, adapter)[name], merged_by_peft.float().numpy(), rtol=0, atol=4e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_an_adapter_adds_become_rows_of_the_model(tmp_path, tied):
    """peft saves all rows of an extended vocabulary, of the embedding and of the head."""
    base = small_llama(tmp_path / "base", tie_word_embeddings=tied)
    stored = safetensors.load_file(base / "model.safetensors")
    word = torch.cat([stored["model.embed_tokens.weight"], torch.ones(3, stored["model.embed_tokens.weight"].shape[1])])
    tensors = {f"base_model.model.{name}": word.clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    adapter = save_adapter(tmp_path, tensors)
    checkpoint, _ = open_checkpoint(base, options=ReadOptions(adapters=(adapter,), make_vocab_size_divisible_by=8))
    assert checkpoint.manifest["model"]["vocab_size"] == len(word)
    assert checkpoint.manifest["source"]["config"]["vocab_size"] == len(word)
    assert ("head.weight" in checkpoint.manifest["ties"]) == tied
    assert np.array_equal(numbers(checkpoint.tensors["embedding.word.weight"]), word.numpy())
