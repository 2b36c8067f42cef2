"""Reads pickles as data: a stack machine for plain values and torch's tensors that imports nothing.

A global of a pickle is compared with the lists below and never imported; a global on no list is refused. Therefore no
code path can execute what a file requests. Three limits protect against hostile files of a few bytes: the number of
entries, the depth of tuples, and the number of elements that are copied or hashed, each relative to the size of the
file.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..io.errors import CorruptError, UnsafePickleError, UnsupportedError, short_name

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
}
OPAQUE_PACKAGES = ("megatron", "deepspeed", "apex", "numpy", "enum", "torch", "transformer_engine")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
MAX_PICKLE_BYTES = 256_000_000
MAX_GROUPS = 1000
"""Limit of groups (MARK) that are open at the same time; files of torch have about ten."""
BYTES_PER_ENTRY = 2
"""One byte of a pickle can allocate 60 to 100 bytes of memory: an empty dict on the stack, an entry of the memo. Real
data takes more bytes for each. So the stack and the memo may have one entry per this number of bytes of the file."""
MAX_ENTRIES = 5_000_000
"""Limit of entries of the stack, and of the memo, for files of any size."""
MAX_TUPLE_DEPTH = 100
"""Limit of nested tuples: Python hashes them recursively without a check, and a stack overflow ends the process."""
WORK_PER_BYTE = 8
"""A few bytes of a pickle can copy or hash a large value repeatedly. So elements that are copied or hashed are counted:
at most this number per byte of the file. Plain data copies and hashes each element once."""
MIN_WORK = 10_000


@dataclass(frozen=True)
class GlobalName:
    """A global that a pickle refers to; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class OpaquePickle:
    """An object that is not rebuilt: its type, the arguments of its constructor, and its attributes."""

    type: GlobalName
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StorageRef:
    """A storage of a torch file; ``dtype`` is as in safetensors."""

    key: str
    dtype: str
    num_elements: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a torch file: a strided window on a storage; ``start`` and ``strides`` count elements."""

    storage: StorageRef
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


OPAQUE_NAMES = {GlobalName("argparse", "Namespace"), GlobalName("_codecs", "encode")}
OPAQUE_NAMES |= {GlobalName(module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS}
# Python 3.11.0 to 3.11.3 pickle the member of an enum as getattr(class, name). It becomes an OpaquePickle of a class of
# OPAQUE_PACKAGES and a string; no attribute is looked up.
MEMBER_OF = tuple(GlobalName(module, "getattr") for module in ("builtins", "__builtin__"))
OPAQUE_NAMES |= set(MEMBER_OF)
STOP = b"."
_TENSOR_BUILDERS = ("_rebuild_tensor_v2", "_rebuild_tensor")
_PARAMETER_BUILDERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
# Tensors with attributes are pickled as (function that rebuilds it, type, arguments, attributes).
_TYPED_BUILDERS = {
    GlobalName("torch._tensor", "_rebuild_from_type_v2"),
    GlobalName("torch._tensor", "_rebuild_from_type"),
}
_PLAIN = {
    ("collections", "OrderedDict"): dict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
    ("torch", "Size"): tuple,
}


# Types that hashing visits once; numbers, tuples and tensors can be larger.
_ONE_ELEMENT = frozenset({str, bool, float, type(None), GlobalName, StorageRef})
_PICKLE_ERRORS = (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def load_pickle(payload: bytes, source: str) -> Any:
    """The value in ``payload``.

    Raises:
        UnsafePickleError: it refers to a global that is on no list.
        CorruptError: it is not a pickle, or exceeds a limit.
    """
    if len(payload) > MAX_PICKLE_BYTES:
        raise CorruptError(f"{source}: a pickle of {len(payload):,} bytes; the limit is {MAX_PICKLE_BYTES:,}")
    return load_stream(io.BytesIO(payload), source)[0]


def load_stream(handle: BinaryIO, source: str) -> tuple[Any, dict[str, StorageRef]]:
    """The next pickle in a file, and its storages by key; the file position is then after the pickle.

    Raises:
        UnsafePickleError, CorruptError: as :func:`load_pickle`.
    """
    bounded: Any = handle if isinstance(handle, io.BytesIO) else _BoundedFile(handle)
    at = handle.seek(0, io.SEEK_CUR)
    machine = _PickleMachine(source, handle.seek(0, io.SEEK_END) - at)
    handle.seek(at)
    done = 0
    try:
        while (code := bounded.read(1)) != STOP:
            # Opcodes that no checkpoint needs, such as INST and EXT, are in no table and are refused here.
            found = _BY_CODE.get(code)
            if found is None:
                raise CorruptError(f"{source}: {_unknown(code)}")
            operation, read = found
            operation(machine, None if read is None else read(bounded))
            done += 1
            if not done & 0xFF:  # an operation adds at most one entry, so a check now and then is enough
                machine.check_bounds()
        return machine.stack.pop(), machine.storages
    except (UnsafePickleError, CorruptError):
        raise
    # Python warns of an invalid escape sequence in a text, which is an error where warnings are errors.
    except (*_PICKLE_ERRORS, DeprecationWarning) as error:
        raise CorruptError(f"{source}: not a readable pickle: {error}") from error


def _unknown(code: bytes) -> str:
    known = [each.name for each in pickletools.opcodes if each.code.encode("latin1") == code]
    if known:
        return f"the pickle uses the opcode {known[0]}, which checkpoints do not need"
    return f"not a readable pickle: unknown opcode {code!r}" if code else "the pickle does not end"


class _BoundedFile:
    """A file whose reads are bounded by its end, so that a false length does not allocate memory."""

    def __init__(self, handle: BinaryIO) -> None:
        at = handle.seek(0, io.SEEK_CUR)
        self.end = handle.seek(0, io.SEEK_END)
        self.handle = handle
        handle.seek(at)

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, and not beyond the end."""
        return self.handle.read(min(size, self.end - self.handle.seek(0, io.SEEK_CUR), MAX_PICKLE_BYTES))

    def readline(self) -> bytes:
        return self.handle.readline(MAX_PICKLE_BYTES)


class _PickleMachine:
    """The pickle machine: stack, memo, storages, and the limits."""

    def __init__(self, source: str, num_bytes: int) -> None:
        self.source = source
        self.max_entries = min(MAX_ENTRIES, 1000 + num_bytes // BYTES_PER_ENTRY)
        self.num_below = 0
        self.work_left = MIN_WORK + WORK_PER_BYTE * min(num_bytes, MAX_PICKLE_BYTES)
        # Depth and number of elements by id. The value is stored too, so that its id is not reused.
        self.nested: dict[int, tuple[Any, int, int]] = {}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageRef] = {}

    def push(self, value: Any) -> None:
        """Push a value on the current stack, which closing a group has replaced."""
        self.stack.append(value)

    def pop(self) -> None:
        """Drop the top of the stack, a value or a mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.to_mark()

    def mark(self) -> None:
        """Open a group: the current stack is saved until the group is closed."""
        self.below.append(self.stack)
        self.num_below += len(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """Close the last group and return its values.

        Raises:
            CorruptError: no group is open.
        """
        if not self.below:
            raise CorruptError(f"{self.source}: the pickle closes a group that is not open")
        items, self.stack = self.stack, self.below.pop()
        self.num_below -= len(self.stack)
        return items

    def check_bounds(self) -> None:
        """Compare the stack, the memo and the open groups with the limits for the size of the pickle.

        Raises:
            CorruptError: one of them is above its limit.
        """
        for what, count, limit in (
            ("open groups", len(self.below), MAX_GROUPS),
            ("values on its stack", self.num_below + len(self.stack), self.max_entries),
            ("entries in its memo", len(self.memo), self.max_entries),
            ("nested tuples", len(self.nested), self.max_entries),
        ):
            if count > limit:
                raise CorruptError(f"{self.source}: the pickle has more than {limit:,} {what}, the limit for its size")

    def charge(self, count: int) -> None:
        """Count elements that are to be copied or hashed.

        Args:
            count: number of elements.

        Raises:
            CorruptError: all counts together are above the limit for the size of the pickle.
        """
        self.work_left -= count
        if self.work_left < 0:
            raise CorruptError(f"{self.source}: the pickle copies or hashes more values than the limit for its size")

    def tuple_of(self, items: list[Any]) -> tuple[Any, ...]:
        """A tuple of ``items``.

        Raises:
            CorruptError: it is nested deeper than ``MAX_TUPLE_DEPTH`` levels, or the limit of work is reached.
        """
        made = tuple(items)
        self._measure(made)
        return made

    def frozenset_of(self, items: list[Any]) -> frozenset[Any]:
        """As :meth:`tuple_of`, for a frozen set."""
        made = frozenset(self.hashed(items))
        self._measure(made)
        return made

    def hashed(self, keys: list[Any]) -> list[Any]:
        """``keys`` of a dictionary or set, after the cost of hashing them is counted.

        Raises:
            CorruptError: the limit of work is reached.
        """
        self.charge(sum(self._size(key)[1] for key in keys if not isinstance(key, str)))
        return keys

    def _measure(self, made: tuple[Any, ...] | frozenset[Any]) -> None:
        """Store depth and number of elements of a tuple or frozen set; both follow from its direct members."""
        self.charge(len(made))
        depth, weight = 1, 1 + len(made)
        for member in made:
            # Most members are of these types, and a file has thousands of tuples.
            if type(member) in _ONE_ELEMENT or (type(member) is int and member.bit_length() < 64):
                continue
            levels, elements = self._size(member)
            depth, weight = max(depth, 1 + levels), weight + elements - 1
        if depth > MAX_TUPLE_DEPTH:
            raise CorruptError(
                f"{self.source}: the pickle has tuples nested deeper than the limit of {MAX_TUPLE_DEPTH} levels"
            )
        if (depth, weight) != (1, 1 + len(made)):
            self.nested[id(made)] = made, depth, weight

    def _size(self, value: Any) -> tuple[int, int]:
        """Tuple levels of a value, and the number of elements that hashing it visits."""
        if isinstance(value, tuple | frozenset):
            known = self.nested.get(id(value))
            return (1, 1 + len(value)) if known is None else known[1:]
        if isinstance(value, TensorRef):
            return 0, 1 + len(value.shape) + len(value.strides)
        return 0, 1 + (value.bit_length() >> 6 if isinstance(value, int) else 0)

    def global_name(self, name: GlobalName) -> GlobalName:
        """``name``, where it is on a list.

        Raises:
            UnsafePickleError: it is on no list.
        """
        package = name.module.partition(".")[0]
        known = (name.module, name.name) in _PLAIN or package in OPAQUE_PACKAGES
        if not known and name not in OPAQUE_NAMES:
            raise UnsafePickleError(
                f"{self.source}: refers to {short_name(str(name))}, which is not plain data; nothing was executed"
            )
        return name

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The result of a call as data; only the containers of ``_PLAIN`` are called.

        Args:
            function: what the pickle calls.
            arguments: of the call.

        Raises:
            CorruptError: ``function`` is not a global, or a tensor has no storage.
            UnsafePickleError: an attribute of something that is not an enum.
        """
        if not isinstance(function, GlobalName):
            raise CorruptError(f"{self.source}: the pickle calls a {type(function).__name__}, not a global")
        # The order matters: each test is for one exact name, and what is left becomes opaque data.
        if function in MEMBER_OF:
            return self._member(*arguments)
        if function == GlobalName("_codecs", "encode"):
            self.charge(len(arguments[0]) if isinstance(arguments[0], str) else 0)
            return _string(arguments[0]).encode("latin1")
        if (function.module, function.name) in _PLAIN:
            return self._container(_PLAIN[function.module, function.name], *arguments)
        if function.module == "torch._utils" and function.name in _TENSOR_BUILDERS:
            storage, start, shape, strides = arguments[:4]
            if not isinstance(storage, StorageRef):
                raise CorruptError(f"{self.source}: a tensor of a {type(storage).__name__}, not of a storage")
            self.charge(len(shape) + len(strides))
            return TensorRef(storage, int(start), tuple(map(int, shape)), tuple(map(int, strides)))
        if function.module == "torch._utils" and function.name in _PARAMETER_BUILDERS:
            return arguments[0]
        if function in _TYPED_BUILDERS:
            self.charge(len(arguments[2]))
            return self.call(arguments[0], tuple(arguments[2]))
        return OpaquePickle(function, arguments)

    def _container(self, kind: Any, content: Any = ()) -> Any:
        """A plain container of ``content``."""
        self.charge(len(content))
        if kind is tuple:
            return self.tuple_of(list(content))
        if kind is frozenset:
            return self.frozenset_of(list(content))
        if kind is dict and not isinstance(content, dict):
            self.hashed([pair[0] for pair in content])
        elif kind is set:
            self.hashed(list(content))
        return kind(content)

    def _member(self, of: Any, member: Any) -> OpaquePickle:
        """A member of an enum as data."""
        if (
            not isinstance(of, GlobalName)
            or of.module.partition(".")[0] not in OPAQUE_PACKAGES
            or not isinstance(member, str)
        ):
            raise UnsafePickleError(
                f"{self.source}: refers to {_word(member)} of {_word(of)}, which is not an enum; nothing was executed"
            )
        return OpaquePickle(of, (member,))

    def persistent(self, identifier: Any) -> StorageRef:
        """The storage of a persistent id of torch.

        Args:
            identifier: ``("storage", type, key, device, number of elements)``; before torch 0.4 with a sixth field.

        Raises:
            CorruptError: not a storage, of an unknown type, or a view of another storage.
            UnsupportedError: a type that DynMo does not read, such as float8.
        """
        # The device, which is ignored, is that of the process that saved.
        kind, storage_type, key, _, count = identifier[:5]
        name = storage_type.name if isinstance(storage_type, GlobalName) else ""
        if kind == "storage" and name == "UntypedStorage":
            known = ", ".join(STORAGE_DTYPES.values())
            raise UnsupportedError(
                f"{self.source}: the storage {short_name(key)} has an unsupported type, such as float8; supported are "
                f"{known}"
            )
        if kind != "storage" or name not in STORAGE_DTYPES:
            raise CorruptError(f"{self.source}: a storage of the unknown type {_word(storage_type)}")
        if len(identifier) > 5 and identifier[5] is not None:
            raise CorruptError(
                f"{self.source}: the storage {short_name(key)} is a view of another, as before torch 0.4; save it "
                "again with a newer torch"
            )
        key = str(key) if isinstance(key, int) else _string(key)
        return self.storages.setdefault(key, StorageRef(key, STORAGE_DTYPES[name], int(count)))


def _string(value: Any) -> str:
    """A string; anything else is refused, because the text of nested lists can be far longer than the pickle."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found a {type(value).__name__}")
    return value


def _word(value: Any) -> str:
    """A value for a message: a string or a global, or the type of anything else."""
    return str(value)[:80] if isinstance(value, str | GlobalName) else f"a {type(value).__name__}"


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _reduce(machine: _PickleMachine, _: Any) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(arguments, tuple):
        raise TypeError(f"the arguments of a call must be a tuple, found a {type(arguments).__name__}")
    machine.stack.append(machine.call(function, arguments))


def _build(machine: _PickleMachine, _: Any) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, OpaquePickle):
        machine.charge(len(state) if isinstance(state, dict) else 1)
        target.attributes.update(state if isinstance(state, dict) else {"state": state})


def _global(machine: _PickleMachine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(machine.global_name(GlobalName(module, name)))


def _stack_global(machine: _PickleMachine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.global_name(GlobalName(_string(module), _string(name))))


def _set_items(machine: _PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, dict):
        machine.hashed(items[::2])
        target.update(_pairs(items))


def _dictionary(machine: _PickleMachine, items: list[Any]) -> dict[Any, Any]:
    machine.hashed(items[::2])
    return dict(_pairs(items))


def _append_items(machine: _PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        target.update(machine.hashed(items))


def _pop(machine: _PickleMachine, count: int) -> list[Any]:
    items = machine.stack[len(machine.stack) - count :]
    if len(items) < count:
        raise CorruptError(f"{machine.source}: the pickle pops more values than its stack has")
    del machine.stack[len(machine.stack) - count :]
    return items


def _put(machine: _PickleMachine, argument: Any) -> None:
    machine.memo[len(machine.memo) if argument is None else int(argument)] = machine.stack[-1]


def _constant(make: Callable[[], Any]) -> Callable[[_PickleMachine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_VALUES = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_VALUES |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
_VALUES |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_OPERATIONS: dict[str, Callable[[_PickleMachine, Any], None]] = {
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.to_mark().clear(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "TUPLE": lambda m, _: m.push(m.tuple_of(m.to_mark())),
    "TUPLE1": lambda m, _: m.stack.append(m.tuple_of(_pop(m, 1))),
    "TUPLE2": lambda m, _: m.stack.append(m.tuple_of(_pop(m, 2))),
    "TUPLE3": lambda m, _: m.stack.append(m.tuple_of(_pop(m, 3))),
    "LIST": lambda m, _: m.push(m.to_mark()),
    "DICT": lambda m, _: m.push(_dictionary(m, m.to_mark())),
    "FROZENSET": lambda m, _: m.push(m.frozenset_of(m.to_mark())),
    "APPEND": lambda m, _: _append_items(m, _pop(m, 1)),
    "APPENDS": lambda m, _: _append_items(m, m.to_mark()),
    "ADDITEMS": lambda m, _: _append_items(m, m.to_mark()),
    "SETITEM": lambda m, _: _set_items(m, _pop(m, 2)),
    "SETITEMS": lambda m, _: _set_items(m, m.to_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "BUILD": _build,
    "BINPERSID": lambda m, _: m.stack.append(m.persistent(m.stack.pop())),
    **dict.fromkeys(("PROTO", "FRAME"), lambda _, __: None),
    **{name: _constant(make) for name, make in _CONSTANTS.items()},
    **dict.fromkeys(_VALUES, lambda m, argument: m.stack.append(argument)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, argument: m.stack.append(m.memo[int(argument)])),
}
_BY_CODE = {
    known.code.encode("latin1"): (_OPERATIONS[known.name], None if known.arg is None else known.arg.reader)
    for known in pickletools.opcodes
    if known.name in _OPERATIONS
}
