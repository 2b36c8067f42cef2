import pickle

import pytest

from dynmo_ckpt.torch_save.pickles import GlobalName, load_pickle
from dynmo_ckpt.torch_save.writer import NewObject, dump_pickle
from tests.tables import table

NUMBERS = [0, -1, 255, 256, -129, 2**31, -(2**40), 0.1]
VALUES = [None, True, False, *NUMBERS, "größer", [1, [2]], (1, "a"), {"a": {"b": (1.5,)}}, (), [], {}]


@table("value", VALUES, ids=repr)
def test_dump_pickle_is_read_by_pickle(value):
    payload = dump_pickle(value)
    assert pickle.loads(payload) == value  # noqa: S301 - our own bytes
    assert load_pickle(payload, "x") == value


def test_dump_pickle_namespace_is_unpickled():
    value = NewObject(GlobalName("argparse", "Namespace"), {"a": 1})
    assert vars(pickle.loads(dump_pickle(value))) == {"a": 1}  # noqa: S301 - our own bytes


def test_dump_pickle_other_object_raises_type_error():
    with pytest.raises(TypeError, match="complex"):
        dump_pickle(1j)
