"""Processor time of an expert layer, forward and backward, and the rows that it computes, by capacity factor.

Programs take turns in one process, on the same input, router and Mixtral experts (gated SiLU, no biases, top-2):

* ``ours``, ``ours, padded``: ``MoeMlp``, with its loop over experts.
* ``ours, grouped``: ``MoeMlp`` with ``torch.nn.functional.grouped_mm``, which it uses on CUDA only.
* ``masked``: every chosen row is computed, and the weights of dropped rows are set to zero afterwards.
* ``transformers eager``, ``transformers grouped_mm``: ``MixtralSparseMoeBlock``, which has no capacity.

    python tests/benchmarks/train_experts.py [--threads 1] [--dtype float32] [--repeats 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.layers import grouped_linear

CALLS = 5
Program = Callable[[torch.Tensor], torch.Tensor]


def layer(options: argparse.Namespace, factor: float | None, *, padded: bool = False) -> MoeMlp:
    """Our layer, with the same weights each time it is made."""
    torch.manual_seed(1)
    moe = MoeShape(num_experts=options.experts, top_k=2, capacity_factor=factor, pad_to_capacity=padded)
    made = MoeMlp(
        moe=moe,
        width=options.width,
        inner=options.inner,
        activation="swiglu",
        norm=torch.nn.Identity(),
        device=torch.device("cpu"),
        bias=False,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02)
        # Uneven loads: an expert of larger scores is chosen more often.
        made.router.weight.mul_(torch.linspace(2.0, 6.0, options.experts)[:, None])
    return made.to(getattr(torch, options.dtype))


def masked(made: MoeMlp, x_BTD: torch.Tensor) -> torch.Tensor:
    """The layer as a plain loop: compute all chosen rows, then set the weights of dropped ones to zero."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    values, indices = made.router(x_ND).float().softmax(-1).topk(made.moe.top_k, -1)
    values = values / values.sum(-1, keepdim=True)
    y_ND = torch.zeros_like(x_ND)
    for number, expert in made.experts.items():
        token, choice = torch.where(indices == int(number))
        weight = values[token, choice]
        if made.moe.capacity_factor is not None:
            largest = weight.topk(min(made.moe.capacity(len(x_ND)), len(weight))).indices
            weight = weight * torch.zeros_like(weight).scatter(0, largest, 1.0)
        y_ND = y_ND.index_add(0, token, expert(x_ND[token]) * weight[:, None].to(x_ND.dtype))
    return x_BTD + y_ND.view_as(x_BTD)


def mixtral(made: MoeMlp, implementation: str) -> torch.nn.Module | None:
    """The block of transformers with the weights of ``made``; None where it is not installed."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    first = made.experts["0"]
    config = MixtralConfig(
        hidden_size=first.fc2.weight.shape[0],
        intermediate_size=first.fc2.weight.shape[1],
        num_local_experts=made.moe.num_experts,
        num_experts_per_tok=made.moe.top_k,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config).to(first.fc2.weight.dtype)
    experts = list(made.experts.values())
    with torch.no_grad():
        block.gate.weight.copy_(made.router.weight)
        block.experts.gate_up_proj.copy_(torch.stack([torch.cat([e.gate.weight, e.up.weight]) for e in experts]))
        block.experts.down_proj.copy_(torch.stack([e.fc2.weight for e in experts]))
    return block


def programs(options: argparse.Namespace, factor: float | None) -> dict[str, tuple[torch.nn.Module, Program]]:
    """The programs that have this capacity factor, with the module that has their weights."""

    def grouped(made: MoeMlp, x: torch.Tensor) -> torch.Tensor:
        usual, grouped_linear.is_fast_device = grouped_linear.is_fast_device, lambda _rows: True
        try:
            return made(x).output
        finally:
            grouped_linear.is_fast_device = usual

    made = layer(options, factor)
    found: dict[str, tuple[torch.nn.Module, Program]] = {
        "ours": (made, lambda x: made(x).output),
        "ours, grouped": (made, lambda x: grouped(made, x)),
        "masked": (made, lambda x: masked(made, x)),
    }
    if factor is not None:
        padded = layer(options, factor, padded=True)
        found["ours, padded"] = (padded, lambda x: padded(x).output)
        return found
    for implementation in ("eager", "grouped_mm"):
        block = mixtral(made, implementation)
        if block is not None:
            found[f"transformers {implementation}"] = (block, lambda x, block=block: x + block(x))
    return found


def computed_rows(module: torch.nn.Module, program: Program, x: torch.Tensor, width: int) -> int:
    """Rows of the products with the experts' last weights."""
    counted = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: object, types: object, args: tuple = (), kwargs: dict | None = None):
            nonlocal counted
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and args[0].shape[1] == width:
                counted += len(args[0])
            if function is torch.ops.aten._grouped_mm.default and args[0].shape[1] == width:
                counted += int(args[2][-1])
            return result

    with torch.no_grad(), Count():
        program(x)
    return counted


def seconds(module: torch.nn.Module, program: Program, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Mean processor time of a forward and backward."""
    begin = time.process_time()
    for _ in range(CALLS):
        module.zero_grad()
        x.grad = None
        program(x).backward(grad)
    return (time.process_time() - begin) / CALLS


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("threads", 1), ("experts", 8), ("width", 512), ("inner", 2048), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(2)
    shape, dtype = (1, options.tokens, options.width), getattr(torch, options.dtype)
    x, grad = torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(shape, dtype=dtype)
    sys.stdout.write(f"torch {torch.__version__}, {options}\n\n")
    sys.stdout.write("| capacity factor | program | rows computed | processor ms |\n|---|---|---|---|\n")
    for factor in (None, 1.0, 0.5, 0.25):
        found = programs(options, factor)
        outputs = {name: program(x).detach() for name, (_, program) in found.items()}
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        for name, output in outputs.items():
            torch.testing.assert_close(output, outputs["ours"], rtol=tolerance, atol=tolerance, msg=name)
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(options.repeats):
            for name, (module, program) in found.items():
                times[name].append(seconds(module, program, x, grad))
        for name, (module, program) in found.items():
            rows = computed_rows(module, program, x, options.inner)
            each = ", ".join(f"{1e3 * value:.0f}" for value in times[name])
            sys.stdout.write(f"| {factor or 'none'} | {name} | {rows:,} | {each} |\n")


if __name__ == "__main__":
    main()
