"""Accounts for every Megatron argument of a checkpoint: mapped, known to change no logit, or refused. Pure.

Legacy Megatron, Megatron-DeepSpeed and Megatron-core store the ``argparse.Namespace`` of the training run. The table
``maps/megatron_args.json`` has the arguments of these programs from 2019 on, as ``maps/config_keys.json`` has those of
transformers:

* ``mapped``: arguments that the readers take, or that a resumed run continues with;
* ``needs``: arguments that change what is computed, with the values that our models compute, the first where it is
  absent; ``families`` has those of a Llama and those of the other families;
* ``irrelevant``: arguments that change no logit of the stored tensors, under the reason.

An argument that is nowhere in the table is refused: a fork's own option gives a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from .. import maps
from .._common.document import parse_json, short_repr
from ..errors import UnsupportedError
from ..huggingface.config_keys import irrelevant_keys, matches
from ..torch_save.pickles import Name, OpaquePickle

Args = Mapping[str, Any]
POSITION_TYPE = "position_embedding_type"
ROTARY = "use_rotary_position_embeddings"
ROTARY_TYPES = ("rope", "PositionEmbeddingType(1)")
# All that GPT-NeoX stores of its arguments (``save_ds_checkpoint`` of its ``megatron/checkpointing.py``).
NEOX_ARGS = {
    *("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("padded_vocab_size", "tokenizer_type", "model_parallel_size"),
}


@cache
def argument_table() -> Mapping[str, Any]:
    """The content of ``maps/megatron_args.json``."""
    table: Mapping[str, Any] = parse_json(resources.files(maps).joinpath("megatron_args.json").read_bytes())
    return table


def read_args(tree: Any, path: str) -> Args:
    """The arguments that a checkpoint's file holds; none where it has none, as the files of 2019.

    Raises:
        UnsupportedError: ``args`` is not a namespace, so that nothing in it could be checked; GPT-NeoX's is named.
    """
    held = tree.get("args") if isinstance(tree, Mapping) else None
    if held is None:
        return {}
    if isinstance(held, OpaquePickle) and held.type == Name("argparse", "Namespace"):
        return held.attributes
    if isinstance(held, Mapping) and held and held.keys() <= NEOX_ARGS:
        raise UnsupportedError(
            f"{path}: a checkpoint of GPT-NeoX; its args are a dict of sizes, and the position embedding, the norm, "
            "the activation and the residual are in GPT-NeoX's YAML configuration alone, which is not read. Convert a "
            "model of Llama's architecture with GPT-NeoX's tools/ckpts/convert_neox_to_hf.py --architecture llama, "
            "and give the directory that it writes; other GPT-NeoX models are not supported"
        )
    kind = str(held.type if isinstance(held, OpaquePickle) else type(held).__name__)[:80]
    raise UnsupportedError(f"{path}: its args are a {kind}; an argparse.Namespace is known")


def check_args(path: str, family: str, args: Args, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments, without those that are left out, once each of them is accounted for.

    Args:
        path: for messages.
        family: of the model.
        args: what the files hold; may be empty.
        ignored: shell patterns of arguments that are left out without a check.

    Raises:
        UnsupportedError: an unknown argument, or a value that our models do not compute.
    """
    table = argument_table()
    mapped = set(table["mapped"])
    found = {name: value for name, value in args.items() if name in mapped or not matches(name, ignored)}
    # Since 2023 Megatron states rotary positions by their type, and no longer by the flag.
    if plain(found.get(POSITION_TYPE)) in ROTARY_TYPES:
        found[ROTARY] = True
    needs = needed_values(family)
    for name, ours in needs.items():
        if plain(found.get(name, ours[0])) not in ours:
            stored = plain(found[name])
            value = (stored if isinstance(stored, str) else short_repr(stored))[:80]
            raise UnsupportedError(
                f"{path}: trained with {name} = {value}; our model computes {name} = {ours[0]} only; "
                f"--ignore-config {name} leaves it out"
            )
    unknown = sorted(set(found) - mapped - set(needs) - _known_elsewhere())
    if unknown:
        raise UnsupportedError(
            f"{path}: no rule takes the {'argument' if len(unknown) == 1 else 'arguments'} "
            f"{', '.join(name[:80] for name in unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}; an argument that may change what the model computes is not "
            "dropped; --ignore-config NAME leaves it out"
        )
    return found


def needed_values(family: str) -> dict[str, list[Any]]:
    """The arguments that change what a family computes, with the values that our model computes."""
    table = argument_table()
    return {**table["needs"], **table["families"]["llama" if family == "llama" else "others"]}


@cache
def _known_elsewhere() -> frozenset[str]:
    """Arguments that change no logit, or that only another family reads."""
    table = argument_table()
    of_families = {name for needs in table["families"].values() for name in needs}
    return frozenset({*irrelevant_keys(table), *of_families})


def plain(value: Any) -> Any:
    """A value as the table has it: lists for tuples, ``Type(1)`` for a member of an enumeration."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, OpaquePickle):
        return f"{value.type.name}({', '.join(map(str, value.arguments))})"
    return value
