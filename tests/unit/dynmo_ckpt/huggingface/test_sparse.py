"""Sparse weights: the bytes of a hand-made case, and what the package compressed-tensors reads and writes."""

import json
import tracemalloc
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from dynmo_ckpt._common.console import Format
from dynmo_ckpt.converters.huggingface import plan_hf
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import SparseFormat, WriteOptions
from dynmo_ckpt.huggingface.files import read_tensors
from dynmo_ckpt.huggingface.quantized import dequantized_tensors, quantization_of
from dynmo_ckpt.huggingface.sparse_export import sparse_tensors, vllm_remark
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.io.reading import Reader, open_sources
from dynmo_ckpt.io.safetensors import StoredArray
from dynmo_ckpt.maps.name_map import MappedTensor
from dynmo_ckpt.operations.reference_model import load_array
from dynmo_ckpt.operations.write import WriteSettings, write_export
from dynmo_ckpt.tensors.computed import arrays_of, constant_tensor
from dynmo_ckpt.tensors.copy_plan import OutputTensor, sources
from dynmo_ckpt.tensors.tiled_copy import panels
from dynmo_ckpt.tensors.views import as_tensor
from tests.tables import table
from tests.unit.dynmo_ckpt import native_checkpoints
from tests.unit.dynmo_ckpt.small_llama import prune, small_llama

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
S24, ANY = SparseFormat.SPARSE_24, SparseFormat.UNSTRUCTURED
NAME = "model.layers.0.mlp.down_proj.weight"
SETTINGS = WriteSettings(jobs=1, verify=True, overwrite=False, plan_only=False, format=Format.TEXT)


def compressor_of(config):
    """The compressor of the package compressed-tensors; its last releases have none of these layouts."""
    reason = "compressed-tensors 0.9 to 0.13 is not installed (an optional peer)"
    pytest.importorskip("compressed_tensors.compressors.sparse_compressors", reason=reason)
    parsed = import_module("compressed_tensors").ModelCompressor.from_compression_config(config)
    assert parsed.quantization_config is None
    # The configuration is complete: the package adds no key.
    assert parsed.sparsity_config.model_dump() == config["sparsity_config"]
    return parsed.sparsity_compressor


def payload(output):
    with open_sources(sources([output])) as files:
        return b"".join(panel.tobytes() for panel in panels(output, Reader(files)))


def mapped(matrix, mask=None, source="layers.0.mlp.fc2.weight", name=NAME):
    content = constant_tensor(name, matrix.reshape(-1)).unflatten(0, matrix.shape)
    item = MappedTensor(name=name, source_name=source, content=content, shape=matrix.shape, mask=mask)
    return item, OutputTensor(key=name, shape=matrix.shape, content=content, mask=mask)


def compressed(matrix, layout, model_type="llama"):
    item, output = mapped(matrix)
    found = sparse_tensors([item], [output], layout, model_type)
    return {part.key.rpartition(".")[2]: (part.dtype, part.shape, payload(part)) for part in found.tensors}, found


def small_matrix():
    matrix = np.zeros((8, 8), np.float32)
    matrix[0, [1, 3, 4, 7]] = [1, 2, 3, 4]
    matrix[1, 2] = -5
    matrix[2, 0] = -0.0
    return matrix


def test_two_of_four_has_these_bytes():
    parts, found = compressed(small_matrix(), S24)
    rows = np.zeros((8, 4), np.float32)
    rows[0] = [1, 2, 3, 4]
    # One number in the group: the first zero is stored before it.
    rows[1, 1] = -5
    # A negative zero is a zero, and the first one of its group.
    rows[2, 0] = -0.0
    # Lowest bit first: columns 1, 3, 4 and 7; then 0, 2, 4 and 5; then the first two of each group.
    bits = bytes([0b10011010, 0b00110101] + [0b00110011] * 6)
    assert parts == {
        "shape": ("I64", (2, 1), np.array([8, 8]).tobytes()),
        "compressed": ("F32", (8, 4), rows.tobytes()),
        "bitmask": ("U8", (8, 1), bits),
    }
    sparsity = found.config["sparsity_config"]
    assert (sparsity["format"], sparsity["sparsity_structure"]) == ("sparse-24-bitmask", "2:4")
    assert sparsity["targets"] == ["model.layers.0.mlp.down_proj"]
    assert sparsity["global_sparsity"] == round(59 / 64, 6)


def test_unstructured_has_these_bytes():
    matrix = np.zeros((3, 40), np.float32)
    matrix[0, :3], matrix[2, 39] = [1, 2, 3], 4
    parts, found = compressed(matrix, ANY)
    bits = bytes([0b00000111, 0, 0, 0, 0] + [0] * 5 + [0, 0, 0, 0, 0b10000000])
    assert parts == {
        "shape": ("I64", (2,), np.array([3, 40]).tobytes()),
        "compressed": ("F32", (4,), np.array([1, 2, 3, 4], np.float32).tobytes()),
        "bitmask": ("U8", (3, 5), bits),
        "row_offsets": ("I64", (3,), np.array([0, 3, 3]).tobytes()),
    }
    assert found.config["sparsity_config"]["sparsity_structure"] == "unstructured"


def random_matrix(rows, columns, layout, dtype=torch.float32):
    """Two of four, some groups with fewer; or a tenth of the elements."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    if layout == S24:
        order = torch.rand(rows, columns // 4, 4, generator=generator).argsort(-1)
        weight = weight * (order < 2).reshape(rows, columns)
        weight[::3, ::5] = 0
    else:
        weight = weight * (torch.rand(rows, columns, generator=generator) < 0.1)
    return weight


@pytest.mark.parametrize("layout", list(SparseFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_package_decompresses_what_is_written(tmp_path, layout, dtype):
    found, config = exported(tmp_path, layout, dtype)
    plain = safetensors.load_file(tmp_path / "in" / "model.safetensors")
    sparsity = config["quantization_config"]["sparsity_config"]
    assert len(sparsity["targets"]) == 14
    compressor = compressor_of(config["quantization_config"])
    decompressed = dict(compressor.decompress(str(tmp_path / "out")))
    assert decompressed.keys() == plain.keys()
    assert all(torch.equal(decompressed[name], plain[name]) for name in plain)
    assert all(decompressed[name].dtype == dtype for name in plain)
    # The package's own parts have the same types and shapes; the zeros that it stores depend on how it sorts.
    for name in sparsity["targets"]:
        parts = compressor.compress_weight(name, plain[f"{name}.weight"])
        assert {key: (part.dtype, part.shape) for key, part in parts.items()} == {
            key: (found[key].dtype, found[key].shape) for key in parts
        }
        if layout == ANY:
            assert all(torch.equal(found[key], part) for key, part in parts.items())


def exported(tmp_path, layout, dtype=torch.float32, **options):
    """Convert a small pruned Llama; its tensors and its configuration."""
    prune(small_llama(tmp_path / "in", dtype=str(dtype).removeprefix("torch.")), layout, dtype)
    checkpoint, _ = open_checkpoint(tmp_path / "in")
    plan = plan_hf(checkpoint, WriteOptions(sparse_format=layout, **options))
    write_export(tmp_path / "in", tmp_path / "out", plan, SETTINGS)
    tensors = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        tensors |= safetensors.load_file(path)
    return tensors, json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("layout", list(SparseFormat))
def test_written_directories_are_read_back(tmp_path, layout):
    exported(tmp_path, layout, max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    before, after = open_checkpoint(tmp_path / "in")[0], open_checkpoint(tmp_path / "out")[0]
    assert set(before.weights()) == set(after.weights())
    for name in before.weights():
        assert np.array_equal(load_array(before, name), load_array(after, name))
    assert "quantization_config" not in after.manifest["source"]["config"]


@pytest.mark.parametrize("layout", list(SparseFormat))
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (40, 1048), (2056, 264)])
def test_what_the_package_compresses_is_read(tmp_path, layout, rows, columns):
    compressor = compressor_of(compressed(small_matrix(), layout)[1].config)
    weight = random_matrix(rows, columns, layout, torch.bfloat16)
    parts = compressor.compress_weight("a", weight)
    assert np.array_equal(plain_weight(tmp_path, parts, layout), weight.float().numpy())


def plain_weight(tmp_path, parts, layout, **config):
    (tmp_path / "sparse").mkdir()
    safetensors.save_file({k: v.contiguous() for k, v in parts.items()}, tmp_path / "sparse" / "model.safetensors")
    settings = {"quant_method": "compressed-tensors", "sparsity_config": {"format": layout, **config}}
    tensors = read_tensors(tmp_path / "sparse", quantized=True)
    found, _ = dequantized_tensors(tensors, quantization_of({"quantization_config": settings}))
    output = OutputTensor(
        key="",
        shape=found["a.weight"].shape,
        content=found["a.weight"],
        cast=None if found["a.weight"].dtype == "F32" else "F32",
    )
    return np.frombuffer(payload(output), np.float32).reshape(output.shape)


def parts_of(layout):
    """A weight of 8 rows and 8 columns without the package."""
    bits = torch.full((8, 1), 0b01010011, dtype=torch.uint8)
    values = torch.arange(1.0, 33.0)
    if layout == S24:
        return {"a.shape": torch.tensor([[8], [8]]), "a.compressed": values.reshape(8, 4), "a.bitmask": bits}
    offsets = torch.arange(0, 32, 4)
    return {"a.shape": torch.tensor([8, 8]), "a.compressed": values, "a.bitmask": bits, "a.row_offsets": offsets}


@pytest.mark.parametrize("layout", list(SparseFormat))
def test_values_are_at_the_set_bits(tmp_path, layout):
    found = plain_weight(tmp_path, parts_of(layout), layout)
    expected = np.zeros((8, 8), np.float32)
    expected[:, [0, 1, 4, 6]] = np.arange(1, 33).reshape(8, 4)
    assert np.array_equal(found, expected)


HOSTILE = {
    "bitmask-rows": ({"a.bitmask": torch.zeros(7, 1, dtype=torch.uint8)}, "contradict"),
    "bitmask-columns": ({"a.bitmask": torch.zeros(8, 2, dtype=torch.uint8)}, "contradict"),
    "bitmask-type": ({"a.bitmask": torch.zeros(8, 1, dtype=torch.int32)}, "contradict"),
    "bits-missing": ({"a.bitmask": torch.full((8, 1), 1, dtype=torch.uint8)}, "two bits|do not match"),
    "bits-added": ({"a.bitmask": torch.full((8, 1), 255, dtype=torch.uint8)}, "two bits|do not match"),
    "shape-negative": ({"a.shape": torch.tensor([-8, -8])}, "contradict"),
    "shape-huge": ({"a.shape": torch.tensor([8, 2**62])}, "contradict"),
    "shape-zero": ({"a.shape": torch.tensor([0, 0])}, "contradict"),
    "shape-dimensions": ({"a.shape": torch.tensor([8, 8, 1])}, "two integers"),
    "shape-type": ({"a.shape": torch.tensor([8.0, 8.0])}, "two integers"),
    "shape-missing": ({"a.shape": None}, "lacks"),
    "compressed-missing": ({"a.compressed": None}, "lacks"),
    "compressed-short": ({"a.compressed": torch.ones(8, 3)}, "contradict"),
    "plain-as-well": ({"a.weight": torch.ones(8, 8)}, "both plain"),
}


@table("layout", list(SparseFormat))
@table("case", HOSTILE)
def test_contradicting_parts_are_refused(tmp_path, layout, case):
    changes, message = HOSTILE[case]
    parts = {name: tensor for name, tensor in {**parts_of(layout), **changes}.items() if tensor is not None}
    with pytest.raises(CorruptError, match=message):
        plain_weight(tmp_path, parts, layout)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 4, 8, 12, 16, 20, 24, 27],
        [1, 5, 9, 13, 17, 21, 25, 29],
        [0, 4, 8, 12, 16, 20, 24, 2**63 - 1],
        [-(2**63), 4, 8, 12, 16, 20, 24, 28],
    ],
)
def test_offsets_that_do_not_match_the_bits_are_refused(tmp_path, offsets):
    parts = {**parts_of(ANY), "a.row_offsets": torch.tensor(offsets)}
    with pytest.raises(CorruptError, match="do not match"):
        plain_weight(tmp_path, parts, ANY)


def test_a_number_too_many_is_refused(tmp_path):
    with pytest.raises(CorruptError, match="do not match"):
        plain_weight(tmp_path, {**parts_of(ANY), "a.compressed": torch.ones(33)}, ANY)


def test_bits_beyond_the_columns_are_refused(tmp_path):
    parts = {**parts_of(ANY), "a.shape": torch.tensor([8, 6])}
    with pytest.raises(CorruptError, match="beyond its 6 columns"):
        plain_weight(tmp_path, parts, ANY)


def test_quantized_sparse_values_are_refused(tmp_path):
    values = parts_of(S24)["a.compressed"].to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="F8_E4M3"):
        plain_weight(tmp_path, {**parts_of(S24), "a.compressed": values}, S24)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"config_groups": {"group_0": {}}}, UnsupportedError, "format None"),
        ({"format": "marlin-24"}, UnsupportedError, "format"),
        ({"sparsity_config": None}, UnsupportedError, "without config_groups"),
        ({"sparsity_config": []}, CorruptError, "must be an object"),
        ({"sparsity_config": {"format": "csr"}}, UnsupportedError, "sparse-24-bitmask"),
        ({"sparsity_config": {"format": "dense", "order": 1}}, UnsupportedError, "no rule for order"),
        ({"packing": {}}, UnsupportedError, "no rule for packing"),
    ],
)
def test_other_configurations_are_refused(config, error, message):
    settings = {"quant_method": "compressed-tensors", "sparsity_config": {"format": ANY}, **config}
    with pytest.raises(error, match=message):
        quantization_of({"quantization_config": settings})


def test_a_third_number_of_a_group_is_refused_by_name():
    matrix = small_matrix()
    matrix[7, 4:7] = 1
    with pytest.raises(UnsupportedError, match=r"down_proj.weight; use sparse-bitmask"):
        compressed(matrix, S24)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_sizes_that_vllm_cannot_divide_are_refused(shape):
    with pytest.raises(UnsupportedError, match="does not divide"):
        compressed(np.zeros(shape, np.float32), S24)


@pytest.mark.parametrize("layout", list(SparseFormat))
def test_a_dense_model_is_refused(layout):
    with pytest.raises(UnsupportedError, match="no linear weight"):
        compressed(np.ones((8, 8), np.float32), layout)


def test_transposed_weights_are_refused_in_two_of_four():
    with pytest.raises(UnsupportedError, match=r"\[inputs, outputs\]"):
        compressed(small_matrix(), S24, "gpt2")
    assert compressed(small_matrix(), ANY, "gpt2")[1].compressed == 1


def test_layers_that_vllm_fuses_are_compressed_together():
    base = "model.layers.0.self_attn"
    qkv = "layers.0.attention.qkv.weight"
    pruned, dense = small_matrix(), np.ones((8, 8), np.float32)
    items = [
        mapped(matrix, source=qkv, name=f"{base}.{name}_proj.weight")
        for name, matrix in (("q", pruned), ("k", dense), ("v", pruned))
    ]
    items.append(mapped(pruned, source="layers.0.attention.dense.weight", name=f"{base}.o_proj.weight"))
    found = sparse_tensors(*zip(*items, strict=True), S24, "llama")
    assert (found.compressed, found.dense) == (1, 3)
    assert found.config["sparsity_config"]["targets"] == [f"{base}.o_proj"]
    keys = [part.key for part in found.tensors]
    assert keys[:4] == [
        f"{base}.q_proj.weight",
        f"{base}.k_proj.weight",
        f"{base}.v_proj.weight",
        f"{base}.o_proj.shape",
    ]


@pytest.mark.parametrize("source", ["embedding.word.weight", "head.weight", "layers.0.mlp.router.weight"])
def test_embeddings_heads_and_routers_stay_dense(source):
    item, output = mapped(small_matrix(), source=source)
    with pytest.raises(UnsupportedError, match="no linear weight"):
        sparse_tensors([item], [output], S24, "llama")


def test_masked_elements_are_not_stored(tmp_path):
    path = tmp_path / "mask"
    mask = np.tile(np.array([1, 0, 0, 1], np.uint8), (8, 2))
    path.write_bytes(mask.tobytes())
    stored = StoredArray(path=path, key="mask", dtype="BOOL", shape=(8, 8), offset=0)
    item, output = mapped(np.arange(1, 65, dtype=np.float32).reshape(8, 8), as_tensor(stored))
    found = {
        part.key.rpartition(".")[2]: payload(part) for part in sparse_tensors([item], [output], S24, "llama").tensors
    }
    assert found["bitmask"] == bytes([0b10011001] * 8)
    assert np.array_equal(
        np.frombuffer(found["compressed"], np.float32), np.arange(1, 65).reshape(8, 8)[mask.view(bool)]
    )


@pytest.mark.parametrize("layout", list(SparseFormat))
def test_memory_is_bounded(tmp_path, layout):
    weight = random_matrix(16_384, 1024, layout).numpy()
    path = Path(tmp_path / "weight")
    path.write_bytes(weight.tobytes())
    content = as_tensor(StoredArray(path=path, key="w", dtype="F32", shape=weight.shape, offset=0))
    item = MappedTensor(name=NAME, source_name="layers.0.mlp.fc2.weight", content=content, shape=weight.shape)
    output = OutputTensor(key=NAME, shape=weight.shape, content=content)
    tracemalloc.start()
    found = sparse_tensors([item], [output], layout, "llama")
    sizes = {}
    for part in found.tensors:
        with open_sources(sources([part])) as files:
            sizes[part.key] = sum(panel.nbytes for panel in panels(part, Reader(files)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The weight has 64 MiB.
    assert peak < 32 << 20
    assert sizes == {part.key: part.num_bytes for part in found.tensors}


def native_gpt(directory):
    """A native GPT on two tensor-parallel ranks whose masks prune nine tenths; its weights with zeros."""
    model = native_checkpoints.model()
    parameters = native_checkpoints.parameters(model)
    masks = native_checkpoints.masks(parameters, sparsity=0.9)
    native_checkpoints.save(directory, {**parameters, **masks}, model, tp=2)
    return {name: value * masks.get(f"{name}.mask", True) for name, value in parameters.items()}


def test_masks_of_a_native_checkpoint_become_a_sparse_layout(tmp_path):
    expected = native_gpt(tmp_path / "in")
    checkpoint, _ = open_checkpoint(tmp_path / "in")
    plan = plan_hf(checkpoint, WriteOptions(sparse_format=ANY))
    assert (plan.decisions["sparse_weights"], plan.decisions["dense_linear_weights"]) == (12, 0)
    assert plan.decisions["vllm"].startswith("does not read sparse-bitmask")
    write_export(tmp_path / "in", tmp_path / "out", plan, SETTINGS)
    found, _ = open_checkpoint(tmp_path / "out")
    for name in found.weights():
        weight = load_array(found, name)
        assert np.array_equal(weight, expected[name][: len(weight)])


@pytest.mark.parametrize("part", ["fc1.weight", "fc1.weight.mask"])
def test_altered_source_of_a_sparse_weight_is_refused(tmp_path, part):
    native_gpt(tmp_path / "in")
    checkpoint, _ = open_checkpoint(tmp_path / "in")
    array = arrays_of(checkpoint.tensors[f"layers.1.mlp.{part}"])[1]
    whole = bytearray(array.path.read_bytes())
    whole[array.offset] ^= 1
    array.path.write_bytes(whole)
    # The zeros are counted after the change, so that only the checksum can show it.
    plan = plan_hf(checkpoint, WriteOptions(sparse_format=ANY))
    with pytest.raises(CorruptError, match="the bytes were altered"):
        write_export(tmp_path / "in", tmp_path / "out", plan, SETTINGS)
    assert not (tmp_path / "out").exists()


def test_zeros_that_change_after_the_plan_are_refused(tmp_path):
    prune(small_llama(tmp_path / "in"), ANY)
    checkpoint, _ = open_checkpoint(tmp_path / "in")
    plan = plan_hf(checkpoint, WriteOptions(sparse_format=ANY))
    (array,) = arrays_of(checkpoint.tensors["layers.1.mlp.fc2.weight"])
    whole = bytearray(array.path.read_bytes())
    whole[array.offset : array.offset + 64] = np.ones(16, np.float32).tobytes()
    array.path.write_bytes(whole)
    with pytest.raises(CorruptError, match="changed while it was converted"):
        write_export(tmp_path / "in", tmp_path / "out", plan, SETTINGS)


def test_report_names_what_vllm_reads():
    assert vllm_remark(S24, {}).startswith("reads it")
    assert "experts" in vllm_remark(S24, {"num_experts": 4})
    assert "sparse-bitmask" in vllm_remark(ANY, {})
