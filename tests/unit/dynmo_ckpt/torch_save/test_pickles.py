"""Pickles are read as data: the same values as pickle gives, nothing executed, and no mutation does harm."""

import argparse
import collections
import os
import pickle
import random
import time
import tracemalloc
import zipfile

import pytest
import torch

from dynmo_ckpt._common.errors import DynmoError
from dynmo_ckpt.io.errors import CorruptError, UnsafePickleError
from dynmo_ckpt.torch_save.pickles import OpaquePickle, TensorRef, load_pickle
from dynmo_ckpt.torch_save.reader import open_torch
from tests.tables import table

VALUES = [
    None,
    True,
    [1, -1, 70000, 2**40, -(2**70), 0.5, float("inf")],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (), "e": (1, 2, 3, 4)},
    "größer",
    "x" * 70000,
    b"bytes" * 100,
    {1, 2, 3},
    frozenset({1, 2}),
    collections.OrderedDict(a=1, b=[2]),
    [[]] * 3,
]


@table("protocol", range(2, 6))
@table("value", VALUES, ids=lambda value: type(value).__name__)
def test_load_pickle_values_equal_pickle(value, protocol):
    assert load_pickle(pickle.dumps(value, protocol), "x") == value


def test_load_pickle_shared_and_recursive_values():
    inner = [1]
    value = {"a": inner, "b": inner}
    value["self"] = value
    found = load_pickle(pickle.dumps(value), "x")
    assert found["a"] is found["b"]
    assert found["self"] is found


def test_load_pickle_namespace_is_opaque():
    found = load_pickle(pickle.dumps(argparse.Namespace(a=1, dtype=torch.float16)), "x")
    assert isinstance(found, OpaquePickle)
    assert found.attributes["a"] == 1


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@table("protocol", [2, 4])
@table(
    ("function", "arguments"),
    [
        (os.system, ("touch {}",)),
        (eval, ("open({!r}, 'w')",)),
        (exec, ("open({!r}, 'w')",)),
        (getattr, (1, "real")),
        (__import__, ("os",)),
    ],
)
def test_load_pickle_executes_nothing(tmp_path, protocol, function, arguments):
    marker = tmp_path / "marker"
    arguments = [a.format(str(marker)) if isinstance(a, str) else a for a in arguments]
    payload = pickle.dumps({"args": Evil(function, *arguments)}, protocol)
    with pytest.raises(UnsafePickleError, match="refers to") as refused:
        load_pickle(payload, "file.pt")
    assert "file.pt" in str(refused.value)
    assert refused.value.exit_code == 3
    assert not marker.exists()


class Member:
    """Pickles as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, *requested):
        self.requested = requested

    def __reduce__(self):
        return getattr, self.requested


@pytest.mark.parametrize("protocol", [2, 4])
def test_load_pickle_enum_member_is_opaque(protocol):
    found = load_pickle(pickle.dumps(Member(torch.nn.Module, "encoder_or_decoder"), protocol), "x")
    assert isinstance(found, OpaquePickle)
    assert (str(found.type), found.arguments) == ("torch.nn.modules.module.Module", ("encoder_or_decoder",))


@pytest.mark.parametrize(
    "requested", [(dict, "fromkeys"), (getattr, "__call__"), ([1], "append"), (torch.nn.Module, 1)]
)
def test_load_pickle_getattr_of_other_object_is_refused(requested):
    with pytest.raises(UnsafePickleError, match="nothing was executed"):
        load_pickle(pickle.dumps(Member(*requested)), "x")


def test_load_pickle_call_of_opaque_package_is_not_executed():
    payload = b"cnumpy\nload\n(S'x'\ntR."
    found = load_pickle(payload, "x")
    assert isinstance(found, OpaquePickle)
    assert str(found.type) == "numpy.load"


@table(
    "payload",
    [
        b"",
        b".",
        b"\x80\x02",
        b"t.",
        b"R.",
        b"h\x05.",
        b"]\x94a.",
        b"(lp0\nc",
        b"u.",
        b"\x80\x02]q\x00(e",
        b"N(ios\nsystem\n.",
    ],
)
def test_load_pickle_broken_is_refused(payload):
    with pytest.raises((CorruptError, UnsafePickleError)):
        load_pickle(payload, "x")


def saved(tmp_path, is_zip=True):
    path = tmp_path / "a.pt"
    base = torch.arange(24.0)
    tree = {"w": base.reshape(4, 6), "t": base.reshape(4, 6).T, "part": base[3:9], "half": torch.ones(3).half()}
    tree |= {"n": torch.nn.Parameter(torch.ones(2, 2)), "empty": torch.zeros(0, 3), "args": argparse.Namespace(a=1)}
    torch.save(tree, path, _use_new_zipfile_serialization=is_zip)
    return path


@pytest.mark.parametrize("is_zip", [True, False])
def test_open_torch_tensor_offsets_equal_torch(tmp_path, is_zip):
    path = saved(tmp_path, is_zip)
    file = open_torch(path)
    payload = path.read_bytes()
    expected = torch.load(path, weights_only=False)
    for name in ("w", "t", "part", "half", "n"):
        tensor = file.tensor(file.tree[name], name)
        view = tensor.pieces[0].view
        stored = bytearray(payload[view.array.offset :][: view.array.num_bytes])
        words = torch.frombuffer(stored, dtype=expected[name].dtype)
        rebuilt = words.as_strided(view.shape, view.strides, view.start)
        assert torch.equal(rebuilt, expected[name].detach())


def test_torch_tensor_beyond_its_storage_is_refused(tmp_path):
    file = open_torch(saved(tmp_path))
    good = file.tree["w"]
    for bad in (
        TensorRef(good.storage, 1, (4, 6), (6, 1)),
        TensorRef(good.storage, 0, (4, 6), (7, 1)),
        TensorRef(good.storage, 0, (4,), (-1,)),
        TensorRef(good.storage, 0, (4, 6), (6,)),
    ):
        with pytest.raises(CorruptError):
            file.tensor(bad, "w")


def test_open_torch_compressed_entry_is_refused(tmp_path):
    source = saved(tmp_path)
    target = tmp_path / "b.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CorruptError, match="compressed"):
        open_torch(target)


@pytest.mark.parametrize("is_zip", [True, False])
def test_open_mutated_file_is_read_or_ends_in_known_error(tmp_path, is_zip):
    payload = saved(tmp_path, is_zip).read_bytes()
    rng = random.Random(0)
    path = tmp_path / "mutated.pt"
    for _ in range(1500):
        mutated = bytearray(payload[: rng.choice([len(payload), rng.randrange(len(payload))])])
        for _ in range(rng.randrange(1, 6)):
            if mutated:
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        path.write_bytes(mutated)
        try:
            file = open_torch(path)
            for name, value in file.tree.items() if isinstance(file.tree, dict) else ():
                if isinstance(value, TensorRef):
                    file.tensor(value, str(name))
        except DynmoError:
            continue


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        (b"(" * 3_000_000, "more than 1,000 open groups"),
        (b"}" * 3_000_000, "values on its stack"),
        (b"}" + b"\x94" * 3_000_000, "entries in its memo"),
        (b")" + b"\x85" * 3_000_000, "tuples nested deeper than the limit"),
        (b"}" + b")" + b"\x85" * 3_000_000 + b"Ns", "tuples nested deeper than the limit"),
    ],
    ids=["marks", "dicts", "memo", "tuples", "keys"],
)
def test_load_pickle_too_much_memory_for_its_size_is_refused(operations, words):
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=words):
            load_pickle(b"\x80\x04" + operations + b".", "hostile")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000_000


WIDE = b"(" + b"N" * 50_000 + b"t\x94"  # a tuple of 50,000, as entry 0 of the memo
LISTED = b"(" + b"N" * 50_000 + b"l\x94"
DAG = b"N\x85" + b"2\x86" * 60  # a tuple of itself twice, and so on: 2^60 elements in 60 levels


@pytest.mark.parametrize(
    ("operations", "outcome"),
    [
        (WIDE + b"h\x00\x850" * 100_000, "read"),
        (LISTED + b"cbuiltins\ntuple\n\x94" + b"h\x01h\x00\x85R0" * 100_000, "refused"),
        (LISTED + b"cbuiltins\nlist\n\x94" + b"h\x01h\x00\x85R0" * 100_000, "refused"),
        (WIDE + b"}" + b"h\x00Ns" * 100_000, "refused"),
        (b"}" + DAG + b"Ns", "refused"),
        (b"(" + DAG + b"\x91", "refused"),
        (b"\x8f(" + DAG + b"\x90", "refused"),
        (b"(" + DAG + b"Nd", "refused"),
    ],
    ids=["members", "tuples of a list", "lists of a list", "keys", "key", "frozenset", "set", "dict"],
)
def test_load_pickle_too_much_work_for_its_size_is_refused(operations, outcome):
    begin = time.process_time()
    if outcome == "read":
        load_pickle(b"\x80\x04" + operations + b".", "hostile")
    else:
        with pytest.raises(CorruptError, match="more values than the limit for its size"):
            load_pickle(b"\x80\x04" + operations + b".", "hostile")
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    "operations",
    [b"c_codecs\nencode\n](NNe\x85R", b"X\x01\x00\x00\x00a]\x93", b"cbuiltins\nlist\n]]aR"],
    ids=["encode", "global", "arguments"],
)
def test_load_pickle_lists_in_place_of_strings_are_refused(operations):
    """The text of lists in lists can be far longer than the pickle."""
    with pytest.raises(CorruptError, match=r"expected a string|must be a tuple"):
        load_pickle(b"\x80\x04" + operations + b".", "hostile")


def test_load_pickle_large_plain_data_is_read():
    tree = {"rows": [{"at": i, "place": (i, (i,))} for i in range(3000)], "empty": [{} for _ in range(3000)]}
    for protocol in (2, 4, 5):
        assert load_pickle(pickle.dumps(tree, protocol), "plain") == tree


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor])
def test_load_pickle_tensor_with_attributes_is_a_tensor(tmp_path, kind):
    tensor = torch.arange(6.0).reshape(2, 3).as_subclass(torch.Tensor)
    tensor = kind(tensor) if kind is torch.nn.Parameter else tensor
    tensor.note = {"of": "DeepSpeed"}
    torch.save({"w": tensor, "step": torch.tensor(7.0)}, tmp_path / "x.pt")
    file = open_torch(tmp_path / "x.pt")
    assert isinstance(file.tree["w"], TensorRef)
    assert file.tree["w"].shape == (2, 3)
    assert file.number(file.tree["step"]) == 7


class Rebuilt:
    """Pickles as a tensor with attributes that is built by another function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return torch._tensor._rebuild_from_type_v2, (self.function, torch.Tensor, self.arguments, {})


def test_load_pickle_tensor_builder_is_not_executed(tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(UnsafePickleError, match="refers to"):
        load_pickle(pickle.dumps(Rebuilt(os.system, f"touch {marker}"), 2), "file.pt")
    assert not marker.exists()


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), "7", None, torch.tensor(True)])
def test_torch_number_of_other_value_is_none(tmp_path, value):
    torch.save({"step": value}, tmp_path / "x.pt")
    file = open_torch(tmp_path / "x.pt")
    assert file.number(file.tree["step"]) is None


@pytest.mark.filterwarnings("error")
def test_load_pickle_invalid_escape_is_refused_where_warnings_are_errors():
    with pytest.raises(CorruptError, match="invalid escape sequence"):
        load_pickle(b"S'\\\x02'\n.", "source")
    assert load_pickle(b"S'\\x02'\n.", "source") == "\x02"
