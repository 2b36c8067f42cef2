import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.formats.checkpoint.manifest import tensor_entries
from tests.unit.dynmo_train.formats.checkpoint import small_run


def report(name="layers.0.mlp.fc1.weight", **changes):
    base = {
        "name": name,
        "dtype": "F32",
        "shape": [4, 2],
        "role": "parameter",
        "file": "a.safetensors",
        "key": name,
        "index": [[0, 4], [0, 2]],
        "crc32": "00000000",
    }
    return base | changes


def test_tensor_entries_of_two_ranks_are_merged():
    low, high = report(index=[[0, 2], [0, 2]]), report(index=[[2, 4], [0, 2]], file="b.safetensors")
    entry = tensor_entries([[high], [low]])["layers.0.mlp.fc1.weight"]
    assert entry["split_dim"] == 0
    assert [shard["file"] for shard in entry["shards"]] == ["a.safetensors", "b.safetensors"]


def test_tensor_entries_unsplit_are_in_layer_order():
    entries = tensor_entries([[report("layers.10.x"), report("layers.9.x")]])
    assert list(entries) == ["layers.9.x", "layers.10.x"]
    assert entries["layers.9.x"]["split_dim"] is None


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (report(), "reported twice"),
        (report(shape=[4, 3]), "the shape"),
        (report(dtype="BF16"), "the dtype"),
        (report(role="buffer"), "the role"),
    ],
)
def test_tensor_entries_contradicting_reports_are_refused(second, message):
    with pytest.raises(UsageError, match=message):
        tensor_entries([[report()], [second]])


def test_tensor_entries_cut_along_two_dimensions_are_refused():
    pieces = [report(index=[[0, 2], [0, 2]]), report(index=[[2, 4], [0, 1]])]
    with pytest.raises(UsageError, match="at most one"):
        tensor_entries([pieces])


def test_build_manifest_without_a_parameter_is_refused():
    from dynmo_train.formats.checkpoint import build_manifest

    with pytest.raises(UsageError, match=r"missing in the reports of all ranks: layers\.1\.mlp\.fc2\.bias"):
        build_manifest(small_run.facts(1), [], written_by="test", expected=["layers.1.mlp.fc2.bias", "head.weight"])
