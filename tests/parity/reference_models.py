"""The reference model of ``dynmo-ckpt``, next to the trainer's modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from dynmo_ckpt.native.checkpoint import open_native
from dynmo_ckpt.operations.reference_model import model_logits
from dynmo_train.models.layer_list import ModelFamily
from tests.parity.item_stream import build_all, parameters, run
from tests.unit.dynmo_ckpt import native_checkpoints


def save_native(family: ModelFamily, folder: Path) -> dict[str, nn.Module]:
    """Save a checkpoint of random modules in ``folder``, and return the modules."""
    modules, model = build_all(family), family.manifest()
    arrays = {name: p.detach().numpy() for name, p in parameters(modules).items() if name not in family.ties}
    native_checkpoints.save(folder, arrays, model, partition=native_checkpoints.even_stages(model, 1))
    return modules


def check_logits(family: ModelFamily, modules: dict[str, nn.Module], folder: Path) -> None:
    """Compare the logits of the checkpoint in ``folder``, by the reference model, with those of the modules."""
    tokens = np.random.default_rng(1).integers(0, 50, (2, 12))
    ids = torch.from_numpy(tokens[:1])
    with torch.no_grad():
        for module in modules.values():
            module.eval()
        values = run(family, modules, {"ids": ids, "labels": ids})
        expected = modules["head"].logits(values["before.hidden"])[0]
    step = next(folder.glob("**/manifest.json")).parent
    logits, _ = model_logits(open_native(step), tokens)
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=1e-4)
