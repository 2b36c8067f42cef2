"""Imported checkpoints have the names, shapes, ties and sizes of the trainer's model families."""

import pytest
import torch

from dynmo_train.models.registry import family_of_manifest
from tests.unit.dynmo_ckpt import families


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_names_shapes_ties_and_sizes(name):
    m = getattr(families, name)()
    model = family_of_manifest(m)
    device = torch.device("meta")
    built = {
        f"{item.name}.{parameter}": tuple(value.shape)
        for item in model.items
        for parameter, value in model.build(item.name, device).named_parameters()
    }
    stored = {parameter: shape for parameter, shape in built.items() if parameter not in model.ties}
    assert stored == {parameter: value.shape for parameter, value in families.parameters(m).items()}
    assert dict(model.ties) == families.ties(m)
    assert model.manifest() == m
