"""``torch.compile`` of single items: each item is its own graph, so that placement cannot change what is fused.

Embeddings, attentions and MLPs of fixed shapes are compiled. Data-dependent modules (experts, routed blocks, hashed
attention) and heads, whose loss runs in chunks, stay eager.
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
    # Not ``isinstance``: subclasses, such as items that run on active tokens, have shapes that depend on the data.
    plain = type(module) in BLOCKS and "forward" not in vars(module)
    return plain and not (isinstance(module, SelfAttention) and module.sparse is not None)


def compile_item(module: nn.Module, backend: str = INDUCTOR) -> None:
    """Compile an item's forward at its first call, in place; hooks and parameter names are unchanged.

    Items of the same shape share the compiled code. Evaluation and freezing each compile once more.
    """
    if is_compiled(module):
        # torch counts recompilations per code object: encoder and decoder, each in training, frozen and in evaluation.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
        module.forward = torch.compile(module.forward, dynamic=False, fullgraph=True, backend=backend)


def check_compiler(
    device: str,
    backend: str,
    environment: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    headers: Path | None = None,
) -> None:
    """Check that the toolchain of ``--torch-compile`` is installed.

    Args:
        device: ``cpu`` or ``cuda``.
        backend: of ``torch.compile``.
        environment: environment variables of the process.
        which: finds a program on PATH.
        headers: folder of Python's header files; None is this Python's.

    Raises:
        UsageError: torch has no such backend, or a C++ compiler (on CUDA a C compiler) or Python's header files are
            missing.
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
