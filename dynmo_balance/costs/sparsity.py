"""The effect of pruning on an item's cost: the model behind ``--vary sparsity``.

Below a threshold the sparse format is slower than the dense one, so the dense cost applies. From the threshold on,
the cost is a fixed overhead plus a part proportional to the remaining nonzeros, continuous at the threshold:

    cost(s) / dense = 1                                                     for s <  t
                    = overhead + (1 - overhead) * (1 - s) / (1 - t)         for s >= t

The form is that of measured kernels: an unstructured product reads indices as well as values, so it needs a high
sparsity before it is faster than the dense one (Gale et al. 2020, arXiv 2006.10901: 71 % on a V100 with their
kernels), and its cost does not fall to zero. The defaults are those of CSR products on a CPU, which are faster above a
sparsity of about 0.85.

Worked example: threshold 0.85 and overhead 0.15 give 0.15 + 0.85 * 0.10 / 0.15 = 0.717 at sparsity 0.9. Embedding and
head are not pruned. Stored activations do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._common.errors import UsageError
from ..formats.profile import Header
from .cost_window import ItemCosts, scaled

PRUNED_KINDS = ("attention", "cross_attention", "mlp", "layer")


@dataclass(frozen=True, kw_only=True)
class SparsityModel:
    """The cost of sparse products.

    Attributes:
        threshold: sparsity from which sparse products are used.
        overhead: share of the dense cost that remains at sparsity 1.
    """

    threshold: float = 0.85
    overhead: float = 0.15

    def factor(self, sparsity: float) -> float:
        """The cost at this ``sparsity``, within [0, 1], as a share of the dense cost."""
        # A threshold of 1 means that no sparse format is used; the formula would divide by zero.
        if sparsity < self.threshold or self.threshold >= 1.0:
            return 1.0
        return self.overhead + (1 - self.overhead) * (1 - sparsity) / (1 - self.threshold)


def pruned_costs(header: Header, costs: ItemCosts, sparsity: float, model: SparsityModel) -> ItemCosts:
    """The costs with every block at this sparsity.

    Args:
        header: of the profile.
        costs: the dense ones.
        sparsity: share of the weights that are zero, in ``[0, 1)``.
        model: of the cost of sparse products.

    Raises:
        UsageError: the sparsity is out of range.
    """
    if not 0 <= sparsity < 1:
        raise UsageError(f"sparsity must be within [0, 1), is {sparsity}")
    factor = model.factor(sparsity)
    return scaled(costs, [factor if item.kind in PRUNED_KINDS else 1.0 for item in header.items])
