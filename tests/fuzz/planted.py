"""Parsers with planted defects, for the test that a campaign finds each kind. No target of the project."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.fuzz.target import Target

SEED = b'{"a": 1, "b": [2, 3]}'


def _is_damaged(data: bytes) -> bool:
    return data != SEED


def _key_error(data: bytes, folder: Path) -> None:
    if _is_damaged(data):
        {}["a"]


def _loop(data: bytes, folder: Path) -> None:
    while _is_damaged(data):
        pass


def _loop_in_c(data: bytes, folder: Path) -> None:
    if _is_damaged(data):
        re.match("(a+)+$", "a" * 60 + "b")


def _allocation(data: bytes, folder: Path) -> None:
    if _is_damaged(data):
        bytearray(8 << 30)


def _crash(data: bytes, folder: Path) -> None:
    if _is_damaged(data):
        os.abort()


def _sound(data: bytes, folder: Path) -> None:
    from dynmo_balance._common.document import parse_json

    parse_json(data)


TARGETS = {
    name: Target(name=name, run=run, seeds=lambda _: [SEED], readers=("dynmo_balance.planted:x",), errors=(ValueError,))
    for name, run in {
        "key-error": _key_error,
        "loop": _loop,
        "loop-in-c": _loop_in_c,
        "allocation": _allocation,
        "crash": _crash,
        "sound": _sound,
    }.items()
}
