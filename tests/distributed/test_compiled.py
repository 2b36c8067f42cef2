"""Compiled items: placement and resuming change no bit, and compiled items compute the same as eager ones.

Most of this runs on the backend that traces, differentiates and runs torch's own kernels: code for each item would take
half a minute to build. It gives the bits of what is not compiled, dropout included.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynmo_train._common.errors import UsageError
from dynmo_train.dynamics.pruning import CubicSchedule
from dynmo_train.dynamics.pruning_units import PruningRule
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.models.compiled import (
    CompiledMethod,
    CompileSettings,
    check_compiler,
    compile_item,
    is_compiled,
    num_compiled_graphs,
)
from dynmo_train.models.layers.feed_forward import Mlp
from dynmo_train.models.sharding import cut_item
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings, SparseAttentionSettings
from dynmo_train.models.vocabulary.head import Head
from dynmo_train.optim.item_state import ItemState
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.random_stream import ItemStream, drawing_from
from dynmo_train.parallel.seeding import seeded
from dynmo_train.parallel.tensor_parallel import TensorRegion
from dynmo_train.pipeline.partition import Partition
from dynmo_train.trainer.engine import Engine
from tests.distributed.families import DROPLESS, EXPERTS, PADDED, SAMPLES
from tests.distributed.layouts import Layout, play_layouts
from tests.distributed.scenario import Scenario, batch_of, engine_of, fingerprint
from tests.distributed.whole_runs import events, lines, train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

AOT = "aot_eager"
PLAIN = Scenario(steps=6, prune=False, freeze=((3, 1),))
NAMES = tuple(item.name for item in PLAIN.family().items)
MOVED = Partition.looped((NAMES[:3], NAMES[3:]), 2)
MOVED_BACK = Partition.looped((NAMES[:6], NAMES[6:]), 2)


def counted(world, function, *arguments):
    """The result of a function, and the graph breaks of this process during it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = function(world, *arguments)
    return result, dict(torch._dynamo.utils.counters["graph_break"])


def play(world, scenario, resume_at=None):
    """Losses, norms, a validation loss and weights; after step ``resume_at`` the run resumes in a new engine."""
    engine, figures = engine_of(scenario, world), []
    compiled = [name for name, module in engine.item_store.modules.items() if is_compiled(module)]
    assert compiled == (list(engine.local_names) if scenario.compiled else [])
    for step in range(1, scenario.steps + 1):
        result = engine.train_step(scenario.batch(step), sampled=step == 3)
        figures.append((result.loss, result.grad_norm))
        engine.after_step(step)
        if step in dict(scenario.moves):
            engine.repartition(dict(scenario.moves)[step])
        if step == resume_at:
            engine = again(engine, scenario, step)
    figures.append((engine.evaluate([scenario.batch(99)]), 0.0))
    return figures, fingerprint(engine)


def again(engine, scenario, step):
    states = {name: engine.item_store.export(name) for name in engine.local_names}
    saved = {
        name: ItemState(tensors={key: t.clone() for key, t in state.tensors.items()}, steps=state.steps)
        for name, state in states.items()
    }
    fresh = Engine(engine.family, scenario.settings(), engine.partition, engine.world)
    fresh.restore(saved.__getitem__, step, advanced_samples=engine.advanced_samples)
    return fresh


CASES = {
    "two stages, moving": (2, {"moves": ((2, MOVED),)}, None),
    "zero-bubble, recomputing, resumed": (2, {"schedule": "zero-bubble", "recompute": True}, 4),
    "zero-bubble, recomputing all but products": (
        2,
        {"schedule": "zero-bubble", "recompute": True, "selective": True, "moves": ((2, MOVED),)},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_run_has_the_same_bits_on_any_partition(case):
    workers, changes, resume_at = CASES[case]
    scenario = replace(PLAIN, **changes)
    [(figures, weights)] = run_workers(
        play, 1, replace(scenario, moves=(), schedule="1f1b", recompute=False, selective=False)
    )
    results = run_workers(play, workers, replace(scenario, compiled=AOT), resume_at)
    assert [metrics for metrics, _ in results] == [figures] * workers
    assert {name: each for _, part in results for name, each in part.items()} == weights


DEPTHS = DepthSettings(capacity=0.5, every=2, aux_weight=0.1)
EXITS = ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.03, measure="softmax")
HASHED = SparseAttentionSettings(buckets=4, block=4)
FAMILIES = {
    "gpt": {},
    **{name: {"model": name} for name in SAMPLES},
    "experts": {"moe": EXPERTS},
    "experts with counts": {"moe": DROPLESS},
    "experts and shared ones": {"moe": PADDED},
    "mixture of depths": {"dynamic": DynamicSettings(depths=DEPTHS)},
    "early exit": {"dynamic": DynamicSettings(exits=EXITS)},
    "hashed attention": {"dynamic": DynamicSettings(sparse_attention=HASHED)},
    "all techniques": {
        "dynamic": DynamicSettings(depths=DEPTHS, exits=EXITS, sparse_attention=HASHED),
        "moe": DROPLESS,
    },
}
# Kind of an item -> the methods that are compiled. Whatever reads the device or selects tokens is outside of them.
METHODS = {
    "embedding": {"forward"},
    "attention": {"forward", "on_tokens", "project", "finish"},
    "cross_attention": {"forward"},
    "mlp": {"forward", "on_tokens", "features"},
    "layer": {"forward", "project", "finish", "features", "embed"},
    "head": {"features", "embed"},
}


def play_family(world, scenario):
    """The losses of two steps and a validation; what is compiled, by kind of item."""
    engine = engine_of(scenario, world)
    kinds = {item.name: item.kind for item in engine.family.items}
    methods = {
        (kinds[name], method)
        for name, module in engine.item_store.modules.items()
        for part in module.modules()
        for method, value in vars(part).items()
        if isinstance(value, CompiledMethod)
    }
    losses = [engine.train_step(scenario.batch(step), sampled=False).loss for step in (1, 2)]
    return [*losses, engine.evaluate([scenario.batch(99)])], methods


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_family_has_no_graph_break(name):
    scenario = replace(PLAIN, **FAMILIES[name])
    [((losses, methods), breaks)] = run_workers(counted, 1, play_family, replace(scenario, compiled=AOT))
    assert breaks == {}
    [(eager, _)] = run_workers(play_family, 1, scenario)
    assert losses == pytest.approx(eager, rel=1e-6)
    assert {kind for kind, _ in methods} == {item.kind for item in scenario.family().items}
    assert not [(kind, method) for kind, method in methods if method not in METHODS[kind]]


def play_counting(world, scenario):
    """The number of graphs of this process after each step, and after an evaluation in the end; the forms of products.

    The forms are those of all items of one kind, one tuple for each combination that a step met.
    """
    engine, graphs, forms = engine_of(scenario, world), [], set()
    before = num_compiled_graphs()
    for step in range(1, scenario.steps + 1):
        engine.train_step(scenario.batch(step), sampled=False)
        graphs.append(num_compiled_graphs() - before)
        forms |= _forms_of_products(engine)
        engine.after_step(step)
        if step in dict(scenario.moves):
            engine.repartition(dict(scenario.moves)[step])
    engine.evaluate([scenario.batch(99)])
    return graphs, num_compiled_graphs() - before, sorted(forms)


def _forms_of_products(engine):
    kinds = {item.name: item.kind for item in engine.family.items}
    return {
        (kinds[name], *(part.form for part in module.modules() if hasattr(part, "sparsity") and hasattr(part, "form")))
        for name, module in engine.item_store.modules.items()
    }


def test_compiled_run_with_moves_and_freezing_compiles_each_kind_once():
    moving = replace(
        PLAIN, steps=9, freeze=((5, 1),), moves=((2, MOVED), (3, MOVED_BACK), (4, MOVED), (7, MOVED_BACK), (8, MOVED))
    )
    results = run_workers(counted, 2, play_counting, replace(moving, compiled=AOT))
    for (graphs, with_evaluation, _), breaks in results:
        assert breaks == {}
        # One graph of each kind: a move compiles nothing where the kind has been before. Frozen items, and those behind
        # them, have other graphs; so does the evaluation.
        assert graphs[4] == graphs[0] <= 4
        assert graphs[8] <= 4 + 3
        assert with_evaluation <= 4 + 3 + 4


@pytest.mark.parametrize("mode", ["unstructured", "structured"])
def test_compiled_run_with_pruning_does_not_compile_each_mask(mode):
    every_step = CubicSchedule(start=1, end=8, every=1, initial=0.3, final=0.95)
    scenario = replace(PLAIN, steps=9, freeze=(), prune=True, sparsity=every_step, rule=PruningRule(mode=mode))
    [((graphs, _, forms), breaks)] = run_workers(counted, 1, play_counting, replace(scenario, compiled=AOT))
    [(_, _, eager_forms)] = run_workers(play_counting, 1, scenario)
    assert breaks == {}
    assert forms == eager_forms
    # One graph for each combination of forms. Columns that are cut add shapes: first a whole layer, then any number.
    assert graphs[-1] <= len(forms) + (4 if mode == "structured" else 0), (graphs, forms)


def play_lengths(world, scenario, lengths):
    engine, losses = engine_of(scenario, world), []
    before = num_compiled_graphs()
    graphs = []
    for step, length in enumerate(lengths, 1):
        batch = batch_of(step, scenario.model)
        cut = replace(batch, inputs={name: each[:, :length].contiguous() for name, each in batch.inputs.items()})
        losses.append(engine.train_step(replace(cut, tokens=length), sampled=False).loss)
        graphs.append(num_compiled_graphs() - before)
    return (losses, fingerprint(engine)), graphs


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_compiled_curriculum_has_one_graph_for_all_lengths(model):
    lengths = (6, 8, 10, 12, 14, 16)
    scenario = replace(PLAIN, model=model, freeze=())
    compiled = replace(scenario, compiled=AOT, any_length=True)
    [(expected, _)] = run_workers(play_lengths, 1, scenario, lengths)
    [((result, graphs), breaks)] = run_workers(counted, 1, play_lengths, compiled, lengths)
    assert breaks == {}
    assert result[0] == pytest.approx(expected[0], rel=1e-6)
    assert model == "llama" or result == expected, (
        "RMSNorm and rotary positions have kernels of their own in eager mode"
    )
    assert graphs == graphs[:1] * len(lengths)


D2, T2, PT = ParallelDims(data=2), ParallelDims(tensor=2), ParallelDims(pipeline=2, tensor=2)
CUT = {"sequence_parallel": True}
DROPPING = replace(PLAIN, steps=4, prune=True)
SHARDED = {
    "dropout": Layout(dims=T2, scenario=DROPPING),
    "dropout, sequence parallelism": Layout(dims=T2, scenario=DROPPING, settings=CUT),
    "llama, sequence parallelism": Layout(
        dims=T2, scenario=replace(PLAIN, model="llama", dropout=0.0, steps=4), settings=CUT
    ),
    "zero 3": Layout(
        dims=D2, scenario=replace(PLAIN, steps=2), settings={"zero_stage": 3, "zero_sync_microbatches": True}
    ),
    "t5": Layout(dims=T2, scenario=replace(PLAIN, model="t5", steps=2)),
}


def compiled_layout(layout: Layout, **changes) -> Layout:
    return replace(layout, scenario=replace(layout.scenario, compiled=AOT, sharded=True, **changes))


def test_compiled_slices_have_the_bits_of_eager_ones():
    eager = run_workers(play_layouts, 2, list(SHARDED.values()))
    layouts = [compiled_layout(layout) for layout in SHARDED.values()]
    for plain, (compiled, breaks) in zip(eager, run_workers(counted, 2, play_layouts, layouts), strict=True):
        assert breaks == {}
        for name, one, other in zip(SHARDED, plain, compiled, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-6), name
            assert name.startswith("llama") or one == other, name


def test_compiled_slices_have_the_same_bits_on_any_partition():
    moving = {"moves": ((1, MOVED), (3, MOVED_BACK)), "recompute": True}
    names = ("dropout", "dropout, sequence parallelism")
    expected, _ = run_workers(play_layouts, 2, [SHARDED[name] for name in names])
    layouts = [
        compiled_layout(replace(SHARDED[name], dims=PT), selective=selective, **moving)
        for name, selective in zip(names, (True, False), strict=True)
    ]
    results = run_workers(play_layouts, 4, layouts)
    for number in range(len(names)):
        whole = [played[number] for played in results]
        assert all(one["losses"] == expected[number]["losses"] for one in whole)
        assert all(one["norms"] == expected[number]["norms"] for one in whole)
        assert whole[0]["weights"] == expected[number]["weights"]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_compiled_item_has_the_outputs_of_the_plain_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(3)
    plain = Mlp(width=16, inner=32, activation="gelu_tanh", norm=nn.LayerNorm(16), device=torch.device("cpu"))
    nn.init.normal_(plain.fc1.weight, std=0.2)
    nn.init.normal_(plain.fc2.weight, std=0.2)
    compiled = copy.deepcopy(plain)
    compile_item(compiled)
    inputs = torch.randn(2, 3, 16)
    results = []
    for module in (plain, compiled):
        x = inputs.clone().requires_grad_()
        module(x).square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]


def play_slice(world, cache):
    """Outputs and gradients of an attention in two slices, eager and compiled to code, with dropout."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    device = torch.device("cpu")
    region = TensorRegion(dist.group.WORLD, world.rank, 2, device, sequence=True)
    dims = {"item.qkv.weight": 0, "item.qkv.bias": 0, "item.dense.weight": 1}
    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        item = SelfAttention(
            width=16, heads=4, norm=nn.LayerNorm(16), device=device, dropout=0.5, attention_dropout=0.5
        )
        for layer in (item.qkv, item.dense):
            nn.init.normal_(layer.weight, std=0.2)
        cut_item("item", item, dims.get, region)
        if compiled:
            compile_item(item, CompileSettings(sharded=True))
        x = torch.randn(2, 6, 16).requires_grad_()
        with drawing_from(ItemStream(torch.tensor([1, 2]), seeds_generator=True)), seeded(device, 5, "item"):
            y = item(x[:, 3 * world.rank : 3 * world.rank + 3])
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in item.parameters())])
    return results


def test_code_of_a_slice_draws_the_random_numbers_of_its_region(tmp_path):
    for eager, compiled in run_workers(play_slice, 2, str(tmp_path), fresh=True):
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_selective_graph_saves_less_than_a_plain_one():
    saved = {}
    for selective in (False, True):
        torch.manual_seed(3)
        mlp = Mlp(width=16, inner=64, activation="gelu", norm=nn.LayerNorm(16), device=torch.device("cpu"), dropout=0.1)
        for layer in (mlp.fc1, mlp.fc2):
            nn.init.normal_(layer.weight, std=0.2)
        compile_item(mlp, CompileSettings(backend=AOT, selective=selective))
        x, saved_sizes = torch.randn(2, 3, 16).requires_grad_(), []
        parameters = {each.data_ptr() for each in mlp.parameters()}

        def keep(tensor, parameters=parameters, saved_sizes=saved_sizes):
            if tensor.data_ptr() not in parameters:
                saved_sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = mlp(x)
        torch.manual_seed(4)
        y.square().sum().backward()
        saved[selective] = sum(saved_sizes)
    assert saved[True] < saved[False]


def test_compiled_run_logs_the_steps_that_compile(tmp_path):
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    options = {"torch_compile_backend": AOT, "train_iters": "9", "freeze_schedule": "6:1", "lr_decay_iters": "9"}
    train(data, run, 1, "--torch-compile", **options)
    graphs = [line["compiled_graphs"] for line in lines(run / "metrics.jsonl") if "lm_loss" in line]
    compiled = {event["step"]: event for event in events(run, "compiled")}
    assert compiled[1]["total"] == graphs[0] == 4, "embedding, attention, MLP, head"
    assert 7 in compiled, "frozen"
    assert len(compiled) <= 4
    assert max(event["total"] for event in compiled.values()) == graphs[-1]
    assert compiled[1]["message"] == "torch.compile: compiled 4 graphs; 4 so far"


def test_compile_item_head_keeps_its_loss_eager():
    head = Head(width=8, rows=16, vocabulary=16, norm=nn.LayerNorm(8), device=torch.device("cpu"))
    compile_item(head, CompileSettings(backend=AOT))
    assert is_compiled(head)
    assert "forward" not in vars(head)


@pytest.mark.parametrize(
    ("device", "backend", "environment", "words"),
    [
        ("cpu", "inductor", {}, "needs a C++ compiler, and 'g++' is not on PATH"),
        ("cpu", "inductor", {"CXX": "clang++"}, "'clang++' is not on PATH"),
        ("cuda", "inductor", {}, "needs a C compiler, and 'gcc' is not on PATH"),
        ("cpu", "induct", {}, "--torch-compile-backend 'induct' is none of torch's: "),
    ],
)
def test_compiled_run_without_compiler_is_one_error_line(device, backend, environment, words):
    with pytest.raises(UsageError) as error:
        check_compiler(device, backend, environment, which=lambda _: None)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_compiled_run_without_header_files_is_one_error_line(tmp_path):
    with pytest.raises(UsageError, match=r"Python\.h is not there"):
        check_compiler("cpu", "inductor", {}, which=lambda name: name, headers=tmp_path)
    (tmp_path / "Python.h").touch()
    check_compiler("cpu", "inductor", {}, which=lambda name: name, headers=tmp_path)
