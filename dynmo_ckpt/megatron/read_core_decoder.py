"""Reads a decoder of Megatron-core that legacy Megatron does not have: experts, latent attention, norms of heads.

::

    tensors of a directory  --unstacked-->  one for each layer  --joined-->  names of core_decoder.json  -->  DynMo's

Norms of their own and norms that Transformer Engine fuses into a linear layer have different names; the table lists
them as spellings of one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from ..formats.checkpoint_rules import EXPERT_BIASES
from ..formats.choices import ReadOptions
from ..io.errors import CorruptError, UnsupportedError, short_name
from ..maps.name_map import Layout, layout_of, load_map, model_ties, to_native
from ..tensors.views import Tensor, concatenate
from .arguments import DECODER, check_args
from .core_decoder import DecoderFile, decoder_model
from .core_names import EXTRA_STATE, unstacked
from .read import MegatronCheckpoint, RankMetadata, with_state

MAP = "core_decoder"
# With a key for each part, gate and up projection are separate, and so are experts.
HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
EXPERT = re.compile(r"(.+\.mlp\.experts\.experts)\.(\d{1,5})\.(.+)")


def assemble_decoder(facts: RankMetadata, tensors: Mapping[str, Tensor], options: ReadOptions) -> MegatronCheckpoint:
    """The weights under DynMo's names.

    Args:
        facts: what the directory records apart from tensors.
        tensors: the weights by Megatron-core's names, each with its whole shape; layers may be stacked.
        options: how to read.

    Raises:
        CorruptError: parts of a tensor that contradict each other.
        UnsupportedError: an argument or tensor without a rule.
        UsageError: the model needs an option.
    """
    path = str(facts.path)
    named = {name: tensor for name, tensor in unstacked(tensors).items() if EXTRA_STATE not in name}
    dropped = [name for name in named if any(fnmatchcase(name, pattern) for pattern in options.drop)]
    named = joined({name: tensor for name, tensor in named.items() if name not in dropped})
    args = check_args(path, DECODER, facts.args, options.ignore_config)
    remarks = [f"{short_name(name)}: left out by --drop" for name in dropped]
    given = {"vocab_size": options.vocab_size, "num_attention_heads": options.num_attention_heads}
    model = decoder_model(DecoderFile(path=path, args=args, tensors=named), given, remarks)
    layout = layout_of(load_map(MAP), model, foreign_vocab_size=model["padded_vocab_size"])
    ties = model_ties(model)
    found, _ = to_native(layout, {name: [tensor] for name, tensor in _respelled(path, layout, named).items()}, ties)
    return MegatronCheckpoint(
        model=model, tensors=found, ties=ties, step=facts.step, remarks=remarks, progress=facts.progress
    )


def assemble_decoder_state(
    facts: RankMetadata,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    steps: set[int],
    options: ReadOptions,
) -> MegatronCheckpoint:
    """As :func:`assemble_decoder`, from optimizer state that is stored by the names of the weights.

    Args:
        facts: what the directory records apart from tensors.
        weights: as for :func:`assemble_decoder`.
        state: for each kind (``master`` and the moments) the tensors by name of the weight, with its shape.
        steps: the numbers of optimizer steps that are recorded.
        options: how to read.

    Raises:
        CorruptError: several numbers of steps, or parts of a tensor that contradict each other.
        UnsupportedError: an argument or tensor without a rule.
        UsageError: options that change the set of tensors.
    """
    # Buffers have no state; the model is that of the weights only with them.
    buffers = {name: tensor for name, tensor in weights.items() if name.endswith(EXPERT_BIASES)}
    kinds = {kind: assemble_decoder(facts, {**part, **buffers}, options) for kind, part in state.items()}
    return with_state(facts, kinds, steps, options)


def _respelled(path: str, layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the table."""
    expected = {link.foreign for link in layout.links}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = name if name in expected else layout.name_map.respelled(name, expected)
        if known in result:
            raise CorruptError(f"{path}: has {short_name(known)} under two names")
        result[known] = tensor
    return result


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with halves of gated projections concatenated, and those of experts as one with a first axis of experts.

    Args:
        tensors: by name, one for each layer; of any shape.

    Raises:
        CorruptError: a half is missing, or experts are not numbered from 0.
        UnsupportedError: parts of different shapes.
    """
    result: dict[str, Tensor] = {}
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = HALF.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            halves.setdefault(match[1], {})[match[2]] = tensor
    for name, parts in halves.items():
        if parts.keys() != {"w", "v"}:
            raise CorruptError(f"{short_name(name)}: has one of the halves _w and _v only")
        result[name] = _concatenated(name, [parts["w"], parts["v"]])
    experts: dict[str, dict[int, Tensor]] = {}
    for name in [name for name in result if EXPERT.fullmatch(name)]:
        match = EXPERT.fullmatch(name)
        if match is not None:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = result.pop(name)
    for name, numbered in experts.items():
        if sorted(numbered) != list(range(len(numbered))) or name in result:
            raise CorruptError(f"{short_name(name)}: its experts must have the numbers 0 to {len(numbered) - 1}, once")
        ordered = [numbered[i] for i in range(len(numbered))]
        result[name] = _concatenated(name, [each.with_unit_dims((1, *each.shape)) for each in ordered])
    return result


def _concatenated(name: str, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1 or not parts[0].shape:
        raise UnsupportedError(f"{short_name(name)}: its parts have different types or shapes")
    return concatenate(parts, 0)
