"""``--bert-load``: both towers of an ict begin as a trained BERT."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._common.document import short_repr
from .checkpoint import Checkpoint, CheckpointError
from .models.chain import STATED
from .models.ict import QUERY, bert_parameter
from .models.items import ModelFamily, parameters_of
from .optim.items import HeldItems, ItemState
from .saving import RECORDS

# A tower may have other dropout, seed or scores than the BERT; these must be the same.
SAME = ("num_layers", "num_tokentypes", *(name for name in STATED if name not in RECORDS))


def check_bert(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Raise ``CheckpointError`` unless the checkpoint is a BERT of the towers' sizes; names every difference."""
    stored, wanted = checkpoint.manifest["model"], family.manifest()
    differences = [
        f"{key} is {short_repr(stored.get(key))} there and {wanted[key]!r} here"
        for key in SAME
        if stored.get(key, 0) != wanted[key]
    ]
    if stored["family"] != "bert":
        differences.insert(0, f"it is a {stored['family']}")
    if differences:
        raise CheckpointError(
            f"--bert-load {checkpoint.directory} is no BERT for these towers: {'; '.join(differences)}"
        )


def tower_reader(
    checkpoint: Checkpoint, family: ModelFamily, held: HeldItems, device: torch.device
) -> Callable[[str], ItemState]:
    """Reads what this process holds of a tower's item from a BERT; the projections of both towers begin alike."""

    def read(item: str) -> ItemState:
        fresh = parameters_of(item, family.build(item, torch.device("cpu")))
        tensors: dict[str, torch.Tensor] = {}
        for name, initial in fresh.items():
            source = bert_parameter(name)
            if source is not None:
                tensors[name] = held.own_part(name, checkpoint.load([source])[source]).to(device)
                continue
            if item == "head":
                first = f"{QUERY}.pooler"
                twin = parameters_of(first, family.build(first, torch.device("cpu")))
                whole = twin[first + name.removeprefix(item)].detach()
            else:
                whole = initial.detach()
            tensors[name] = held.own_slice(name, whole).to(device)
        return ItemState(tensors=tensors, steps={})

    return read
