"""``torch.compile`` of single items: each item has its own graphs, so that placement cannot change what is fused.

What has fixed shapes is compiled with ``fullgraph=True``: a graph break is an error, never a slow run. What reads the
device or depends on data stays outside::

    item                          compiled                                   outside
    embedding, attention, MLP,    forward, with its collectives              -
    norm of a stack
    attention in documents        project                                    kernel, output layer
    hashed attention              project, finish                            buckets and blocks
    routed block                  attention, MLP                             router, selection of tokens
    item after an early exit      on_tokens of attention and MLP             selection of tokens, exit
    experts                       each expert, shared experts                router, rows, exchange
    head, pooler                  features, embed, logits                    loss, in chunks of tokens
    depth of further prediction   its attention, MLP and head                norms, projection, loss
    shard of the vocabulary       -                                          lookup, a few large products

Items of one kind and shape share their graphs, so that a move compiles nothing on a rank that has had that kind.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._common.errors import UsageError
from ..parallel.random_stream import draws_from_generator
from .attention.cross_attention import CrossAttention
from .attention.self_attention import SelfAttention
from .experts.moe import MoeMlp
from .families.bert_tasks import BertTaskHead
from .families.ict import Pooler, TowerEmbedding
from .families.sharded_prediction import PREDICTIONS
from .layers.feed_forward import FeedForward, Mlp
from .layers.linear import PrunableLinear
from .layers.norms import RmsNorm
from .techniques.early_exit import ActiveTokens, Exit
from .techniques.mixture_of_depths import RoutedBlock
from .vocabulary.embedding import Embedding, PackedEmbedding
from .vocabulary.head import Head
from .vocabulary.vocabulary_shards import FinalNorm, SummedEmbedding

FORMS = 64
INDUCTOR = "inductor"
BLOCKS = (
    Embedding,
    PackedEmbedding,
    SummedEmbedding,
    TowerEmbedding,
    SelfAttention,
    CrossAttention,
    Mlp,
    nn.LayerNorm,
    RmsNorm,
    FinalNorm,
)
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
)
TOKENS_DIM, ROWS_DIM = 1, 0
NUM_TOKENS = 1024
"""Tokens for which the code of a graph with any number of tokens is generated, whatever their number at its first call:
a rank that compiles it later, after a move or a resume, generates the same code."""


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """How items are compiled.

    Attributes:
        backend: of ``torch.compile``.
        any_length: Whether one graph is for all numbers of tokens (curriculum); else there is one for each.
        selective: Whether graphs keep the results of matrix products and random numbers, and compute the rest again.
        sharded: Whether items are slices of tensor-parallel ranks.
    """

    backend: str = INDUCTOR
    any_length: bool = False
    selective: bool = False
    sharded: bool = False


@dataclass(frozen=True)
class Region:
    """A method that is compiled.

    Attributes:
        module: Owner of the method.
        method: Name of the method.
        dim: Dimension of its tensors whose size differs by call; None where all sizes are fixed.
    """

    module: nn.Module
    method: str
    dim: int | None = None


def compiled_regions(module: nn.Module) -> Iterator[Region]:
    """The methods of an item that are compiled; see the module's table."""
    if isinstance(module, ActiveTokens):
        if issubclass(type(module), MoeMlp | RoutedBlock) or _is_hashed(module):
            yield from _parts(module, TOKENS_DIM)
        else:
            yield Region(module, "on_tokens", TOKENS_DIM if module.reads_exited else None)
        for child in module.modules():
            if isinstance(child, Exit):
                yield from _parts(child.head, TOKENS_DIM)
    elif isinstance(module, PREDICTIONS):
        for part in (module.attention, module.mlp, module.head):
            yield from compiled_regions(part)
    # Not ``isinstance``: a subclass may have shapes that depend on the data.
    elif type(module) in BLOCKS and not _is_hashed(module):
        yield Region(module, "forward")
    else:
        yield from _parts(module, None)


def _is_hashed(module: nn.Module) -> bool:
    return isinstance(module, SelfAttention) and module.sparse is not None


def _parts(module: nn.Module, dim: int | None) -> Iterator[Region]:
    if isinstance(module, RoutedBlock):
        for part in (module.attention, module.mlp):
            # The number of selected tokens is fixed in training, and differs in evaluation.
            for found in compiled_regions(part):
                yield Region(found.module, found.method, TOKENS_DIM if found.dim is None else found.dim)
    elif isinstance(module, MoeMlp):
        for child in module.modules():
            if isinstance(child, FeedForward):
                yield Region(child, "forward", ROWS_DIM)
    elif isinstance(module, SelfAttention):
        # Of packed documents: the kernel for sequences of other lengths has its longest one as a number.
        yield Region(module, "project", dim)
        if module.sparse is not None:
            yield Region(module, "finish", dim)
    elif isinstance(module, Head):
        # Heads may select tokens first, whose number differs by step.
        yield Region(module, "features", TOKENS_DIM)
    elif isinstance(module, Pooler):
        yield Region(module, "embed")
    elif isinstance(module, BertTaskHead):
        yield Region(module, "logits")


def is_compiled(module: nn.Module) -> bool:
    """Whether :func:`compile_item` has compiled a part of an item."""
    return any(isinstance(value, CompiledMethod) for part in module.modules() for value in vars(part).values())


def compile_item(module: nn.Module, settings: CompileSettings | None = None) -> None:
    """Compile the regions of an item at their first calls, in place; hooks and parameter names are unchanged.

    Evaluation and freezing each compile once more.
    """
    settings = settings or CompileSettings()
    # torch counts recompilations per code object: encoder and decoder, each in training, frozen and in evaluation.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
    # A stream of random numbers counts its draws: once in the forward, since the backward of a graph is traced with it.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for region in compiled_regions(module):
        setattr(region.module, region.method, CompiledMethod(region, settings))


def num_compiled_graphs() -> int:
    """The number of graphs that this process has compiled so far, each recompilation included."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class CompiledMethod:
    """A compiled method of a module.

    Args:
        region: The method; it is read before it is replaced.
        settings: Backend, numbers of tokens, recomputation.
    """

    def __init__(self, region: Region, settings: CompileSettings) -> None:
        method = getattr(region.module, region.method)
        self._eager = method
        self._dim = TOKENS_DIM if settings.any_length and region.dim is None else region.dim
        self._layers = [child for child in region.module.modules() if isinstance(child, PrunableLinear)]
        if settings.selective:
            method = partial(_keeping_products, method)
        self._compiled: Callable[..., Any] = torch.compile(
            method, dynamic=False, fullgraph=True, backend=settings.backend, options=_options(region, settings)
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the method; eagerly for a single token or none, of which a graph for any number is not valid."""
        for layer in self._layers:
            layer.prepare()
        if self._dim is not None:
            for each in (*arguments, *keywords.values()):
                if isinstance(each, torch.Tensor):
                    if each.shape[self._dim] < 2:
                        return self._eager(*arguments, **keywords)
                    torch._dynamo.mark_dynamic(each, self._dim, hint_override=NUM_TOKENS)
        return self._compiled(*arguments, **keywords)


def _options(region: Region, settings: CompileSettings) -> dict[str, Any] | None:
    if settings.backend != INDUCTOR:
        return None
    # No choice of kernels by measurement: two ranks could choose other ones, whose sums have another order.
    options: dict[str, Any] = {"deterministic": True}
    # Inductor draws the seeds of all random numbers at the start of a graph. Under tensor parallelism the generator is
    # seeded again within it, so that each operation has to draw its own.
    if settings.sharded and draws_from_generator(region.module):
        options["fallback_random"] = True
    return options


def _keeping_products(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return checkpoint(
        method, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **keywords
    )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    # The backward of a graph is a part of it: the generator is not seeded there, so random numbers are kept.
    is_random = type(operation) is torch._ops.OpOverload and (
        torch.Tag.nondeterministic_seeded in operation.tags or operation.namespace == "dynmo_train"
    )
    if operation in PRODUCTS or is_random:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


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
