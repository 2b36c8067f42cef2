"""Early exit, alone and with routed blocks, against a dense reference in which tokens that have left are masked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.kv_cache import Decoder, DecodingCache
from dynmo_train.models.layer_list import output_of
from dynmo_train.models.layers import grouped_linear
from dynmo_train.models.techniques import early_exit
from dynmo_train.models.techniques.early_exit import EXITED, ExitSettings, depth_weights, sampled_cross_entropy
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings

CPU = torch.device("cpu")
SHAPE = GptShape(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=2,
    max_position_embeddings=24,
    vocab_size=20,
    padded_vocab_size=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.4,
)
EXITS = ExitSettings(layers=(0, 1), loss_weight=0.3, threshold=0.4, measure="softmax")


def family(**changes) -> DynamicFamily:
    settings = DynamicSettings(exits=replace(EXITS, **changes))
    return DynamicFamily(Gpt(SHAPE), settings, seed=5, width=16, std=1.0)


def built(model):
    modules = {item.name: model.build(item.name, CPU) for item in model.items}
    for number, module in enumerate(modules.values()):
        # Untrained, all tokens have the same estimate.
        if (classifier := getattr(module._modules.get("exit"), "classifier", None)) is not None:
            torch.nn.init.normal_(classifier.weight, std=0.4, generator=torch.Generator().manual_seed(9 + number))
            torch.nn.init.zeros_(classifier.bias)
    return modules


def run(model, modules, ids, labels):
    """The logits, and what each item reported."""
    values, outputs = {}, {}
    inputs = {"ids": ids, "labels": labels}
    for item in model.items:
        module = modules[item.name]
        if item.name == "head":
            return module.logits(values["hidden"]), outputs
        result = module(*(values[n] for n in item.reads), *(inputs[n] for n in item.inputs))
        values[item.writes] = output_of(result)
        if item.side:
            values.update(result.side)
            outputs[item.name] = result
    raise AssertionError


def dense(modules, ids, labels, exits=EXITS):
    """Every block on all tokens: keys that have left hidden, tokens that have left not updated."""
    x = modules["embedding"](ids)
    left = torch.zeros(ids.shape, dtype=torch.bool)
    losses, shares = [], []
    T = ids.shape[1]
    for layer in range(3):
        attention, mlp = modules[f"layers.{layer}.attention"], modules[f"layers.{layer}.mlp"]
        q, k, v = attention.project(x)
        visible = torch.ones(T, T, dtype=torch.bool).tril().expand(len(x), 1, T, T)
        if not exits.propagate:
            visible = visible & ~left[:, None, None, :]
        visible = visible | torch.eye(T, dtype=torch.bool)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
        inner = x + attention.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        outer = inner + mlp.transform(mlp.norm(inner))
        x = torch.where(left[..., None], x, outer)
        if layer in exits.layers:
            logits = modules["head"].logits(x)
            each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(ids.shape)
            losses.append((each * ~left).sum() / (~left).sum())
            if exits.measure == "softmax":
                top = logits.softmax(-1).topk(2, dim=-1).values
                sure = top[..., 0] - top[..., 1] >= exits.threshold
            elif exits.measure == "classifier":
                linear = mlp.exit.classifier
                sure = (modules["head"].norm(x) @ linear.weight[0] + linear.bias).sigmoid() >= exits.threshold
            else:
                sure = F.cosine_similarity(inner, outer, dim=-1) >= exits.threshold
            left = left | sure
            shares.append(float(left.float().mean()))
    return modules["head"].logits(x), losses, shares


@pytest.mark.parametrize("propagate", [False, True], ids=["active keys", "all keys"])
@pytest.mark.parametrize(("measure", "threshold"), [("softmax", 0.4), ("saturation", 0.8), ("classifier", 0.5)])
def test_early_exit_equals_dense_model_with_masks(measure, threshold, propagate):
    model = family(measure=measure, threshold=threshold, propagate=propagate)
    modules = built(model)
    ids = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    logits, outputs = run(model, modules, ids, labels)
    expected, losses, shares = dense(modules, ids, labels, model.settings.exits)
    assert 0 < shares[0] < shares[1] < 1, "some tokens leave at each exit, and some stay"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    got = [outputs[f"layers.{n}.mlp"] for n in (0, 1)]
    assert [float(each.metrics["exit_share"]) for each in got] == pytest.approx(shares)
    weighted = [each.losses["exit"] for each in got]
    torch.testing.assert_close([each.metrics["exit_loss"] for each in got], [each.detach() for each in losses])
    if measure != "classifier":  # whose own loss is added
        torch.testing.assert_close(weighted, [0.15 * loss for loss in losses], rtol=1e-4, atol=1e-5)

    def gradients(total):
        for module in modules.values():
            module.zero_grad()
        total.backward()
        own = {
            f"{item}.{n}": p.grad for item, m in modules.items() for n, p in m.named_parameters() if p.grad is not None
        }
        for copy, owner in model.ties.items():
            if ".exit." in copy and copy in own:
                own[owner] = own.get(owner, 0) + own.pop(copy)
        # The word table and the head are one weight.
        own["embedding.word.weight"] = own["embedding.word.weight"] + own.pop("head.weight")
        return {name: grad.clone() for name, grad in own.items()}

    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    ours = gradients((logits * grad).sum() + sum(weighted))
    theirs = gradients((expected * grad).sum() + 0.15 * sum(losses))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3, msg=name)


def counted_selections(monkeypatch, function):
    """The result of a function, and how often the host read a number of tokens."""
    calls = []
    select = early_exit.select_tokens
    monkeypatch.setattr(early_exit, "select_tokens", lambda keep: calls.append(keep) or select(keep))
    return function(), len(calls)


def gradients_of(modules, total):
    for module in modules.values():
        module.zero_grad()
    total.backward()
    return {f"{item}.{n}": p.grad for item, m in modules.items() for n, p in m.named_parameters() if p.grad is not None}


def test_early_exit_products_on_the_device_equal_those_by_the_host(monkeypatch):
    """The path of a GPU of today: entries for all tokens, products of a group of rows, no number read."""
    model = family()
    modules = built(model)
    ids = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(1))
    grad = torch.randn((3, 16, 20), generator=torch.Generator().manual_seed(2))
    results = {}
    for on_device in (False, True):
        monkeypatch.setattr(grouped_linear, "is_fast_device", lambda _rows, answer=on_device: answer)
        (logits, outputs), reads = counted_selections(monkeypatch, lambda: run(model, modules, ids, ids.roll(-1, 1)))
        losses = sum(outputs[f"layers.{n}.mlp"].losses["exit"] for n in (0, 1))
        shares = [float(outputs[f"layers.{n}.mlp"].metrics["exit_share"]) for n in (0, 1)]
        results[on_device] = (logits, losses, shares, gradients_of(modules, (logits * grad).sum() + losses), reads)
    (*expected, by_host), (*found, by_device) = results[False], results[True]
    # By the host once for each exit that later items read, not once for each item.
    assert (by_host, by_device) == (2, 0)
    assert 0 < found[2][0] < found[2][1] < 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_active_rows_leave_other_entries_zero_and_without_gradient(monkeypatch):
    monkeypatch.setattr(grouped_linear, "is_fast_device", lambda _rows: True)
    real = torch.tensor([[True, False, True, False], [False, False, False, False], [True, True, False, True]])
    x = torch.randn(3, 4, 8).masked_fill(~real[..., None], float("nan")).requires_grad_()
    weight = torch.randn(16, 8, requires_grad=True)
    y = grouped_linear.ActiveRows(real).product(x, weight)
    torch.testing.assert_close(y[real], x[real] @ weight.t())
    assert not y[~real].any()
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(weight.grad, 2.0 * x.detach()[real].sum(0).expand(16, 8))
    assert not x.grad[~real].any()
    # Another shape, or rows that the kernel does not align.
    assert grouped_linear.ActiveRows(real).product(x[:2], weight) is None
    assert grouped_linear.ActiveRows(real).product(x[..., :6], weight[:, :6]) is None


def test_early_exit_exited_tokens_cost_nothing():
    ids = torch.randint(0, 20, (2, 16), generator=torch.Generator().manual_seed(3))
    counted = {}
    for threshold in (0.0, 1.0):
        model = family(layers=(0,), threshold=threshold)
        modules = built(model)
        with FlopCounterMode(display=False) as counter:
            run(model, modules, ids, ids)
        counted[threshold] = counter.get_total_flops()
    # With threshold 0 all tokens leave at block 0; one entry a sample remains to keep the weights' gradients alive.
    blocks = 2 * (2 * 32 * 16 * (48 + 16 + 32 + 32))
    assert counted[1.0] - counted[0.0] > 0.9 * blocks


def test_early_exit_parameters_are_tied_to_the_head():
    model = family()
    modules = built(model)
    exits = {f"{i}.{n}" for i, m in modules.items() for n, _ in m.named_parameters() if ".exit." in f"{i}.{n}"}
    assert exits == {copy for copy in model.ties if ".exit." in copy}
    values = {f"{i}.{n}": p for i, m in modules.items() for n, p in m.named_parameters()}
    for copy, owner in model.ties.items():
        assert torch.equal(values[copy], values[owner]), copy


@pytest.mark.parametrize("propagate", [False, True], ids=["active keys", "all keys"])
@pytest.mark.parametrize(("measure", "threshold"), [("softmax", 0.4), ("saturation", 0.8), ("classifier", 0.5)])
def test_early_exit_decoding_equals_whole_sequence(measure, threshold, propagate):
    model = family(measure=measure, threshold=threshold, propagate=propagate)
    modules = built(model)
    for module in modules.values():
        module.eval()
    ids = torch.randint(0, 20, (2, 20), generator=torch.Generator().manual_seed(4))
    decoder = Decoder(model, modules, 24)
    cache = DecodingCache()
    logits = [decoder.read(ids[:, :6], cache)]
    logits += [decoder.read(ids[:, at : at + 1], cache) for at in range(6, 20)]
    with torch.no_grad():
        whole, outputs = run(model, modules, ids, ids)
    assert 0 < float(outputs["layers.1.mlp"].side[EXITED].mean()) < 1
    torch.testing.assert_close(torch.stack(logits, 1), whole[:, 5:], rtol=1e-4, atol=1e-4)


def both(*, exits=(0,), threshold=0.4, capacity=0.5, layers=3):
    settings = DynamicSettings(
        exits=replace(EXITS, layers=exits, threshold=threshold),
        depths=DepthSettings(capacity=capacity, every=2, aux_weight=0.01),
    )
    return DynamicFamily(Gpt(replace(SHAPE, num_layers=layers)), settings, seed=5, width=16, std=1.0)


def attend(attention, x, visible):
    """Attention over all tokens; ``visible`` is true where a key is attended to."""
    q, k, v = attention.project(x)
    T = x.shape[1]
    visible = torch.ones(T, T, dtype=torch.bool).tril() & visible[:, None, None, :]
    visible = visible | torch.eye(T, dtype=torch.bool)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return x + attention.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def feed(mlp, x):
    return x + mlp.transform(mlp.norm(x))


def dense_both(modules, ids, labels, threshold, capacity):
    """Exit behind block 0, routed block 1, plain block 2: every product on all tokens, with masks."""
    x = modules["embedding"](ids)
    x = feed(modules["layers.0.mlp"], attend(modules["layers.0.attention"], x, torch.ones(ids.shape, dtype=torch.bool)))
    logits = modules["head"].logits(x)
    top = logits.softmax(-1).topk(2, dim=-1).values
    left = top[..., 0] - top[..., 1] >= threshold
    exit_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    block = modules["layers.1"]
    scores = F.linear(x, block.attention.router.weight)[..., 0]
    count = math.ceil(capacity * int((~left).sum(1).max()))
    order = scores.masked_fill(left, -math.inf).topk(count, dim=1).indices
    through = torch.zeros_like(left).scatter(1, order, True) & ~left
    y = feed(block.mlp, attend(block.attention, x, through))
    x = torch.where(through[..., None], x + scores.sigmoid()[..., None] * (y - x), x)
    y = feed(modules["layers.2.mlp"], attend(modules["layers.2.attention"], x, ~left))
    x = torch.where(left[..., None], x, y)
    return modules["head"].logits(x), exit_loss, left, through


def test_early_exit_with_routed_blocks_equals_dense_model():
    model = both()
    modules = built(model)
    ids = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    logits, outputs = run(model, modules, ids, labels)
    expected, exit_loss, left, through = dense_both(modules, ids, labels, 0.4, 0.5)
    assert 0 < float(left.float().mean()) < 1
    assert len(set(left.sum(1).tolist())) > 1, "the samples have lost different numbers of tokens"
    assert 0 < int(through.sum()) < int((~left).sum()), "some tokens go through the routed block, some pass it by"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    weights = {f"{i}.{n}": p for i, m in modules.items() for n, p in m.named_parameters() if not n.startswith("exit.")}
    own = outputs["layers.0.mlp"].losses["exit"] / 0.3
    ours = torch.autograd.grad((logits * grad).sum() + own, weights.values(), allow_unused=True)
    theirs = torch.autograd.grad((expected * grad).sum() + exit_loss, weights.values(), allow_unused=True)
    for name, a, b in zip(weights, ours, theirs, strict=True):
        if name.startswith("head.") or a is b:
            continue  # the exit's head is a copy of its own here
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)


def test_routed_block_after_an_exit_computes_active_tokens_only():
    ids = torch.randint(0, 20, (2, 16), generator=torch.Generator().manual_seed(3))
    counted = {}
    for threshold in (0.0, 1.0):
        model = both(threshold=threshold, layers=2)
        modules = built(model)
        with FlopCounterMode(display=False) as counter:
            run(model, modules, ids, ids)
        counted[threshold] = counter.get_total_flops()
    # With threshold 0 all tokens leave at block 0: of half of 32 tokens one entry a sample is left.
    block = 2 * 14 * 16 * (48 + 16 + 32 + 32)
    assert counted[1.0] - counted[0.0] > 0.9 * block


def test_exit_after_a_routed_block_is_part_of_its_item():
    model = both(exits=(0, 1))
    modules = built(model)
    ids = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(1))
    _, outputs = run(model, modules, ids, ids)
    shares = [float(outputs[name].metrics["exit_share"]) for name in ("layers.0.mlp", "layers.1")]
    assert 0 < shares[0] < shares[1] < 1
    assert set(outputs["layers.1"].losses) == {"router", "exit"}
    exits = {f"{i}.{n}" for i, m in modules.items() for n, _ in m.named_parameters() if ".exit." in f"{i}.{n}"}
    assert exits == {copy for copy in model.ties if ".exit." in copy}
    assert "layers.1.exit.head.weight" in exits


@pytest.mark.parametrize("exits", [(0,), (0, 1)])
def test_decoding_with_routed_blocks_equals_whole_sequence(exits):
    model = both(exits=exits)
    modules = {name: module.eval() for name, module in built(model).items()}
    ids = torch.randint(0, 20, (2, 20), generator=torch.Generator().manual_seed(4))
    cache = DecodingCache()
    decoder = Decoder(model, modules, 24)
    logits = [decoder.read(ids[:, :6], cache)]
    logits += [decoder.read(ids[:, at : at + 1], cache) for at in range(6, 20)]
    with torch.no_grad():
        whole, outputs = run(model, modules, ids, ids)
    assert 0 < float(list(outputs.values())[-1].side[EXITED].mean()) < 1
    torch.testing.assert_close(torch.stack(logits, 1), whole[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("measure", ["softmax", "saturation"])
def test_exit_loss_by_saturation_computes_no_logits_of_all_tokens(measure, monkeypatch):
    """The softmax response reads the logits; saturation needs the loss alone, in chunks of tokens."""
    model = family(measure=measure)
    exit_ = built(model)["layers.0.mlp"].train().exit
    calls = []
    logits = exit_.head.logits
    monkeypatch.setattr(exit_.head, "logits", lambda x: calls.append(x.shape) or logits(x))
    x = torch.randn(2, 6, 16)
    labels, real = torch.randint(0, 20, (2, 6)), torch.rand(2, 6) > 0.3
    _, loss = exit_(x, x, labels, real)
    assert len(calls) == (measure == "softmax")
    torch.testing.assert_close(loss, F.cross_entropy(logits(x)[real], labels[real]))


def test_exit_loss_with_the_whole_vocabulary_sampled_is_exact():
    x, weight, bias = torch.randn(6, 16), torch.randn(32, 16), torch.randn(32)
    labels = torch.randint(0, 20, (6,))
    losses = sampled_cross_entropy(x, weight, bias, labels, torch.randperm(20), vocabulary=20)
    expected = F.cross_entropy(F.linear(x, weight, bias)[:, :20], labels, reduction="none")
    torch.testing.assert_close(losses, expected)


def test_exit_loss_of_sampled_vocabulary_has_the_right_partition_function():
    """The mean over many samples of the estimated sum of exponentials is that of all ids."""
    torch.manual_seed(0)
    x, weight, labels = torch.randn(1, 16) * 0.3, torch.randn(20, 16), torch.tensor([7])
    logits = F.linear(x, weight)[0]
    sums = []
    for _ in range(4000):
        loss = sampled_cross_entropy(x, weight, None, labels, torch.randperm(20)[:5], vocabulary=20)
        sums.append(float((loss + logits[7]).exp()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.03)


def test_exit_loss_of_sampled_tokens_estimates_the_mean_of_real_ones():
    torch.manual_seed(0)
    exit_ = built(family(measure="saturation", token_share=0.25))["layers.0.mlp"].train().exit
    x, labels, real = torch.randn(2, 16, 16), torch.randint(0, 20, (2, 16)), torch.rand(2, 16) > 0.3
    each = F.cross_entropy(exit_.head.logits(x)[real], labels[real], reduction="none")
    losses = [float(exit_(x, x, labels, real)[1].detach()) for _ in range(600)]
    assert len(set(losses)) > 100
    assert sum(losses) / len(losses) == pytest.approx(float(each.detach().mean()), rel=0.03)


def test_exit_of_sampled_loss_costs_less_and_decides_the_same():
    whole, sampled = (
        built(family(**changes))["layers.0.mlp"].train().exit
        for changes in ({}, {"token_share": 0.125, "vocabulary_samples": 5})
    )
    x, labels, real = torch.randn(2, 16, 16), torch.randint(0, 20, (2, 16)), torch.ones(2, 16, dtype=torch.bool)
    counts = {}
    for exit_ in (whole, sampled):
        exit_.settings = replace(exit_.settings, measure="saturation")
        given = x.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            exit_(given, given, labels, real)[1].backward()
        counts[exit_] = counter.get_total_flops()
        exit_.settings = replace(exit_.settings, measure="softmax")
    assert counts[sampled] <= 3 * 2 * 4 * 16 * 5 < counts[whole] / 20
    assert torch.equal(whole(x, x, labels, real)[0], sampled(x, x, labels, real)[0])


@pytest.mark.parametrize("bias", [False, True])
def test_softmax_response_in_chunks_is_top_one_minus_top_two(monkeypatch, bias):
    monkeypatch.setattr(early_exit, "chunk_tokens_for", lambda *_: 5)
    exit_ = built(family())["layers.0.mlp"].exit
    if bias:
        exit_.head.bias = torch.nn.Parameter(torch.randn(32))
    x = torch.randn(3, 4, 16)
    top = exit_.head.logits(x).softmax(-1).topk(2, dim=-1).values
    torch.testing.assert_close(exit_.confidence(x, x), top[..., 0] - top[..., 1])


@pytest.mark.parametrize("measure", ["softmax", "saturation", "classifier"])
def test_no_token_exits_at_threshold_one(measure):
    exit_ = built(family(measure=measure, threshold=1.0))["layers.0.mlp"].eval().exit
    x = torch.randn(2, 8, 16)
    if measure == "classifier":
        torch.nn.init.constant_(exit_.classifier.bias, 200.0)
    exit_.head.weight.data.mul_(1e4)
    assert float(exit_.confidence(x, x).max()) >= 0.9999
    assert not exit_(x, x, None, torch.ones(2, 8, dtype=torch.bool))[0].any()
    assert not exit_.exits(torch.ones(2, 8)).any()  # training reaches it without the check of the threshold


def trained_classifier(exit_, x, real, steps):
    """Share of equal decisions with the softmax response, before and after steps of the classifier alone."""
    optimizer = torch.optim.Adam(exit_.classifier.parameters(), lr=0.1)
    shares = []
    for _ in range(steps):
        targets = exit_.targets(x, real)
        optimizer.zero_grad()
        targets.loss.backward()
        optimizer.step()
        shares.append(float(targets.agreement))
    return shares[0], shares[-1]


def test_classifier_learns_the_decisions_of_the_softmax_response(monkeypatch):
    monkeypatch.setattr(early_exit, "TOKENS_PER_TARGET", 1)
    torch.manual_seed(0)
    exit_ = (
        DynamicFamily(
            Gpt(SHAPE), DynamicSettings(exits=replace(EXITS, measure="classifier")), seed=5, width=16, std=1.0
        )
        .build("layers.0.mlp", CPU)
        .exit
    )
    # One word is certain where the first feature is high: a decision that is linear in the features.
    exit_.head.weight.data.zero_()
    exit_.head.weight.data[3, 0] = 6.0
    x, real = torch.randn(4, 64, 16), torch.ones(4, 64, dtype=torch.bool)
    response = exit_._response(x)
    assert 0.2 < float((response >= 0.4).float().mean()) < 0.8
    before, after = trained_classifier(exit_, x, real, 150)
    assert before == pytest.approx(float((response < 0.4).float().mean())), "untrained, no token exits"
    assert after > 0.95
    assert float((exit_.confidence(x, x) - response).abs().mean()) < 0.1


def test_classifier_gradient_reaches_its_own_parameters_alone():
    model = family(measure="classifier", token_share=0.5)
    item = built(model)["layers.0.mlp"].train()
    x = torch.randn(2, 16, 16, requires_grad=True)
    y = item(x, torch.zeros(2, 16, dtype=torch.int64)).output
    targets = item.exit.targets(y, torch.ones(2, 16, dtype=torch.bool))
    targets.loss.backward()
    with_gradient = {name for name, parameter in item.named_parameters() if parameter.grad is not None}
    assert with_gradient == {"exit.classifier.weight", "exit.classifier.bias"}
    assert x.grad is None


def test_classifier_targets_ignore_padding(monkeypatch):
    monkeypatch.setattr(early_exit, "TOKENS_PER_TARGET", 1)
    exit_ = built(family(measure="classifier"))["layers.0.mlp"].exit
    x, real = torch.randn(2, 8, 16), torch.rand(2, 8) > 0.5
    found = exit_.targets(x, real)
    expected = exit_.targets(x[real][None], torch.ones(1, int(real.sum()), dtype=torch.bool))
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.agreement, expected.agreement)


def test_classifier_costs_a_thirty_second_of_the_softmax_response():
    counted = {}
    for measure in ("softmax", "classifier"):
        item = built(family(measure=measure, token_share=1 / 64))["layers.0.mlp"].train()
        x, labels = torch.randn(2, 64, 16), torch.zeros(2, 64, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            item(x, labels)
        counted[measure] = counter.get_total_flops()
    response = 2 * 128 * 16 * 20
    # For all tokens, and for the sample again: one weight vector.
    assert counted["softmax"] - counted["classifier"] == response - response // 32 - 2 * (128 + 4) * 16


def test_depth_weights_grow_with_the_number_of_blocks():
    assert depth_weights((3, 7), 0.46) == pytest.approx((0.10, 0.36))
    settings = replace(EXITS, layer_weights=(0.1, 0.2))
    assert [settings.weight_of(layer) for layer in (0, 1)] == [0.1, 0.2]
    assert [EXITS.weight_of(layer) for layer in (0, 1)] == [0.15, 0.15]
    restored = DynamicSettings.of_document(DynamicSettings(exits=settings).document())
    assert restored.exits == settings
