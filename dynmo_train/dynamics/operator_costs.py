"""Measures what each dynamic technique costs on a device: forward, backward by input, backward by weight.

The layers are those that a run trains, with everything that a technique adds: routing, sorting, exit heads, gathering
and scattering of tokens, sparse formats. Each is measured in turns with its dense counterpart::

    case       dense counterpart        setting
    dense      itself                   -; also embedding and head
    frozen     attention, MLP           no gradient: forward only
    pruned     attention, MLP           sparsity, format of the products
    depths     attention + MLP          capacity: share of the tokens that a routed block processes
    exited     attention + MLP          active share: tokens that have not left before
    exit       MLP                      an exit after the MLP: confidence measure, sampled tokens and vocabulary
    sparse     attention                buckets
    experts    MLP                      number of experts, experts per token

The backward by input is that of frozen weights; the backward by weight is the rest of the whole backward.
"""

from __future__ import annotations

import contextlib
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from .. import __version__
from .._common.document import envelope
from ..models.attention.hashed_attention import FLEX_TILE, SMALLEST_TILE
from ..models.attention.self_attention import SelfAttention
from ..models.experts.moe_shape import MoeShape
from ..models.families.gpt import Gpt, GptShape
from ..models.layer_list import ItemOutput, masks_of
from ..models.layers.sparse_formats import BLOCK, CSR, SEMI_STRUCTURED, TRANSPOSABLE, SparseTable, prefix_of
from ..models.techniques.early_exit import EXITED, ExitSettings, Measure
from ..models.techniques.mixture_of_depths import DepthSettings
from ..models.techniques.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings
from .tuning import forms_of, mask_with, timed

FORMAT, VERSION = "dynmo.operator_costs", 1
ACTIVE_SHARES = (0.125, 0.25, 0.5, 0.75)
BUCKETS = (2, 4, 8, 16, 32)
# Losses of an exit, by the share of its tokens and the number of sampled ids; LayerSkip and EE-LLM use all of both.
EXIT_LOSSES = ((1.0, 0), (0.125, 2048))
STRUCTURED = "structured"
SPARSITIES = {
    CSR: (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    BLOCK: (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    SEMI_STRUCTURED: (0.5,),
    TRANSPOSABLE: (0.5,),
    STRUCTURED: (0.5, 0.9),
}
CASES = ("dense", "frozen", "pruned", "depths", "exited", "exit", "sparse", "experts")


@dataclass(frozen=True, kw_only=True)
class OperatorShape:
    """The model whose layers are measured.

    Attributes:
        hidden_size: model width D.
        ffn_hidden_size: width inside the MLP and each expert.
        num_attention_heads: number of heads.
        vocab_size: vocabulary size, for heads and exits.
        num_experts: experts of a layer.
        micro_batch_size: samples of a microbatch.
        sequence_lengths: tokens of a sample; each is measured.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_experts: int
    micro_batch_size: int
    sequence_lengths: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "sequence_lengths": list(self.sequence_lengths)}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one microbatch in nanoseconds, the minimum of the repetitions."""

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int

    @property
    def total_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_input_ns + self.backward_weight_ns


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """A measured row.

    Attributes:
        case: one of ``CASES``.
        operator: ``embedding``, ``attention``, ``mlp``, ``layer`` (attention and MLP) or ``head``.
        setting: what was varied, by name.
        sequence_length: tokens of a sample.
        times: of the operator.
        dense: of its dense counterpart, measured in turns with it.
        spread: (maximum - minimum) / median of the repetitions of forward and backward together.
    """

    case: str
    operator: str
    setting: Mapping[str, float | str]
    sequence_length: int
    times: Times
    dense: Times
    spread: float

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "case": self.case,
            "operator": self.operator,
            "setting": dict(self.setting),
            "sequence_length": self.sequence_length,
            **vars(self.times),
            "dense": dict(vars(self.dense)),
            "spread": round(self.spread, 3),
        }


Call = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A layer to measure: its module, and how it is called with the stream ``[B, T, D]``."""

    name: str
    module: nn.Module
    call: Call


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its dense counterpart; ``trains`` is false where it runs without gradient."""

    name: str
    setting: Mapping[str, float | str] = field(default_factory=dict)
    operator: Operator
    dense: Operator
    trains: bool = True


class OperatorCosts:
    """Builds and measures the cases of one sequence length.

    Args:
        shape: the model.
        tokens: tokens of a sample T.
        device: where to measure; float32 on CPU, bfloat16 on CUDA.
        seed: of weights and inputs.
    """

    def __init__(self, shape: OperatorShape, tokens: int, device: torch.device, *, seed: int = 1) -> None:
        self.shape, self.tokens, self.device, self.seed = shape, tokens, device, seed
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def _family(self, settings: DynamicSettings | None = None, moe: MoeShape | None = None) -> Any:
        shape = self.shape
        base = Gpt(
            GptShape(
                num_layers=2,
                hidden_size=shape.hidden_size,
                ffn_hidden_size=shape.ffn_hidden_size,
                num_attention_heads=shape.num_attention_heads,
                max_position_embeddings=self.tokens,
                vocab_size=shape.vocab_size,
                padded_vocab_size=shape.vocab_size,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                seed=self.seed,
                moe=moe,
            )
        )
        if settings is None:
            return base
        return DynamicFamily(base, settings, seed=self.seed, width=shape.hidden_size, std=0.02)

    @cached_property
    def _labels_BT(self) -> torch.Tensor:
        size = (self.shape.micro_batch_size, self.tokens)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.shape.vocab_size, size, generator=generator).to(self.device)

    def _build(self, item: str, family: Any = None) -> nn.Module:
        module: nn.Module = (family or self._dense_family).build(item, self.device).to(self.dtype)
        return module.train()

    @cached_property
    def _dense_family(self) -> Any:
        return self._family()

    def _operator(self, name: str, family: Any = None, layer: int = 0, **more: Any) -> Operator:
        """``attention``, ``mlp`` or ``layer`` (both, or the one item of a routed block) of a family."""
        items = [f"layers.{layer}.attention", f"layers.{layer}.mlp"]
        if name != "layer":
            items = [f"layers.{layer}.{name}"]
        listed = {item.name: item for item in (family or self._dense_family).items}
        if items[0] not in listed:
            items = [f"layers.{layer}"]
        modules = nn.ModuleList(self._build(item, family) for item in items)
        arguments = [
            [more[name] for name in (*listed[item].reads[1:], *listed[item].inputs) if name in more] for item in items
        ]

        def call(x_BTD: torch.Tensor) -> Any:
            extra = []
            for module, given in zip(modules, arguments, strict=True):
                result = module(x_BTD, *given)
                x_BTD = result.output if isinstance(result, ItemOutput) else result
                extra += list(result.losses.values()) if isinstance(result, ItemOutput) else []
            return [x_BTD, *extra]

        return Operator(name=name, module=modules, call=call)

    @cached_property
    def _dense(self) -> dict[str, Operator]:
        operators = {name: self._operator(name) for name in ("attention", "mlp", "layer")}
        head = self._build("head")
        operators["head"] = Operator(name="head", module=head, call=lambda x: [head(x, self._labels_BT)])
        table = self._build("embedding")
        operators["embedding"] = Operator(name="embedding", module=table, call=lambda _: [table(self._labels_BT)])
        return operators

    def cases(self, names: Sequence[str] = CASES) -> Iterator[Case]:
        """The cases of the given ``names``, in order; one at a time, so that only two modules are in memory."""
        builders: dict[str, Callable[[], Iterator[Case]]] = {
            "dense": self._dense_cases,
            "frozen": self._frozen_cases,
            "pruned": self._pruned_cases,
            "depths": self._depth_cases,
            "exited": self._exited_cases,
            "exit": self._exit_cases,
            "sparse": self._sparse_cases,
            "experts": self._expert_cases,
        }
        for name in names:
            yield from builders[name]()

    def _dense_cases(self) -> Iterator[Case]:
        for operator in self._dense.values():
            yield Case(name="dense", operator=operator, dense=operator)

    def _frozen_cases(self) -> Iterator[Case]:
        for name in ("attention", "mlp"):
            yield Case(name="frozen", operator=self._dense[name], dense=self._dense[name], trains=False)

    def _pruned_cases(self) -> Iterator[Case]:
        for form, sparsities in SPARSITIES.items():
            for name in ("attention", "mlp"):
                layers = masks_of("", self._dense[name].module).values()
                formats = [forms_of(each.outputs, each.weight.shape[1], self.device.type) for each in layers]
                if form != STRUCTURED and any(form not in each for each in formats):
                    continue
                for sparsity in sparsities:
                    operator = self._operator(name)
                    self._prune(operator.module, form, sparsity)
                    setting: dict[str, float | str] = {"form": form, "sparsity": sparsity}
                    yield Case(name="pruned", setting=setting, operator=operator, dense=self._dense[name])

    def _prune(self, module: nn.Module, form: str, sparsity: float) -> None:
        """Prune the attention or MLP in ``module`` to a sparsity in a format."""
        prefix = prefix_of(self.device.type)
        for name, layer in masks_of("", module).items():
            outputs, inputs = layer.weight.shape
            if form == STRUCTURED:
                mask = self._structured_mask(name, outputs, inputs, sparsity, module)
            else:
                mask = mask_with(sparsity, outputs, inputs, form)
            mask = mask.to(self.device)
            with torch.no_grad():
                layer.weight.mul_(mask)
            table = SparseTable(thresholds={f"{prefix}{form}": 0.0}, structured=form == STRUCTURED)
            layer.set_mask(mask, table)

    def _structured_mask(
        self, name: str, outputs: int, inputs: int, sparsity: float, module: nn.Module
    ) -> torch.Tensor:
        """A mask of whole heads, or of whole columns of the MLP: rows of the first layer, columns of the last."""
        attention = next((each for each in module.modules() if isinstance(each, SelfAttention)), None)
        units = self.shape.ffn_hidden_size if attention is None else self.shape.num_attention_heads
        remaining = max(1, round((1.0 - sparsity) * units)) / units
        mask = torch.zeros(outputs, inputs, dtype=torch.bool)
        if name.endswith(("dense.weight", "fc2.weight")):
            mask[:, : round(remaining * inputs)] = True
        else:
            mask[: round(remaining * outputs)] = True
        return mask

    def _depth_cases(self) -> Iterator[Case]:
        for share in ACTIVE_SHARES:
            depths = DepthSettings(capacity=share, every=1, aux_weight=0.01)
            family = self._family(DynamicSettings(depths=depths))
            operator = self._operator("layer", family)
            yield Case(name="depths", setting={"capacity": share}, operator=operator, dense=self._dense["layer"])

    def _exits(self, measure: Measure = "softmax", token_share: float = 1.0, vocabulary_samples: int = 0) -> Any:
        exits = ExitSettings(
            layers=(0,),
            loss_weight=0.3,
            threshold=0.9,
            measure=measure,
            token_share=token_share,
            vocabulary_samples=vocabulary_samples,
        )
        return self._family(DynamicSettings(exits=exits))

    def _exited_cases(self) -> Iterator[Case]:
        generator = torch.Generator().manual_seed(self.seed)
        for share in ACTIVE_SHARES:
            count = max(1, math.ceil(share * self.tokens))
            order_BT = torch.rand(self.shape.micro_batch_size, self.tokens, generator=generator).argsort(1)
            exited_BT = (order_BT >= count).to(self.device, self.dtype)
            operator = self._operator("layer", self._exits(), layer=1, **{EXITED: exited_BT})
            setting: dict[str, float | str] = {"active_share": count / self.tokens}
            yield Case(name="exited", setting=setting, operator=operator, dense=self._dense["layer"])

    def _exit_cases(self) -> Iterator[Case]:
        for measure in get_args(Measure):
            for token_share, samples in EXIT_LOSSES:
                samples = min(samples, self.shape.vocab_size // 2)
                operator = self._operator("mlp", self._exits(measure, token_share, samples), labels=self._labels_BT)
                setting: dict[str, float | str] = {
                    "measure": measure,
                    "loss_token_share": token_share,
                    "loss_vocabulary": samples or self.shape.vocab_size,
                }
                yield Case(name="exit", setting=setting, operator=operator, dense=self._dense["mlp"])

    def _sparse_cases(self) -> Iterator[Case]:
        block = FLEX_TILE
        for buckets in BUCKETS:
            if buckets * SMALLEST_TILE > self.tokens:
                continue
            sparse = SparseAttentionSettings(buckets=buckets, block=block)
            operator = self._operator("attention", self._family(DynamicSettings(sparse_attention=sparse)))
            setting: dict[str, float | str] = {"buckets": buckets, "block": block}
            yield Case(name="sparse", setting=setting, operator=operator, dense=self._dense["attention"])

    def _expert_cases(self) -> Iterator[Case]:
        for top_k in (1, 2):
            moe = MoeShape(num_experts=self.shape.num_experts, top_k=top_k, aux_loss_coeff=0.01)
            operator = self._operator("mlp", self._family(moe=moe))
            setting: dict[str, float | str] = {"experts": moe.num_experts, "experts_per_token": top_k}
            yield Case(name="experts", setting=setting, operator=operator, dense=self._dense["mlp"])

    def measure(self, case: Case, repeats: int) -> OperatorCost:
        """Measure a case in turns with its dense counterpart.

        Args:
            case: one of ``cases``.
            repeats: timed repetitions of each, of which the fastest counts.
        """
        x_BTD = torch.randn(
            self.shape.micro_batch_size,
            self.tokens,
            self.shape.hidden_size,
            generator=torch.Generator().manual_seed(self.seed),
        ).to(self.device, self.dtype)
        measured: list[list[_Sample]] = [[], []]
        # The first round is not counted: it allocates memory and selects kernels.
        for number in range(repeats + 1):
            for samples, operator, trains in zip(
                measured, (case.operator, case.dense), (case.trains, True), strict=True
            ):
                sample = _sample(operator, x_BTD, trains=trains)
                if number:
                    samples.append(sample)
        totals = [sample.forward_ns + sample.backward_ns for sample in measured[0]]
        return OperatorCost(
            case=case.name,
            operator=case.operator.name,
            setting=case.setting,
            sequence_length=self.tokens,
            times=_minimum(measured[0]),
            dense=_minimum(measured[1]),
            spread=(max(totals) - min(totals)) / max(1, statistics.median(totals)),
        )


@dataclass(frozen=True, kw_only=True)
class _Sample:
    forward_ns: int
    backward_ns: int
    backward_input_ns: int


def _minimum(samples: Sequence[_Sample]) -> Times:
    """The fastest of each part: other load on the machine only adds to a time."""
    whole, by_input = (min(getattr(each, name) for each in samples) for name in ("backward_ns", "backward_input_ns"))
    return Times(
        forward_ns=min(each.forward_ns for each in samples),
        backward_input_ns=min(whole, by_input),
        backward_weight_ns=max(0, whole - by_input),
    )


def _sample(operator: Operator, x_BTD: torch.Tensor, *, trains: bool) -> _Sample:
    parameters = list(operator.module.parameters())

    def run(*, weights: bool) -> tuple[int, int]:
        for parameter in parameters:
            parameter.requires_grad_(weights)
            parameter.grad = None
        x = x_BTD.detach().requires_grad_()
        forward_ns, outputs = _timed(x.device, lambda: operator.call(x))
        outputs = [each for each in outputs if each.requires_grad]
        if not outputs:
            return forward_ns, 0
        gradients = [torch.ones_like(each) for each in outputs]
        return forward_ns, _timed(x.device, lambda: torch.autograd.backward(outputs, gradients))[0]

    if not trains:
        with torch.no_grad():
            forward_ns, _ = _timed(x_BTD.device, lambda: operator.call(x_BTD))
        return _Sample(forward_ns=forward_ns, backward_ns=0, backward_input_ns=0)
    forward_ns, backward_ns = run(weights=True)
    _, backward_input_ns = run(weights=False)
    return _Sample(forward_ns=forward_ns, backward_ns=backward_ns, backward_input_ns=backward_input_ns)


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[int, Any]:
    """Nanoseconds of a call, as in :func:`tuning.timed`, and its result."""
    seconds, result = timed(device, run)
    return round(seconds * 1e9), result


def device_name(device: torch.device) -> str:
    """The name of the device, such as ``NVIDIA H200``, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cost_document(shape: OperatorShape, device: torch.device, costs: Sequence[OperatorCost]) -> dict[str, Any]:
    """The file of ``dynmo-train measure-costs``.

    Args:
        shape: what was measured.
        device: where.
        costs: the rows.
    """
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {
        **envelope(FORMAT, VERSION, f"dynmo-train {__version__}"),
        "device": {"name": device_name(device), "type": device.type, "threads": threads},
        "torch": torch.__version__,
        "dtype": dtype,
        "shape": shape.document(),
        "rows": [cost.document() for cost in costs],
    }
