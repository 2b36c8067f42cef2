"""A step reads the device once.

Meta tensors stand in for a device: they have no values, so that every read of one fails.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining.stage import PipelineStage

from dynmo_train.models.layers import grouped_linear
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings
from dynmo_train.models.vocabulary.cross_entropy import _LinearCrossEntropy
from dynmo_train.parallel.context_parallel import ContextRegion
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import Groups, World
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer import engine as engine_module
from tests.distributed.families import SAMPLES
from tests.distributed.scenario import MICROBATCHES, Scenario, batch_of, engine_of

META = torch.device("meta")


@pytest.fixture
def meta_world():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield World(rank=0, size=1, device=META, host="here", dims=ParallelDims(), groups=Groups(pipeline=dist.group.WORLD))
    dist.destroy_process_group()


class CountedCopy:
    """Stands in for ``HostCopy``: counts, and answers with ones."""

    count = 0

    def __init__(self, source: torch.Tensor) -> None:
        assert source.device == META
        self.length = source.numel()
        CountedCopy.count += 1

    def read(self) -> torch.Tensor:
        return torch.ones(self.length)


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(engine_module, "HostCopy", CountedCopy)
    monkeypatch.setattr(CountedCopy, "count", 0)
    # torch agrees on static shapes when a schedule is built: once per partition, not per step.
    monkeypatch.setattr(PipelineStage, "_warmup_backward_result", lambda *_, **__: torch.ones(()))

    def fused_step(optimizer):
        # The kernel has no form for meta tensors. What it reads lies on the device.
        assert optimizer.grad_scale.device == optimizer.found_inf.device == META

    monkeypatch.setattr(torch.optim.AdamW, "step", fused_step)
    # As on a GPU of today.
    monkeypatch.setattr(grouped_linear, "is_fast_device", lambda rows: rows.dtype == torch.bfloat16)
    return CountedCopy


EXITS = [
    ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.05, measure="softmax"),
    ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.05, measure="saturation"),
    ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.05, measure="classifier"),
]
PLAIN = {"prune": False, "freeze": ()}
WITH_EXPERTS = [model for model in SAMPLES if "mixtral" in model or model in ("sinks", "deepseek")]


@pytest.mark.complete
@pytest.mark.parametrize(
    "scenario",
    [
        *(Scenario(model=model, **PLAIN) for model in ("gpt", *SAMPLES) if model not in WITH_EXPERTS),
        # In float32 the experts run one by one, on numbers of rows that the host has to know.
        *(Scenario(model=model, precision="bf16", **PLAIN) for model in WITH_EXPERTS),
        # Padding in half precision is sequences of variable length.
        *(Scenario(model=model, precision="bf16", dropout=0.0, **PLAIN) for model in ("bert", "ict", "t5")),
        Scenario(precision="bf16", **PLAIN),
        Scenario(precision="fp16", **PLAIN),
        Scenario(precision="fp8", **PLAIN),
        Scenario(recompute=True, **PLAIN),
        Scenario(tied=False, schedule="gpipe", freeze=((1, 1),), prune=False),
        Scenario(tied=False, shards=3, precision="bf16", schedule="1f1b", **PLAIN),
        *(Scenario(dynamic=DynamicSettings(exits=each), precision="bf16", **PLAIN) for each in EXITS),
    ],
    ids=lambda scenario: f"{scenario.model}-{scenario.precision}-{scenario.schedule}-{scenario.recompute}",
)
def test_engine_step_reads_the_device_once(meta_world, copies, scenario):
    if scenario.precision == "fp8":
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    engine = engine_of(scenario, meta_world)
    for step in (1, 2, 3):
        engine.train_step(batch_of(step, scenario.model), sampled=False)
        engine.after_step(step)
    assert copies.count == 3


@pytest.mark.parametrize("model", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_engine_float16_loss_gets_the_scale_in_the_forward(meta_world, monkeypatch, model, schedule):
    """The factor that the forward rounds with is that of the backward, over changes of the scale."""
    world = replace(meta_world, device=torch.device("cpu"))
    pairs = []
    backward = _LinearCrossEntropy.backward

    def watched(ctx, *grads):
        pairs.append((ctx.factor, float(grads[0])))
        return backward(ctx, *grads)

    monkeypatch.setattr(_LinearCrossEntropy, "backward", staticmethod(watched))
    engine = engine_of(Scenario(model=model, schedule=schedule, precision="fp16", **PLAIN), world)
    for step in range(1, 6):
        engine.train_step(batch_of(step, model), sampled=False)
    assert len({factor for factor, _ in pairs}) > 1
    assert [factor for factor, _ in pairs] == [scale for _, scale in pairs]


@pytest.mark.complete
@pytest.mark.parametrize(("model", "precision"), [("gpt", "fp32"), ("gpt-packed", "fp32"), ("llama-packed", "bf16")])
def test_engine_step_of_a_context_rank_reads_the_device_once(meta_world, copies, monkeypatch, model, precision):
    """A rank of two without communication: its batch and its boundaries have half of the tokens."""
    monkeypatch.setattr(engine_module, "context_region", lambda _, **__: ContextRegion(None, 1, 2))
    scenario = Scenario(model=model, precision=precision, dropout=0.0, **PLAIN)
    settings, family = scenario.settings(), scenario.family()
    pipeline = replace(settings.pipeline, boundary=settings.pipeline.boundary.cut_along_tokens(2))
    start = uniform_partition(family.items, 1, 1)
    engine = engine_module.Engine(family, replace(settings, pipeline=pipeline), start, meta_world)
    engine.build()
    for step in (1, 2):
        engine.train_step(batch_of(step, model).of_context(1, 2, MICROBATCHES), sampled=False)
        engine.after_step(step)
    assert copies.count == 2


def test_engine_launched_steps_read_the_device_when_collected(meta_world, copies, monkeypatch):
    reads = []
    monkeypatch.setattr(CountedCopy, "read", lambda copy: reads.append(copy) or torch.ones(copy.length))
    engine = engine_of(Scenario(**PLAIN), meta_world)
    assert engine.launch_step(batch_of(1), sampled=False) is None
    assert not reads
    assert engine.launch_step(batch_of(2), sampled=False) is not None
    assert len(reads) == 1
    assert engine.collect() is not None
    assert engine.collect() is None
