"""Rate of the low-rank compression, of its three bare matrix products, and of torch's own orthogonalisation.

On CUDA where there is one, with all shapes of Optimus-CC's figure 14, else on one core with the first of them.

python tests/benchmarks/train_lowrank.py [--device cpu] [--models 2.5B,8.3B,175B]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from dynmo_train._common.console import emit
from dynmo_train.optim.compression.lowrank import FactorShape, factorize, initial_factor, reconstruct

# Width of the models of Optimus-CC's figure 14
WIDTHS = {"2.5B": 1920, "8.3B": 3072, "175B": 12288}
RANKS = (4, 12, 128)


def best_ms(run: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The fastest of some rounds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:]) * 1e3


def _contestants(matrix_ND: torch.Tensor, rank: int) -> tuple[Callable[[], None], ...]:
    """The bare products, ours, and torch's PowerSGD."""
    shape, device = FactorShape.of(matrix_ND.shape, rank), matrix_ND.device
    left, right = shape.split(torch.empty(shape.numel, device=device))
    start, out = initial_factor(shape, device, "bench", rank), torch.empty_like(matrix_ND)
    columns = start.T.contiguous()

    def bare() -> None:
        torch.mm(start, matrix_ND.T, out=left)
        torch.mm(left, matrix_ND, out=right)
        torch.mm(left.T, right, out=out)

    def ours() -> None:
        factorize(matrix_ND, start, left, right)
        reconstruct(left, right, out)

    def peer() -> None:
        product = matrix_ND @ columns
        _orthogonalize(product.unsqueeze(0))
        torch.mm(product, (matrix_ND.T @ product).T, out=out)

    return bare, ours, peer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8192, help="microbatch x sequence: 8 x 1024 in the paper")
    parser.add_argument("--models", help=f"comma-separated, of {', '.join(WIDTHS)}; all on cuda, the first on cpu")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    emit("| model | rank | bare products ms | compress + decompress ms | rate | GB/s | torch's PowerSGD ms |")
    emit("|---|---|---|---|---|---|---|")
    models = (options.models or (",".join(WIDTHS) if device.type == "cuda" else "2.5B")).split(",")
    if unknown := [name for name in models if name not in WIDTHS]:
        parser.error(f"--models {','.join(unknown)}: known are {', '.join(WIDTHS)}")
    for model in models:
        generator = torch.Generator().manual_seed(1)
        matrix_ND = torch.randn(options.rows, WIDTHS[model], generator=generator).to(device)
        for rank in RANKS:
            for _ in range(options.repeats):
                bare, ours, peer = (best_ms(run, device) for run in _contestants(matrix_ND, rank))
                rate = matrix_ND.numel() * 4 / ours / 1e6
                emit(f"| {model} | {rank} | {bare:.2f} | {ours:.2f} | {bare / ours:.3f} | {rate:.2f} | {peer:.2f} |")


if __name__ == "__main__":
    main()
