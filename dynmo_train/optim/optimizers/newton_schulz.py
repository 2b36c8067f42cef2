"""Newton-Schulz iteration: the orthogonalization of Muon, for many matrices at once.

One iteration maps a matrix X with singular values s to one with singular values ``a s + b s^3 + c s^5``, which a few
iterations bring near 1 (Jordan et al., "Muon", 2024; as ``torch.optim.Muon``, in bfloat16)::

    A = X X^T        X <- a X + (b A + c A A) X
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...config.sections.optimizer import MuonCoefficientType

Coefficients = tuple[float, float, float]
# Coefficients of each iteration, by Megatron's names. Beyond the last ones ``simple`` and ``quintic`` start again,
# ``polar_express`` keeps the last.
COEFFICIENTS: dict[MuonCoefficientType, tuple[Coefficients, ...]] = {
    # Jordan et al. 2024; torch's.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # You 2025 (modded-nanogpt), by number of the iteration.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., arXiv 2505.16932.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
# Smallest Frobenius norm by which a matrix is divided.
EPS = 1e-7


def iteration_coefficients(kind: MuonCoefficientType, steps: int) -> list[Coefficients]:
    """Return the coefficients of each of ``steps`` iterations."""
    known = COEFFICIENTS[kind]
    if kind == "polar_express":
        return [known[min(step, len(known) - 1)] for step in range(steps)]
    return [known[step % len(known)] for step in range(steps)]


def orthogonalize(matrices: Sequence[torch.Tensor], coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """Orthogonalize matrices of equal shape.

    Args:
        matrices: N matrices ``[R, C]`` in bfloat16; not changed.
        coefficients: Of each iteration.

    Returns:
        ``[N, R, C]`` in bfloat16; each has the bits that it would have alone on a CPU, and those of torch's Muon.
    """
    is_tall = matrices[0].shape[0] > matrices[0].shape[1]
    # Norms by matrix: a reduction over a stack adds in another order.
    norms = torch.stack(torch._foreach_norm(list(matrices))).clamp_(min=EPS)
    x_NRC = torch.stack([each.T if is_tall else each for each in matrices])
    x_NRC.div_(norms[:, None, None])
    for a, b, c in coefficients:
        gram_NRR = x_NRC @ x_NRC.mT
        update_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, update_NRR, x_NRC, beta=a)
    return x_NRC.mT if is_tall else x_NRC
