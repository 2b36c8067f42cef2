"""The optimizer state of a legacy Megatron rank: float32 masters and Adam's moments by parameter name.

The file has them by position: first the group with weight decay, then the one without (biases and other parameters of
one dimension), each in the order of the module's parameters. Each shape is compared with that of the weight, and each
master, rounded, with the weight, so that any other order is detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.document import short_repr
from ..io.errors import CorruptError, NoOptimizerStateError, UnsupportedError, short_name
from ..tensors.views import Tensor
from ..torch_save.pickles import TensorRef
from ..torch_save.reader import TorchFile

# The key of the float32 masters, by release of Megatron; the last one is DeepSpeed's.
MASTERS = ("fp32_from_fp16_params", "fp32_from_float16_params", "fp32_from_fp16", "fp32_groups")
LM = "language_model."
MODULES: tuple[str, ...] = (f"{LM}embedding.", f"{LM}encoder.", f"{LM}decoder.", f"{LM}pooler.", f"{LM}output_layer.")
MODULES += ("word_embeddings_for_head.", "lm_head.", "binary_head.", "classification_dropout.")
Key = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """``tensors`` by kind (``master``, ``exp_avg``, ``exp_avg_sq``), then by chunk and name; optimizer ``steps``."""

    tensors: Mapping[str, Mapping[Key, Tensor]]
    steps: int


def read_state(file: TorchFile, chunks: Sequence[Mapping[str, Tensor]]) -> OptimizerState:
    """The optimizer state in the file of a rank.

    Args:
        file: the file.
        chunks: the weights of each virtual chunk by canonical name, with the shapes of this tensor-parallel rank.

    Raises:
        NoOptimizerStateError: the file has no optimizer state.
        UnsupportedError: the state of an optimizer other than Adam.
        CorruptError: state that does not fit the weights.
    """
    optimizer = file.tree.get("optimizer")
    if not isinstance(optimizer, dict):
        raise NoOptimizerStateError(f"{file.path}: has no optimizer state")
    inner = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))  # the second is DeepSpeed's
    state, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, dict) else (None, None)
    if not isinstance(state, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise UnsupportedError(f"{file.path}: has no Adam state for each weight; other optimizers are not supported")
    ordered = _in_order(chunks, len(groups))
    numbers = [group.get("params") for group in groups]
    if [len(n) if isinstance(n, list) else -1 for n in numbers] != [len(group) for group in ordered]:
        raise CorruptError(f"{file.path}: its parameter groups do not have the numbers of weights of the model")
    masters = next((optimizer[name] for name in MASTERS if name in optimizer), None)
    found: dict[str, dict[Key, Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    recorded = [group.get("step") for group in groups]
    for g, group in enumerate(ordered):
        for at, key in enumerate(group):
            weight = chunks[key[0]][key[1]]
            entry = state.get(numbers[g][at])
            if not isinstance(entry, dict):
                raise CorruptError(f"{file.path}: has no optimizer state of {short_name(key[1])}")
            recorded.append(entry.get("step"))
            for kind in ("exp_avg", "exp_avg_sq"):
                found[kind][key] = _fitting(file, entry.get(kind), weight, f"{kind} of {short_name(key[1])}")
            if masters is None:
                # An optimizer for float32 weights has no masters: the weights themselves take their place.
                found["master"][key] = weight
            else:
                found["master"][key] = _fitting(file, _at(masters, g, at), weight, f"master of {short_name(key[1])}")
    steps = {int(number) for number in map(file.number, recorded) if number is not None}
    if len(steps) != 1:
        raise CorruptError(
            f"{file.path}: its parameters did {short_repr(sorted(steps))} optimizer steps; all must have the same "
            "number"
        )
    return OptimizerState(tensors=found, steps=steps.pop())


def module_order(names: Iterable[str]) -> list[str]:
    """Names of a chunk in the order of the module's parameters.

    The order is that of the state dict, except for submodules: the head's copy of the embedding is created before
    BERT's heads, and a decoder before the modules after it.
    """

    # sorted is stable: within a module, the order of the state dict is that of its parameters.
    def part(name: str) -> int:
        return next((at for at, prefix in enumerate(MODULES) if name.startswith(prefix)), len(MODULES))

    return sorted(names, key=part)


def _in_order(chunks: Sequence[Mapping[str, Tensor]], num_groups: int) -> list[list[Key]]:
    """The parameters of each group, in the order of the module."""
    keys = [(number, name) for number, chunk in enumerate(chunks) for name in module_order(chunk)]
    if num_groups == 1:
        return [keys]

    def decays(key: Key) -> bool:
        return len(chunks[key[0]][key[1]].shape) > 1

    return [list(filter(decays, keys)), [key for key in keys if not decays(key)]]


def _at(masters: Any, group: int, at: int) -> Any:
    if isinstance(masters, list) and group < len(masters) and isinstance(masters[group], list):
        return masters[group][at] if at < len(masters[group]) else None
    return None


def _fitting(file: TorchFile, value: Any, weight: Tensor, what: str) -> Tensor:
    if not isinstance(value, TensorRef):
        raise CorruptError(f"{file.path}: has no {what}")
    tensor = file.tensor(value, what)
    if tensor.shape != weight.shape or tensor.dtype != "F32":
        raise CorruptError(
            f"{file.path}: {what}: {tensor.dtype} {list(tensor.shape)}, expected F32 {list(weight.shape)}"
        )
    return tensor
