"""Digests of tensors, and the first tensor that differs: pure functions."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynmo_train._common.errors import UsageError
from dynmo_train.formats.step_digests import StepDigests, StepFigures, TensorKey, finite_or_none
from dynmo_train.trainer.replay.compare_digests import (
    first_different_tensor,
    first_nonfinite_tensor,
    with_elements,
)
from dynmo_train.trainer.replay.step_digests import tensor_digest

KEY = TensorKey(direction="activation", item="layers.0.mlp", microbatch=3)


def digest_of(tensor, key=KEY):
    return tensor_digest(key, tensor)


def digests(*tensors, step=5):
    return StepDigests(
        run_id="r",
        step=step,
        loaded_step=4,
        tensors=tensors,
        figures=StepFigures(loss=1.0, grad_norm=2.0),
        updated=True,
        logged=None,
    )


def test_tensor_digest_is_blake2b_of_dtype_shape_and_bytes():
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    expected = hashlib.blake2b(b"float32 2,3\n" + values.tobytes(), digest_size=16).hexdigest()
    found = digest_of(torch.from_numpy(values.T.copy()).T)  # not contiguous
    assert (found.digest, found.dtype, found.shape, found.nonfinite) == (expected, "float32", (2, 3), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensor_digest_depends_on_every_bit(dtype):
    tensor = torch.ones(3, 4, dtype=dtype)
    other = tensor.clone()
    other.view(torch.uint8).reshape(-1)[-1] ^= 1
    assert digest_of(tensor).digest != digest_of(other).digest
    assert digest_of(tensor).digest == digest_of(tensor.clone()).digest


def test_tensor_digest_distinguishes_shapes_and_signs_of_zero():
    zeros = torch.zeros(4)
    assert len({digest_of(each).digest for each in (zeros, zeros.reshape(2, 2), -zeros, torch.zeros(0))}) == 4
    assert digest_of(torch.tensor(1.5)).shape == ()


def test_tensor_digest_counts_elements_that_are_not_finite():
    assert digest_of(torch.tensor([1.0, float("nan"), float("inf")])).nonfinite == 2
    assert digest_of(torch.arange(3)).nonfinite == 0


def test_first_different_tensor_follows_the_order_of_the_computation():
    one, other = torch.ones(4, 3), torch.ones(4, 3)
    other[2, 1] = torch.nextafter(other[2, 1], torch.tensor(2.0))
    later = replace(KEY, microbatch=4)
    first = digests(digest_of(one), digest_of(one, later))
    assert first_different_tensor(first, first) is None
    found = first_different_tensor(first, digests(digest_of(other), digest_of(other, later)))
    assert (found.key, found.reason, found.step) == (KEY, "differs", 5)
    counted = with_elements(found, {KEY: one}, {KEY: other})
    assert (counted.elements.count, counted.elements.elements, counted.elements.first) == (1, 12, (2, 1))
    assert counted.line() == (
        "step 5, activation of the forward: layers.0.mlp, microbatch 3: 1 of 12 elements differs; first at [2, 1]:"
        " 1 and 1.00000012"
    )
    assert counted.document()["different_elements"] == 1


def test_first_different_tensor_names_missing_tensors_and_other_shapes():
    one, more = digest_of(torch.ones(4)), digest_of(torch.ones(4), replace(KEY, microbatch=9))
    assert first_different_tensor(digests(one), digests(digest_of(torch.ones(2, 2)))).reason == "shape"
    assert first_different_tensor(digests(one, more), digests(one)).key == more.key
    found = first_different_tensor(digests(one), digests(one, more))
    assert (found.key, found.reason) == (more.key, "missing")
    with pytest.raises(UsageError, match="give digests of the same step"):
        first_different_tensor(digests(one), digests(one, step=6))


def test_first_nonfinite_tensor_is_named():
    finite, broken = digest_of(torch.ones(2)), digest_of(torch.tensor([1.0, float("nan")]), replace(KEY, microbatch=4))
    assert first_nonfinite_tensor(digests(finite)) is None
    found = first_nonfinite_tensor(digests(finite, broken))
    assert found.line() == "step 5, activation of the forward: layers.0.mlp, microbatch 4: 1 element not finite"


def test_figures_match_the_metrics_only_bit_for_bit():
    base = digests(digest_of(torch.ones(1)))
    assert not base.matches
    assert replace(base, logged=StepFigures(loss=1.0, grad_norm=2.0)).matches
    assert not replace(base, logged=StepFigures(loss=1.0, grad_norm=2.0 + 2**-51)).matches
    assert finite_or_none(float("nan")) is None
