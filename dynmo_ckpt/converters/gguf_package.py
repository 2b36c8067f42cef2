"""The ``gguf`` package of llama.cpp, which is an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .._common.errors import MissingExtraError


def gguf_package() -> Any:
    """The ``gguf`` package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("gguf")
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf") from error
