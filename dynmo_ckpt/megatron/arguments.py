"""Checks every Megatron argument of a checkpoint: it is mapped, changes no logit, or is refused. Pure.

Legacy Megatron, Megatron-DeepSpeed and Megatron-core store the ``argparse.Namespace`` of the training run. The table
``maps/megatron_args.json`` has the arguments of these programs since 2019, as ``maps/config_keys.json`` has those of
transformers:

* ``mapped``: arguments that the readers use, or that a resumed run needs;
* ``needs``: arguments that change the computation, with the values that DynMo's models implement, the first one being
  the default; ``families`` has those of Llama, of the other decoders of Megatron-core, and of the other families;
* ``decoder_mapped``: arguments of ``needs`` that are mapped for these decoders;
* ``irrelevant``: arguments that change no logit of the stored tensors, by reason.

An unknown argument is refused: the option of a fork may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from .. import maps
from .._common.document import MAX_SIZE, finite_number, parse_json, short_repr
from ..huggingface.config_keys import irrelevant_keys, matches
from ..io.errors import UnsupportedError, short_names
from ..torch_save.pickles import GlobalName, OpaquePickle

Args = Mapping[str, Any]
DECODER = "decoder"
POSITION_TYPE = "position_embedding_type"
ROTARY = "use_rotary_position_embeddings"
ROTARY_TYPES = ("rope", "yarn", "PositionEmbeddingType(1)")
# All arguments that GPT-NeoX stores (``save_ds_checkpoint`` of its ``megatron/checkpointing.py``).
NEOX_ARGS = {
    *("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("padded_vocab_size", "tokenizer_type", "model_parallel_size"),
}


@cache
def argument_table() -> Mapping[str, Any]:
    """The contents of ``maps/megatron_args.json``."""
    table: Mapping[str, Any] = parse_json(resources.files(maps).joinpath("megatron_args.json").read_bytes())
    return table


def read_args(tree: Any, path: str) -> Args:
    """The arguments of a checkpoint file; empty where it has none, as files of 2019.

    Raises:
        UnsupportedError: ``args`` is not an ``argparse.Namespace``, so that it cannot be checked.
    """
    args = tree.get("args") if isinstance(tree, Mapping) else None
    if args is None:
        return {}
    if isinstance(args, OpaquePickle) and args.type == GlobalName("argparse", "Namespace"):
        return args.attributes
    if isinstance(args, Mapping) and args and args.keys() <= NEOX_ARGS:
        raise UnsupportedError(
            f"{path}: a checkpoint of GPT-NeoX, whose args record sizes only; position embedding, norm, activation and "
            "residual are in GPT-NeoX's YAML configuration, which is not read. Convert a model of Llama's architecture "
            "with GPT-NeoX's tools/ckpts/convert_neox_to_hf.py --architecture llama, and give the directory that it "
            "writes; other GPT-NeoX models are not supported"
        )
    kind = str(args.type if isinstance(args, OpaquePickle) else type(args).__name__)[:80]
    raise UnsupportedError(f"{path}: its args are a {kind}; they must be an argparse.Namespace")


def check_args(path: str, family: str, args: Args, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments without the ignored ones, after each of them is checked.

    Args:
        path: the file, for messages.
        family: of the model, or ``decoder`` for those of Megatron-core alone.
        args: the arguments of the files; may be empty.
        ignored: shell patterns of arguments that are left out instead of refused.

    Raises:
        UnsupportedError: an unknown argument, or a value that DynMo's models do not implement.
    """
    table = argument_table()
    mapped = {*table["mapped"], *(table["decoder_mapped"] if family == DECODER else ())}
    needs = needed_values(family)
    known = {*mapped, *needs, *_known_elsewhere()}

    def is_refused(name: str) -> bool:
        return name not in known or (name in needs and table_value(args[name]) not in needs[name])

    # A pattern such as moe_* leaves out what would be refused, and not the router that the readers know.
    found = {name: value for name, value in args.items() if not (matches(name, ignored) and is_refused(name))}
    # Since 2023 Megatron records rotary positions as a type, and no longer as a flag.
    if table_value(found.get(POSITION_TYPE)) in ROTARY_TYPES:
        found[ROTARY] = True
    for name, supported in needs.items():
        if table_value(found.get(name, supported[0])) not in supported:
            stored = table_value(found[name])
            value = (stored if isinstance(stored, str) else short_repr(stored))[:80]
            raise UnsupportedError(
                f"{path}: trained with {name} = {value}; DynMo implements {name} = {_listed(supported)} only; "
                f"--ignore-config {name} skips this check"
            )
    unknown = sorted(set(found) - known)
    if unknown:
        raise UnsupportedError(
            f"{path}: no rule for the {'argument' if len(unknown) == 1 else 'arguments'} {short_names(unknown)}; an "
            "unknown argument may change what the model computes; --ignore-config NAME ignores it"
        )
    return found


def count_of(path: str, args: Args, name: str) -> int | None:
    """A positive integer of the arguments; None where it is none or not recorded.

    Args:
        path: the checkpoint, for messages.
        args: its arguments.
        name: of the argument.

    Raises:
        UnsupportedError: another value.
    """
    value = args.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_SIZE):
        raise UnsupportedError(f"{path}: {name} = {short_repr(value)}: must be a positive integer")
    return value


def number_of(path: str, args: Args, name: str) -> float | None:
    """A finite number of the arguments; None where it is none or not recorded.

    Args:
        path: the checkpoint, for messages.
        args: its arguments.
        name: of the argument.

    Raises:
        UnsupportedError: another value.
    """
    value = args.get(name)
    number = None if value is None else finite_number(value)
    if value is not None and number is None:
        raise UnsupportedError(f"{path}: {name} = {short_repr(value)}: must be a number")
    return number if number is None else float(number)


def _listed(values: Sequence[Any]) -> str:
    """Values of the table without those that mean the first one."""
    named = [value for value in values if value is not None and not isinstance(value, list)]
    return " or ".join(map(str, named or values[:1]))


def needed_values(family: str) -> dict[str, list[Any]]:
    """The arguments that change the computation of a family, with the values that DynMo implements."""
    table = argument_table()
    needs = {**table["needs"], **table["families"].get(family, table["families"]["others"])}
    return {name: values for name, values in needs.items() if family != DECODER or name not in table["decoder_mapped"]}


@cache
def _known_elsewhere() -> frozenset[str]:
    """Arguments that change no logit, or that only other families use."""
    table = argument_table()
    of_families = {*table["decoder_mapped"]} | {name for needs in table["families"].values() for name in needs}
    return frozenset({*irrelevant_keys(table), *of_families})


def table_value(value: Any) -> Any:
    """A value as the table writes it: a list for a tuple, ``Type(1)`` for a member of an enum."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, OpaquePickle):
        return f"{value.type.name}({', '.join(map(str, value.arguments))})"
    return value
