"""Quantized weights: equal to what transformers dequantizes, or to what an independent packer packed."""

import json
import tracemalloc

import numpy as np
import pytest

from dynmo_ckpt.converters.huggingface import read_hf
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.dequantize import unpack
from dynmo_ckpt.huggingface.files import read_tensors
from dynmo_ckpt.huggingface.quantized import dequantized_tensors, quantization_of
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.io.reading import Reader, open_sources
from dynmo_ckpt.operations.reference_model import load_array
from dynmo_ckpt.tensors.copy_plan import OutputTensor, sources
from dynmo_ckpt.tensors.tiled_copy import buffer_bytes, panels
from tests.tables import table
from tests.unit.dynmo_ckpt.small_llama import FP8, quantize_fp8, small_llama

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def write(directory, tensors, quantization, **config):
    directory.mkdir(exist_ok=True)
    safetensors.save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return directory


def plain(directory):
    """The dequantized tensors of a directory as float32, by name."""
    config = json.loads((directory / "config.json").read_text())
    found, _ = dequantized_tensors(read_tensors(directory, quantized=True), quantization_of(config))
    return {name: numbers(tensor) for name, tensor in found.items()}


def numbers(tensor, dtype="F32"):
    cast = None if tensor.dtype == dtype else dtype
    output = OutputTensor(key="", shape=tensor.shape, content=tensor, cast=cast)
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).copy() for panel in panels(output, Reader(files))]
    return np.concatenate(parts).view(np.float32).reshape(tensor.shape)


@table("dtype", ["bfloat16", "float16", "float32"])
@table("scale_type", [torch.float32, torch.float8_e8m0fnu, torch.bfloat16])
def test_fp8_blocks_equal_those_of_transformers(tmp_path, dtype, scale_type):
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch.manual_seed(0)
    weight = torch.randn(96, 64).mul(30).to(torch.float8_e4m3fn)
    scale = (torch.rand(6, 8) + 0.01).to(scale_type)
    write(tmp_path / "in", {"a.weight": weight, "a.weight_scale_inv": scale}, FP8, dtype=dtype)
    expected = module.Fp8Dequantize(None)._dequantize_one(weight, scale, getattr(torch, dtype))
    assert np.array_equal(plain(tmp_path / "in")["a.weight"], expected.float().numpy())


def test_fp8_partial_blocks_at_the_edges_have_their_own_scales(tmp_path):
    torch.manual_seed(0)
    weight, scale = torch.randn(300, 203).to(torch.float8_e4m3fn), torch.rand(3, 2)
    # MiniMax-M2 has the type of torch as name of the format.
    config = {**FP8, "weight_block_size": [128, 128], "fmt": "float8_e4m3fn"}
    write(tmp_path / "in", {"a.weight": weight, "a.weight_scale_inv": scale}, config, dtype="float32")
    expected = weight.float()
    for i in range(300):
        for j in range(203):
            expected[i, j] *= scale[i // 128, j // 128]
    assert np.array_equal(plain(tmp_path / "in")["a.weight"], expected.numpy())


def test_fp8_every_code_has_the_number_of_torch(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    tensors = {"a.weight": codes, "a.weight_scale_inv": torch.tensor(1.0)}
    tensors["a.activation_scale"] = torch.tensor(0.5)
    config = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
    found = plain(write(tmp_path / "in", tensors, config, dtype="float32"))
    assert list(found) == ["a.weight"]
    assert np.array_equal(found["a.weight"], codes.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 6, 4, 16), (3, 40, 3, 16)])
def test_mxfp4_blocks_equal_those_of_transformers(tmp_path, shape):
    module = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    scales = torch.randint(110, 140, shape[:3], dtype=torch.uint8)
    tensors = {"m.gate_up_proj_blocks": blocks, "m.gate_up_proj_scales": scales, "m.bias": torch.ones(3)}
    found = plain(write(tmp_path / "in", tensors, {"quant_method": "mxfp4"}, dtype="bfloat16"))
    expected = module.convert_moe_packed_tensors(blocks, scales).float().numpy()
    assert found["m.gate_up_proj"].shape == (shape[0], shape[2] * 32, shape[1])
    assert np.array_equal(found["m.gate_up_proj"], expected)
    assert np.array_equal(found["m.bias"], np.ones(3))


def bitstream(codes, bits):
    """Pack the first dimension of ``codes`` into words as one stream of bits, by the definition, bit by bit."""
    count, columns = codes.shape
    words = np.zeros((count * bits // 32, columns), np.uint32)
    for j in range(count):
        for bit in range(bits):
            at = j * bits + bit
            words[at // 32] |= ((codes[j] >> bit) & 1).astype(np.uint32) << np.uint32(at % 32)
    return words.view(np.int32)


def gptq(bits, version, inputs=64, outputs=96, group=16, order=False, bias=False):
    """The tensors of a module, and its plain weight ``[out, in]``."""
    rng = np.random.default_rng(bits)
    groups = 1 if group == -1 else -(-inputs // group)
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1, 1 << bits, (groups, outputs))
    scales = rng.random((groups, outputs)).astype(np.float16)
    index = np.arange(inputs) // (inputs if group == -1 else group)
    if order:
        rng.shuffle(index)
    weight = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    stored = zeros - 1 if version == "gptq" else zeros
    tensors = {
        "a.qweight": torch.from_numpy(bitstream(codes, bits)),
        "a.qzeros": torch.from_numpy(np.ascontiguousarray(bitstream(stored.T, bits).T)),
        "a.scales": torch.from_numpy(scales),
        "a.g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    if bias:
        tensors["a.bias"] = torch.zeros(outputs)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": False}
    return tensors, {**config, "checkpoint_format": version}, weight.T.astype(np.float16).astype(np.float32)


@table("bits", [2, 3, 4, 8])
@table("version", ["gptq", "gptq_v2"])
@table("order", [False, True])
def test_gptq_weights_equal_what_was_packed(tmp_path, bits, version, order):
    tensors, config, weight = gptq(bits, version, order=order)
    found = plain(write(tmp_path / "in", tensors, config, dtype="float16"))
    assert list(found) == ["a.weight"]
    assert np.array_equal(found["a.weight"], weight)


def test_gptq_three_bits_have_the_layout_of_its_reference_kernel():
    """Three words with 32 codes by the reference's own steps: ten codes, one that is cut, ten, one that is cut, ten."""
    codes = np.random.default_rng(0).integers(0, 8, 32).astype(np.uint32)
    words = [0, 0, 0]
    for j in range(10):
        words[0] |= int(codes[j]) << (3 * j)
    words[0] |= (int(codes[10]) & 3) << 30
    words[1] |= (int(codes[10]) >> 2) & 1
    for j in range(10):
        words[1] |= int(codes[11 + j]) << (3 * j + 1)
    words[1] |= (int(codes[21]) & 1) << 31
    words[2] |= (int(codes[21]) >> 1) & 3
    for j in range(10):
        words[2] |= int(codes[22 + j]) << (3 * j + 2)
    assert unpack(np.array(words, np.uint32)[:, None], 3)[:, 0].tolist() == codes.tolist()


@pytest.mark.parametrize("group", [-1, 24])
def test_gptq_without_index_has_contiguous_groups(tmp_path, group):
    tensors, config, weight = gptq(4, "gptq_v2", group=group)
    del tensors["a.g_idx"]
    found = plain(write(tmp_path / "in", tensors, config, dtype="float16"))
    assert np.array_equal(found["a.weight"], weight)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(("module", "is_transposed"), [("transformer.h.0.attn.c_attn", True), ("lm_head", False)])
def test_matrices_of_gpt2_are_transposed_and_its_head_is_not(tmp_path, method, module, is_transposed):
    tensors, config, weight = gptq(4, "gptq") if method == "gptq" else awq()
    named = {f"{module}{name.removeprefix('a')}": tensor for name, tensor in tensors.items()}
    found = plain(write(tmp_path / "in", named, config, dtype="float16", model_type="gpt2"))
    assert np.array_equal(found[f"{module}.weight"], weight.T if is_transposed else weight)


def test_gptq_chunks_of_a_large_matrix_join_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_ckpt.io.computed.CHUNK_BYTES", 4096)
    tensors, config, weight = gptq(3, "gptq", inputs=96, outputs=416, group=32)
    found = plain(write(tmp_path / "in", tensors, config, dtype="float16"))
    assert np.array_equal(found["a.weight"], weight)


def awq(inputs=64, outputs=48, group=16):
    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(0, 16, (rows, outputs)).astype(np.uint32) for rows in (inputs, inputs // group))
    scales = rng.random((inputs // group, outputs)).astype(np.float16)

    def pack(array):
        # Nibble n of a word has column [0, 2, 4, 6, 1, 3, 5, 7][n].
        words = np.zeros((len(array), outputs // 8), np.uint32)
        for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words |= array[:, column::8] << np.uint32(4 * nibble)
        return torch.from_numpy(words.view(np.int32))

    index = np.arange(inputs) // group
    weight = (codes.astype(np.float32) - zeros[index].astype(np.float32)) * scales[index].astype(np.float32)
    tensors = {"a.qweight": pack(codes), "a.qzeros": pack(zeros), "a.scales": torch.from_numpy(scales)}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return tensors, config, weight.T.astype(np.float16).astype(np.float32)


def test_awq_weights_equal_what_was_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("dynmo_ckpt.io.computed.CHUNK_BYTES", 4096)
    tensors, config, weight = awq()
    found = plain(write(tmp_path / "in", tensors, config, torch_dtype="float16"))
    assert np.array_equal(found["a.weight"], weight)


@table(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({}, "None"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "awq", "bits": 4, "version": "llm-awq"}, "llm-awq"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "bits"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "bitblas"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation"),
    ],
)
def test_another_layout_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedError, match=named):
        quantization_of({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("fp8", "must be an object"),
        ({**FP8, "weight_block_size": [0, 8]}, "weight_block_size"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"}, "must be equal"),
    ],
)
def test_invalid_settings_are_refused(config, named):
    with pytest.raises(CorruptError, match=named):
        quantization_of({"quantization_config": config})


def test_float8_without_scale_is_refused(tmp_path):
    tensors = {"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}
    with pytest.raises(UnsupportedError, match=r"no scale: a\.weight"):
        plain(write(tmp_path / "in", tensors, FP8))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a.scales": torch.ones(3, 96, dtype=torch.float16)}, "contradict"),
        ({"a.qzeros": torch.zeros(4, 11, dtype=torch.int32)}, "contradict"),
        ({"a.g_idx": torch.zeros(63, dtype=torch.int32)}, "contradict"),
        ({"a.g_idx": torch.full((64,), 9, dtype=torch.int32)}, "g_idx"),
        ({"a.g_idx": torch.full((64,), -1, dtype=torch.int32)}, "g_idx"),
        ({"a.qzeros": None}, "lacks"),
        ({"a.weight": torch.ones(2)}, "both plain and quantized"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path, change, named):
    tensors, config, _ = gptq(4, "gptq")
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(CorruptError, match=named):
        plain(write(tmp_path / "in", tensors, config, dtype="float16"))


def test_zero_point_that_programs_read_differently_is_refused(tmp_path):
    tensors, config, _ = gptq(4, "gptq")
    tensors["a.qzeros"] = torch.full_like(tensors["a.qzeros"], -1)
    with pytest.raises(UnsupportedError, match="gptq_v2"):
        plain(write(tmp_path / "in", tensors, config, dtype="float16"))


def test_memory_of_dequantization_is_bounded(tmp_path):
    """A matrix of 64 MiB in float32 is computed within the memory that the plan states."""
    weight = torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn)
    weight[5, 7] = 2.0
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.full((32, 32), 3.0)}
    config = {**FP8, "weight_block_size": [128, 128]}
    directory = write(tmp_path / "in", tensors, config, dtype="float32")
    stored = json.loads((directory / "config.json").read_text())
    tensor = dequantized_tensors(read_tensors(directory, quantized=True), quantization_of(stored))[0]["a.weight"]
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    tracemalloc.start()
    total = 0.0
    with open_sources(sources([output])) as files:
        for panel in panels(output, Reader(files)):
            total += float(panel.view(np.float32).sum())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 6.0
    assert peak < buffer_bytes(output)


def test_open_checkpoint_reads_the_dequantized_values(tmp_path):
    expected = quantize_fp8(small_llama(tmp_path / "in"))
    checkpoint, remarks = open_checkpoint(tmp_path / "in")
    assert remarks
    gate = load_array(checkpoint, "layers.0.mlp.gate.weight")
    assert np.array_equal(gate, expected["model.layers.0.mlp.gate_proj.weight"].numpy())
    assert read_hf(tmp_path / "in", ReadOptions())[0].manifest["source"]["config"].get("quantization_config") is None


def of_group(**weights):
    """The configuration of compressed-tensors with one group of modules."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "block_structure": [32, 16]}
    group = {"targets": ["Linear"], "weights": {**kind, **weights}, "input_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**settings, "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}


# Format, and the shape of the scales of a weight [96, 64]: of the tensor, of rows, of groups, of blocks.
COMPRESSED = [
    *(("float-quantized", shape) for shape in ((1,), (), (96, 1), (96,), (96, 4), (3, 4))),
    *(("int-quantized", shape) for shape in ((1,), (96, 1))),
    *(("pack-quantized", shape) for shape in ((96, 1), (96, 2), (96, 8))),
]


@table(("layout", "shape"), COMPRESSED)
@table("bits", [4, 8])
def test_compressed_weights_are_codes_times_their_scales(tmp_path, layout, shape, bits):
    torch.manual_seed(0)
    scale = torch.rand(shape, dtype=torch.float32) + 0.01
    tensors = {"a.weight_scale": scale, "a.input_scale": torch.tensor(2.0)}
    if layout == "float-quantized":
        codes = torch.randn(96, 64).to(torch.float8_e4m3fn)
        tensors["a.weight"] = codes
    else:
        half = 1 << (bits - 1)
        codes = torch.randint(-half, half, (96, 64), dtype=torch.int8)
        tensors["a.weight"] = codes
    if layout == "pack-quantized":
        tensors["a.weight_packed"] = packed_words(codes, bits)
        tensors["a.weight_shape"] = torch.tensor([96, 64])
        del tensors["a.weight"]
    expected = codes.float()
    grid = scale.reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    high, wide = 96 // grid.shape[0], 64 // grid.shape[1]
    expected = expected * grid.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    found = plain(write(tmp_path / "in", tensors, {**of_group(), "format": layout}, dtype="float32"))
    assert list(found) == ["a.weight"]
    assert np.array_equal(found["a.weight"], expected.numpy())


def packed_words(integers, bits):
    """Integers ``[N, M]`` of ``bits`` bits as words along the second dimension, as compressed-tensors packs them."""
    codes = (integers.to(torch.int64) + (1 << (bits - 1))).reshape(len(integers), -1, 32 // bits)
    words = (codes << (torch.arange(32 // bits) * bits)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


@table("bits", [4, 8])
@table("in_order", [True, False])
def test_zero_points_are_subtracted_and_inputs_have_groups_by_index(tmp_path, bits, in_order):
    """compressed-tensors 0.20.1 decompresses the same numbers (without an index, which older releases write)."""
    torch.manual_seed(0)
    # More rows than are computed at a time.
    half, rows = 1 << (bits - 1), 8264
    codes, zeros = torch.randint(-half, half, (rows, 64)), torch.randint(-half, half, (rows, 4))
    scale, index = torch.rand(rows, 4) + 0.01, torch.arange(64) // 16
    tensors = {"a.weight_scale": scale, "a.weight_packed": packed_words(codes, bits)}
    tensors["a.weight_shape"] = torch.tensor([rows, 64])
    # Zero points are packed along the outputs.
    tensors["a.weight_zero_point"] = packed_words(zeros.T, bits).T
    if not in_order:
        index = index[torch.randperm(64)]
        tensors["a.weight_g_idx"] = index.to(torch.int32)
    config = {**of_group(symmetric=False, type="int", num_bits=bits), "format": "pack-quantized"}
    found = plain(write(tmp_path / "in", tensors, config, dtype="float32"))
    expected = (codes - zeros[:, index]).float() * scale[:, index]
    assert np.array_equal(found["a.weight"], expected.numpy())
    whole = {"a.weight": codes.to(torch.int8), "a.weight_scale": scale, "a.weight_zero_point": zeros.to(torch.int8)}
    found = plain(write(tmp_path / "in", whole, {**config, "format": "int-quantized"}, dtype="float32"))
    assert np.array_equal(
        found["a.weight"], ((codes - zeros.repeat_interleave(16, 1)) * scale.repeat_interleave(16, 1))
    )
    del whole["a.weight_zero_point"]
    with pytest.raises(CorruptError, match="lacks weight_zero_point"):
        plain(write(tmp_path / "in", whole, {**config, "format": "int-quantized"}, dtype="float32"))


@table("layout", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_float4_weights_are_codes_times_the_scales_of_groups(tmp_path, layout):
    torch.manual_seed(0)
    numbers_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(0, 16, (96, 64), dtype=torch.uint8)
    tensors = {"a.weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4)}
    if layout == "nvfp4-pack-quantized":
        stored = (torch.rand(96, 4) * 400).to(torch.float8_e4m3fn)
        tensors |= {"a.weight_scale": stored, "a.weight_global_scale": torch.tensor([700.0])}
        scale = stored.float() / 700.0
    else:
        tensors["a.weight_scale"] = torch.randint(110, 140, (96, 2), dtype=torch.uint8)
        scale = 2.0 ** (tensors["a.weight_scale"].float() - 127)
    found = plain(write(tmp_path / "in", tensors, {**of_group(num_bits=4), "format": layout}, dtype="float32"))
    expected = numbers_of[codes.long()] * scale.repeat_interleave(64 // scale.shape[1], 1)
    assert np.array_equal(found["a.weight"], expected.numpy())
    with pytest.raises(CorruptError, match="do not fit a float4 weight"):
        plain(write(tmp_path / "in", {**tensors, "a.weight_scale": torch.ones(95, 4)}, of_group(), dtype="float32"))


@table(
    ("changes", "message"),
    [
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        (of_group(symmetric=False), "zero points"),
        ({"transform_config": {"x": 1}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_other_compressed_layouts_are_refused(tmp_path, changes, message):
    tensors = {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(4, 1)}
    with pytest.raises(UnsupportedError, match=message):
        plain(write(tmp_path / "in", tensors, {**of_group(), **changes}, dtype="float32"))
