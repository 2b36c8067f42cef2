"""Blocks by ``torch.compile``: each item by itself, so that placement cannot change what is fused with what.

Compiled are embeddings, attentions and MLPs of fixed shapes. What follows the data (experts, routed blocks, hashed
attention) or is made of products in pieces (heads with their losses) runs as it is.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from .._common.errors import UsageError
from .blocks import CrossAttention, Embedding, Mlp, SelfAttention

FORMS = 64
INDUCTOR = "inductor"
BLOCKS = (Embedding, SelfAttention, CrossAttention, Mlp)


def is_compiled(module: nn.Module) -> bool:
    """Whether an item is one that :func:`compile_item` compiles."""
    plain = type(module) in BLOCKS and "forward" not in vars(module)
    return plain and not (isinstance(module, SelfAttention) and module.sparse is not None)


def compile_item(module: nn.Module, backend: str = INDUCTOR) -> None:
    """Compile an item's forward when it first runs, in place; hooks and parameters stay where they are.

    Items alike share what was compiled. One that changes on its way (evaluation, freezing) is compiled once for each.
    """
    if is_compiled(module):
        # torch counts over all modules of a class: an encoder's, a decoder's, each in training, frozen and evaluated.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
        module.forward = torch.compile(module.forward, dynamic=False, fullgraph=True, backend=backend)


def check_compiler(
    device: str,
    backend: str,
    environment: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    headers: Path | None = None,
) -> None:
    """Look for what torch's compiler writes its code for.

    Args:
        device: ``cpu`` or ``cuda``.
        headers: the folder of Python's header files; None is this Python's.

    Raises:
        UsageError: torch has no such backend; a C++ compiler (on CUDA a C compiler) or Python's header files are not
            there.
    """
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise UsageError(f"--torch-compile-backend {backend!r} is none of torch's: {', '.join(backends)}")
    if backend != INDUCTOR:
        return
    name, language, default = ("CXX", "C++", "g++") if device == "cpu" else ("CC", "C", "gcc")
    compiler = environment.get(name, default)
    if which(compiler) is None:
        raise UsageError(
            f"--torch-compile needs a {language} compiler, and {compiler!r} is not on PATH; install one, name it in"
            f" {name}, or leave --torch-compile out"
        )
    headers = headers or Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise UsageError(
            f"--torch-compile needs Python's header files, and {headers}/Python.h is not there; install them"
            " (python3-dev), or leave --torch-compile out"
        )
