"""Lazy error propagation on a layer of its own: what is exact, what is not, and why (X: activations, G: gradients)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynmo_train.optim.compression.boundary import BoundaryCodec
from dynmo_train.optim.compression.settings import CompressionSettings
from dynmo_train.parallel.device_clock import clock_for

MICROBATCHES, ROWS, COLUMNS = 24, 16, 12
CPU = torch.device("cpu")


def codec(*, rank=2, feedback=True, within_step=False):
    settings = CompressionSettings(boundary_rank=rank, feedback=feedback, feedback_within_step=within_step)
    return BoundaryCodec(settings, SimpleNamespace(memories={}), 11, clock_for(CPU))


def normal(seed):
    return torch.randn(MICROBATCHES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def sent(made, gradients, scales=None):
    """What the stage before gets of each microbatch, with the loss scale taken off, and what is owed behind each."""
    arrived, owed = [], []
    for at, gradient in enumerate(gradients):
        scale = scales[at] if scales else 1.0
        made.begin_step(scale)
        out = torch.empty_like(gradient)
        made.decode(made.encode("layers.1", "hidden", gradient * scale), out, "layers.1")
        arrived.append(out / scale)
        memories = made.store.memories["layers.1"]
        owed.append(
            next((memories[name][0].clone() for name in memories if name.endswith("error")), torch.zeros_like(out))
        )
    return torch.stack(arrived), torch.stack(owed)


@pytest.mark.parametrize("scales", [None, [2.0 ** (at // 8) for at in range(MICROBATCHES)]])
def test_boundary_codec_error_plus_received_is_sent(scales):
    """At every point: the sum of what arrived, and what is owed, is the sum of the gradients."""
    gradients = normal(1)
    arrived, owed = sent(codec(), gradients, scales)
    torch.testing.assert_close(arrived.cumsum(0) + owed, gradients.cumsum(0), rtol=1e-4, atol=1e-4)
    assert owed[-1].norm() > gradients[-1].norm()


def test_boundary_codec_within_step_resets_the_error():
    gradients = normal(8)
    made = codec(within_step=True)
    arrived, owed = sent(made, gradients)
    assert owed.norm() > 0
    # Each microbatch is a step of its own here: the same as without feedback
    torch.testing.assert_close(arrived, sent(codec(feedback=False), gradients)[0])


def weight_error(activations, arrived, gradients):
    """How far the gradient of a linear layer's weight is off, of its size."""
    wrong = torch.einsum("mni,mnj->ij", activations, arrived - gradients)
    return wrong, float(wrong.norm() / torch.einsum("mni,mnj->ij", activations, gradients).norm())


def test_boundary_codec_weight_error_is_error_times_change():
    activations, gradients = normal(2), normal(3)
    arrived, owed = sent(codec(), gradients)
    wrong, _ = weight_error(activations, arrived, gradients)
    changes = activations[1:] - activations[:-1]
    expected = torch.einsum("mni,mnj->ij", changes, owed[:-1]) - activations[-1].T @ owed[-1]
    torch.testing.assert_close(wrong, expected, rtol=1e-4, atol=1e-3)


def test_boundary_codec_feedback_corrects_the_common_part():
    gradients = normal(4) + normal(5)[0]
    common, apart = normal(6)[:1].expand(MICROBATCHES, -1, -1), normal(7)

    def off(activations, *, feedback):
        return weight_error(activations, sent(codec(feedback=feedback), gradients)[0], gradients)[1]

    assert off(common, feedback=True) < off(common, feedback=False) / 2
    # To rows whose activations are others it brings gradients that are not theirs
    assert off(apart, feedback=True) > off(apart, feedback=False)


def test_boundary_stats_compare_error_and_activation_change():
    activations, gradients = normal(9), normal(10)
    settings = CompressionSettings(boundary_rank=2, feedback=True, check_error=True)
    made = BoundaryCodec(settings, SimpleNamespace(memories={}), 11, clock_for(CPU))
    _, owed = sent(codec(), gradients)
    made.begin_step(1.0)
    for activation, gradient in zip(activations, gradients, strict=True):
        made.encode("layers.1", "hidden", gradient, activation)
    document = made.stats["layers.1"].document(clock_for(CPU))
    changes = activations[1:] - activations[:-1]
    cosines = torch.nn.functional.cosine_similarity(owed[:-1].flatten(1), changes.flatten(1))
    assert document["error_change_cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert document["activation_change_mean"] == pytest.approx(float(changes.mean()), abs=1e-6)
