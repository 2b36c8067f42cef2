"""dynmo-ckpt convert --to gguf: read back by the gguf package, and computed by llama.cpp where that is installed."""

import json

import numpy as np
import pytest

from dynmo_ckpt.converters.gguf_types import llama3_divisors
from dynmo_ckpt.formats.checkpoint import seal
from tests.tables import table

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Not importorskip, by which the module would have no tests where the extra is not installed.
try:
    import gguf
except ImportError:
    gguf = None
pytestmark = pytest.mark.skipif(gguf is None, reason="the gguf package is not installed")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 288, "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
MODELS = {
    "llama": (transformers.LlamaConfig, {**SIZES, "attention_bias": True}),
    "llama-tied": (transformers.LlamaConfig, {**SIZES, "tie_word_embeddings": True, "head_dim": 32}),
    "llama3": (
        transformers.LlamaConfig,
        {**SIZES, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
    ),
    "linear": (
        transformers.LlamaConfig,
        {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": (transformers.MistralConfig, {**SIZES, "sliding_window": None}),
    "mixtral": (transformers.MixtralConfig, {**SIZES, **EXPERTS}),
    "qwen2": (transformers.Qwen2Config, SIZES),
    "qwen3": (transformers.Qwen3Config, {**SIZES, "head_dim": 32}),
    "qwen3moe": (
        transformers.Qwen3MoeConfig,
        {**SIZES, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 96},
    ),
    "gemma": (transformers.GemmaConfig, {**SIZES, "head_dim": 32}),
    "olmo2": (transformers.Olmo2Config, SIZES),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 288, "n_positions": 64},
    ),
}


def save(name, directory, dtype=None):
    """Save a random model with norms and biases that differ from 1 and 0; returns its state dict under file names."""
    kind, settings = MODELS[name]
    config = kind(**settings, **({} if name in ("gpt2",) else {"pad_token_id": 0}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 8)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(directory)
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def permuted(weight, heads):
    """llama.cpp's order of a Llama's rows: of each head, the rows of both halves alternate."""
    rows = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def by_converter_rules(name, stored):
    """The tensors of llama.cpp from those of transformers, by its converter's rules."""
    arch = {"llama-tied": "llama", "llama3": "llama", "linear": "llama", "mistral": "llama", "mixtral": "llama"}.get(
        name, name
    )
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, 2)
    found, experts = {}, {}
    for key, tensor in stored.items():
        value = tensor.float().numpy()
        if ".experts." in key:
            layer, expert, part = key.split(".")[2], int(key.split(".")[5]), key.split(".")[6]
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(part, part.removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = value
            continue
        if arch == "llama" and ".q_proj." in key:
            value = permuted(value, 4)
        if arch == "llama" and ".k_proj." in key:
            value = permuted(value, 2)
        if arch == "gemma" and key.endswith("norm.weight"):
            value = value + 1
        if arch == "gpt2" and value.ndim == 2 and ".h." in key:
            value = value.T
        if not key.endswith((".attn.bias", ".masked_bias")):
            found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = value
    return found | {key: np.stack([each[i] for i in range(4)]) for key, each in experts.items()}


def opened(path):
    reader = gguf.GGUFReader(path)
    tensors = {t.name: (t.tensor_type, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    return reader, {name: (kind, data.reshape(shapes[name])) for name, (kind, data) in tensors.items()}


def key(reader, name):
    return reader.fields[name].contents()


@table("name", MODELS)
def test_tensors_and_keys_equal_those_of_the_model(tmp_path, ckpt, name):
    expected = by_converter_rules(name, save(name, tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, found = opened(tmp_path / "out" / "model.gguf")
    divisors = found.pop("rope_freqs.weight", None)
    assert (divisors is not None) == (name == "llama3")
    assert found.keys() == expected.keys()
    for tensor, (kind, data) in found.items():
        assert kind == gguf.GGMLQuantizationType.F32
        assert np.array_equal(data, expected[tensor]), tensor
    arch = key(reader, "general.architecture")
    assert key(reader, f"{arch}.block_count") == 2
    assert key(reader, f"{arch}.embedding_length") == 64
    assert key(reader, f"{arch}.attention.head_count") == 4
    assert key(reader, "general.file_type") == 0
    if name != "gpt2":
        assert key(reader, f"{arch}.attention.head_count_kv") == MODELS[name][1].get("num_key_value_heads")
        assert key(reader, f"{arch}.rope.dimension_count") == MODELS[name][1].get("head_dim", 16)
    if name == "linear":
        assert key(reader, "llama.rope.scaling.type") == "linear"
        assert key(reader, "llama.rope.scaling.factor") == 2.0


@table("name", ["llama", "mixtral", "gpt2"])
@table("dtype", ["fp16", "bf16", "q8_0"])
def test_matrices_are_rounded_and_vectors_are_not(tmp_path, ckpt, name, dtype):
    expected = by_converter_rules(name, save(name, tmp_path / "in"))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--dtype", dtype)
    reader, found = opened(tmp_path / "out" / "model.gguf")
    kind = {"fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}[dtype]
    number = gguf.GGMLQuantizationType[kind]
    for tensor, (stored, data) in found.items():
        value = expected[tensor]
        if value.ndim < 2 or "ffn_gate_inp" in tensor:
            assert stored == gguf.GGMLQuantizationType.F32
            assert np.array_equal(data, value)
            continue
        assert stored == number
        rounded = gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
        assert np.array_equal(data, rounded.reshape(value.shape)), tensor
    assert key(reader, "general.file_type") == {"F16": 1, "BF16": 32, "Q8_0": 7}[kind]


def test_rows_that_no_block_divides_stay_in_float16(tmp_path, ckpt, monkeypatch):
    monkeypatch.setitem(MODELS, "odd", (transformers.LlamaConfig, {**SIZES, "intermediate_size": 72}))
    save("odd", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--dtype", "q8_0")
    _, found = opened(tmp_path / "out" / "model.gguf")
    assert found["blk.0.ffn_down.weight"][0] == gguf.GGMLQuantizationType.F16
    assert found["blk.0.ffn_up.weight"][0] == gguf.GGMLQuantizationType.Q8_0


def test_bfloat16_weights_keep_their_type(tmp_path, ckpt):
    expected = by_converter_rules("llama", save("llama", tmp_path / "in", torch.bfloat16))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    _, found = opened(tmp_path / "out" / "model.gguf")
    assert found["blk.1.attn_q.weight"][0] == gguf.GGMLQuantizationType.BF16
    assert all(np.array_equal(data, expected[tensor]) for tensor, (_, data) in found.items())


def test_llama3_divisors_equal_the_frequencies_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**LLAMA3, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / llama3_divisors(16, 1e4, rope), scaled.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act|activation"),
    ],
)
def test_a_model_that_llama_cpp_does_not_compute_is_refused(tmp_path, ckpt, monkeypatch, settings, named):
    monkeypatch.setitem(MODELS, "other", (transformers.LlamaConfig, {**SIZES, **settings}))
    save("other", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5)
    assert any(word in result.stderr for word in named.split("|"))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3moe", "gemma", "olmo2"])
def test_llama3_scaling_of_another_decoder_is_refused(tmp_path, ckpt, monkeypatch, name):
    """llama.cpp has its divisors in a Llama alone, and loads no file of another model with them."""
    kind, settings = MODELS[name]
    rope = {**LLAMA3, "original_max_position_embeddings": 32}
    monkeypatch.setitem(MODELS, "other", (kind, {**settings, "rope_parameters": rope}))
    save("other", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5)
    assert "does not compute rotary_scaling of this model" in result.stderr


@pytest.mark.parametrize("name", ["qwen2", "olmo2"])
def test_heads_of_another_width_than_the_model_are_refused(tmp_path, ckpt, monkeypatch, name):
    """llama.cpp expects projections of the hidden size, and does not load the file."""
    kind, settings = MODELS[name]
    monkeypatch.setitem(MODELS, "other", (kind, {**settings, "head_dim": 32}))
    save("other", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5)
    assert "does not compute head_dim of this model" in result.stderr


def test_blocks_of_eight_bits_are_a_type_of_gguf_only(tmp_path, ckpt):
    save("llama", tmp_path / "in")
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "native", "--dtype", "q8_0", code=2)
    assert "--dtype q8_0" in result.stderr


def test_gguf_is_refused_as_an_input_by_name(tmp_path, ckpt):
    save("llama", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    result = ckpt("info", tmp_path / "out", code=2)
    assert "format gguf can only be written" in result.stderr


NAMES = ["llama-bpe", "dbrx", "qwen2", "gpt-4o", "deepseek-v3"]


def byte_level(directory, split=None, **changes):
    """A small byte-level BPE with two added tokens, trained by the tokenizers package."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=split in ("llama-bpe", "gpt-4o")))
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        from dynmo_ckpt.converters.gguf_tokenizer import SPLITS

        same = {"dbrx": "llama-bpe"}.get(split, split)
        patterns = next(patterns for patterns, name in SPLITS.items() if name == same)
        first = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in patterns]
        words = tokenizers.pre_tokenizers.Sequence([*first, words])
    if split == "deepseek-v3":
        tokenizer.normalizer = tokenizers.normalizers.Sequence([])
    tokenizer.pre_tokenizer = words
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, 12345 times; don't!\n\n  Ünïcode 猫"] * 20, trainer)
    tokenizer.add_tokens(["<tool>"])
    document = json.loads(tokenizer.to_str())
    document |= changes
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}", "add_bos_token": False}))
    return tokenizer


@pytest.mark.parametrize("split", [None, *NAMES])
def test_tokenizer_has_every_token_merge_and_type(tmp_path, ckpt, split):
    save("qwen2", tmp_path / "in")
    tokenizer = byte_level(tmp_path / "in", split)
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    assert key(reader, "tokenizer.ggml.model") == "gpt2"
    assert key(reader, "tokenizer.ggml.pre") == (split or "gpt-2")
    tokens, types = key(reader, "tokenizer.ggml.tokens"), key(reader, "tokenizer.ggml.token_type")
    count = tokenizer.get_vocab_size()
    assert len(tokens) == len(types) == 288
    assert tokens[:count] == [tokenizer.id_to_token(number) for number in range(count)]
    assert types[0] == gguf.TokenType.CONTROL
    assert types[count - 1] == gguf.TokenType.USER_DEFINED
    assert set(types[count:]) == {gguf.TokenType.UNUSED}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert key(reader, "tokenizer.ggml.merges") == [" ".join(each) for each in merges]
    assert key(reader, "tokenizer.chat_template") == "{{ x }}"
    assert key(reader, "tokenizer.ggml.add_bos_token") is False
    assert key(reader, "tokenizer.ggml.padding_token_id") == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
    ],
)
def test_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path, ckpt, changes):
    save("qwen2", tmp_path / "in")
    byte_level(tmp_path / "in", **changes)
    result = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=5)
    assert "--tokenizer with an empty directory" in result.stderr
    (tmp_path / "empty").mkdir()
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", "--tokenizer", tmp_path / "empty")


SPECIAL = {"bos_token": "<|end|>", "eos_token": {"content": "<tool>"}, "pad_token": "missing"}


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({}, {"bos_token_id": 7, "eos_token_id": 8}, {"bos": 7, "eos": 8}),
        ({}, {"eos_token_id": [8, 5, 6]}, {"eos": 8, "eot": 5}),
        # As in gguf's own reader of these files, the tokenizer comes first.
        (SPECIAL, {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 3}, {"bos": 0, "pad": 3, "eot": 8}),
        ({"eos_token": None}, {"eos_token_id": 999}, {}),
    ],
)
def test_special_tokens_are_those_that_the_files_name(tmp_path, ckpt, settings, config, expected):
    save("qwen2", tmp_path / "in")
    count = byte_level(tmp_path / "in").get_vocab_size()
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    path = tmp_path / "in" / "config.json"
    plain = {each: value for each, value in json.loads(path.read_text()).items() if not each.endswith("token_id")}
    path.write_text(json.dumps(plain | config))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    expected = {**expected, **({"eos": count - 1} if settings.get("eos_token") else {})}
    names = {"bos": "bos", "eos": "eos", "eot": "eot", "padding": "pad", "unknown": "unk"}
    fields = {short: f"tokenizer.ggml.{name}_token_id" for name, short in names.items()}
    assert {short: key(reader, name) for short, name in fields.items() if name in reader.fields} == expected
    of_package = gguf.SpecialVocab(tmp_path / "in", n_vocab=288).special_token_ids
    assert {name: number for name, number in expected.items() if name in of_package} == of_package


def test_model_that_was_trained_here_has_the_end_token_of_its_tokenizer(tmp_path, ckpt):
    """Without ids llama.cpp takes token 11 of GPT-2's vocabulary."""
    save("qwen2", tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "native", "--to", "native")
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    del manifest["source"]
    (tmp_path / "native" / "manifest.json").write_bytes(seal(manifest))
    (tmp_path / "words").mkdir()
    byte_level(tmp_path / "words")
    document = (tmp_path / "words" / "tokenizer.json").read_text().replace("<|end|>", "<|endoftext|>")
    (tmp_path / "words" / "tokenizer.json").write_text(document)
    (tmp_path / "words" / "tokenizer_config.json").unlink()
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "gguf", "--tokenizer", tmp_path / "words")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    assert key(reader, "tokenizer.ggml.tokens")[0] == "<|endoftext|>"
    assert [key(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")] == [0, 0]


def test_every_chat_template_is_in_the_file(tmp_path, ckpt):
    save("qwen2", tmp_path / "in")
    byte_level(tmp_path / "in")
    listed = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    settings = tmp_path / "in" / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": listed}))
    ckpt("convert", tmp_path / "in", tmp_path / "listed", "--to", "gguf")
    settings.write_text(json.dumps({"add_bos_token": False}))
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ a }}")
    (tmp_path / "in" / "additional_chat_templates").mkdir()
    (tmp_path / "in" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ b }}")
    ckpt("convert", tmp_path / "in", tmp_path / "files", "--to", "gguf")
    for name in ("listed", "files"):
        reader, _ = opened(tmp_path / name / "model.gguf")
        found = [key(reader, f"tokenizer.chat_template{each}") for each in ("", ".tool_use")]
        assert found == ["{{ a }}", "{{ b }}"]
        assert gguf.SpecialVocab(tmp_path / "in").chat_template == listed


def test_added_token_beyond_the_rows_is_left_out(tmp_path, ckpt):
    """The smallest Gemma 3 has a token for images without a row of the embedding."""
    save("qwen2", tmp_path / "in")
    byte_level(tmp_path / "in")
    path = tmp_path / "in" / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"].append({**document["added_tokens"][-1], "id": 288, "content": "<image>"})
    path.write_text(json.dumps(document))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    tokens = key(opened(tmp_path / "out" / "model.gguf")[0], "tokenizer.ggml.tokens")
    assert len(tokens) == 288
    assert "<image>" not in tokens
    ckpt("convert", tmp_path / "in", tmp_path / "again", "--to", "hf")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == path.read_bytes()
    document["model"]["vocab"]["beyond"] = 288
    path.write_text(json.dumps(document))
    assert "has 289 tokens" in ckpt("convert", tmp_path / "in", tmp_path / "o", "--to", "gguf", code=4).stderr
    assert "has the token id 288" in ckpt("convert", tmp_path / "in", tmp_path / "o", "--to", "hf", code=2).stderr


def sentencepiece_model(directory, **settings):
    sentencepiece = pytest.importorskip("sentencepiece")
    (directory / "corpus.txt").write_text("the cat sat on the mat\nmats and cats, 123 times!\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=285,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"model_type": "bpe", "byte_fallback": True, **settings},
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def test_sentencepiece_tokenizer_has_scores_and_types(tmp_path, ckpt):
    save("llama", tmp_path / "in")
    model = sentencepiece_model(tmp_path / "in")
    (tmp_path / "in" / "added_tokens.json").write_text(json.dumps({"<|im_end|>": model.vocab_size()}))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    assert key(reader, "tokenizer.ggml.model") == "llama"
    tokens, types = key(reader, "tokenizer.ggml.tokens"), key(reader, "tokenizer.ggml.token_type")
    count = model.vocab_size()
    assert tokens[:count] == [model.id_to_piece(number) for number in range(count)]
    assert tokens[count] == "<|im_end|>"
    assert types[:4] == [2, 3, 3, 6]
    assert types[count] == gguf.TokenType.CONTROL
    scores = key(reader, "tokenizer.ggml.scores")
    np.testing.assert_allclose(scores[:count], [model.get_score(number) for number in range(count)])
    assert key(reader, "tokenizer.ggml.add_space_prefix") is True


TURNS = ["<start_of_turn>", "<end_of_turn>", "<own>"]


@pytest.mark.parametrize("source", ["tokenizer.json", "tokenizer_config.json", None])
def test_symbols_of_sentencepiece_are_whole_tokens(tmp_path, ckpt, source):
    """A Gemma's turns are pieces of its tokenizer.model; as common pieces, llama.cpp would divide them."""
    save("llama", tmp_path / "in")
    model = sentencepiece_model(tmp_path / "in", user_defined_symbols=TURNS)
    ids = [model.piece_to_id(token) for token in TURNS]
    pairs = zip(ids, TURNS, strict=True)
    added = [{"id": number, "content": token, "special": token != "<own>"} for number, token in pairs]
    added += [{"id": 0, "content": "<unk>", "special": True}, {"id": 400, "content": "<image>", "special": True}]
    if source == "tokenizer.json":
        document = {"model": {"vocab": {}}, "added_tokens": added}
        (tmp_path / "in" / source).write_text(json.dumps(document))
    elif source is not None:
        decoder = {str(each["id"]): each for each in added}
        (tmp_path / "in" / source).write_text(json.dumps({"added_tokens_decoder": decoder}))
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    reader, _ = opened(tmp_path / "out" / "model.gguf")
    tokens, types = key(reader, "tokenizer.ggml.tokens"), key(reader, "tokenizer.ggml.token_type")
    assert [tokens[number] for number in ids] == TURNS
    control = gguf.TokenType.USER_DEFINED if source is None else gguf.TokenType.CONTROL
    assert [types[number] for number in ids] == [control, control, gguf.TokenType.USER_DEFINED]
    assert types[0] == gguf.TokenType.UNKNOWN
    assert "<image>" not in tokens
    library = llama_cpp()
    computed = library.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    text = "<start_of_turn>cats<end_of_turn><own>"
    found = computed.tokenize(text.encode(), add_bos=False, special=True)
    assert [number for number in found if number in ids] == ids
    assert len(found) < 9


def test_an_added_token_with_an_endless_number_is_refused(tmp_path, ckpt):
    save("llama", tmp_path / "in")
    sentencepiece_model(tmp_path / "in", user_defined_symbols=TURNS)
    settings = {"added_tokens_decoder": {"9" * 5000: {"content": "<own>"}}}
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf", code=4).stderr
    assert "a token has an invalid id or text" in messages


def llama_cpp():
    return pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_logits_of_transformers(tmp_path, ckpt, name):
    library = llama_cpp()
    save(name, tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    # A byte-level vocabulary of 256 tokens: tokens are given as numbers.
    ids = np.random.default_rng(0).integers(0, 288, 40).tolist()
    model = library.Llama(str(tmp_path / "out" / "model.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(ids)
    found = np.array(model.scores[: len(ids)])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").eval()
    with torch.no_grad():
        expected = loaded(torch.tensor([ids])).logits[0].numpy()
    # llama.cpp keeps keys and values in float16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * max(1, np.abs(expected).max()))
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9


TEXTS = ["the cat sat", "  the mats, 12345!\n\n cats don't  ", "Ünïcode 猫 <tool> x", "THE CAT'S\tmat"]
TEXTS += ["theCat THEcat ThE's", "#the cats/mats\n/ 1234the猫の猫 12345678", "mat\u0301s ǅ cat\r\n the"]


@pytest.mark.parametrize("split", [None, *NAMES])
def test_llama_cpp_tokenizes_as_the_tokenizer(tmp_path, ckpt, split):
    library = llama_cpp()
    save("qwen2", tmp_path / "in")
    tokenizer = byte_level(tmp_path / "in", split)
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    model = library.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text).ids, text


def test_llama_cpp_tokenizes_as_sentencepiece(tmp_path, ckpt):
    library = llama_cpp()
    save("llama", tmp_path / "in")
    tokenizer = sentencepiece_model(tmp_path / "in")
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "gguf")
    model = library.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    for text in ("the cat sat", "mats and 123 cats!"):
        assert model.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text), text
