"""Early exits at several thresholds, against a hand-made reference: dense blocks, one decision per token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dynmo_train._common.errors import UsageError
from dynmo_train.config.sections.evaluation import ExitsConfig
from dynmo_train.evaluation.exit_decoding import (
    DecodedTokens,
    ExitThreshold,
    SegmentDecoder,
    exits_of,
    set_threshold,
)
from dynmo_train.evaluation.exits import (
    ExitModel,
    check_exits,
    decoded_results,
    evaluate_exits,
    report,
    score_windows,
    windows_of,
)
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from tests.tables import table

CPU = torch.device("cpu")
SIZES = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "vocab_size": 20,
    "padded_vocab_size": 32,
    "init_method_std": 0.4,
}
BASES = {
    "gpt": lambda: Gpt(GptShape(**SIZES)),
    "llama": lambda: Llama(LlamaShape(**SIZES, num_key_value_heads=1, head_dim=8)),
}
EXITS = ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.4, measure="softmax", propagate=True)
THRESHOLDS = (0.2, 0.4, 0.7, 1.0)
IDS = torch.randint(0, 20, (3, 17), generator=torch.Generator().manual_seed(1))


def family(base="gpt", **changes) -> DynamicFamily:
    exits = replace(EXITS, **changes)
    return DynamicFamily(BASES[base](), DynamicSettings(exits=exits), seed=5, width=16, std=1.0)


def exit_model(key_values, base="gpt", **changes) -> ExitModel:
    changes = {"propagate": key_values != "skip", **changes}
    model = family(base, **changes)
    modules = {item.name: model.build(item.name, CPU).eval().requires_grad_(False) for item in model.items}
    return ExitModel(model, modules, key_values, SIZES["max_position_embeddings"])


def scores_of(model, ids=IDS, thresholds=THRESHOLDS):
    return score_windows(model, ids.numpy(), thresholds, 2, CPU)


def confidence(head, x):
    top = head.logits(x).softmax(-1).topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def step(modules, layer, x, _positions):
    """The last token of ``x`` ``[1, S, D]`` after a block; learned positions are in the stream already."""
    attention, mlp = modules[f"layers.{layer}.attention"], modules[f"layers.{layer}.mlp"]
    q, k, v = attention.project(x)
    weights = (q[:, :, -1:] @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    inner = x[:, -1:] + attention.dense((weights @ v).transpose(1, 2).flatten(2))
    return (inner + mlp.transform(mlp.norm(inner)))[:, 0]


def plain_forward(model, ids):
    """The stream after each block of the full model, without any exit."""
    x = model.modules["embedding"](ids)
    states = []
    for layer in range(4):
        rows = x.shape[1]
        blocks = [step(model.modules, layer, x[:, : t + 1], t) for t in range(rows)]
        x = torch.stack(blocks, dim=1)
        states.append(x)
    return states


@pytest.mark.parametrize("key_values", ["propagate", "skip", "exact"])
def test_scores_equal_the_reference_that_decides_token_by_token(key_values):
    model = exit_model(key_values)
    ids, labels = IDS[:, :-1], IDS[:, 1:]
    for threshold, scored in zip(THRESHOLDS, scores_of(model), strict=True):
        logits, exits = walk(model, ids, threshold, key_values)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        torch.testing.assert_close(scored.losses_N, losses.double(), rtol=1e-4, atol=1e-4)
        assert scored.exits_N.tolist() == exits.flatten().tolist()
        assert scored.best_N.tolist() == logits.argmax(-1).flatten().tolist()
        if threshold == 0.4:
            assert len(set(exits.flatten().tolist())) == 3, "tokens leave at each exit, and some stay"


def walk(model, ids, threshold, key_values):
    """Logits ``[B, T, V]`` and exits ``[B, T]``: one token after another, with the keys that the semantics name."""
    head = model.modules["head"]
    full = [model.modules["embedding"](ids), *plain_forward(model, ids)]
    propagated = [each.clone() for each in full]
    layers_run = torch.full(ids.shape, 4)
    logits, exits = [], []
    for t in range(ids.shape[1]):
        row_logits, row_exits = [], []
        for b in range(len(ids)):
            state, number = full[0][b, t], 2
            for layer in range(4):
                propagated[layer][b, t] = state
                source = full if key_values == "exact" else propagated
                keys = source[layer][b, : t + 1].clone()
                keys[t] = state
                if key_values == "skip":
                    keys = keys[layers_run[b, : t + 1] > layer]
                state = step(model.modules, layer, keys[None], t)[0]
                if layer in (0, 2) and threshold < 1 and float(confidence(head, state[None])) >= threshold:
                    number, layers_run[b, t] = (0, 2).index(layer), layer + 1
                    for later in range(layer + 1, 4):
                        propagated[later][b, t] = state
                    break
            row_logits.append(head.logits(state[None])[0])
            row_exits.append(number)
        logits.append(torch.stack(row_logits))
        exits.append(torch.tensor(row_exits))
    return torch.stack(logits, 1), torch.stack(exits, 1)


@pytest.mark.parametrize("key_values", ["propagate", "skip", "exact", "speculative"])
def test_threshold_one_has_the_bits_of_the_model_without_exits(key_values):
    base = BASES["gpt"]()
    model = exit_model(key_values)
    x = IDS[:, :-1]
    for item in base.items[:-1]:
        module = base.build(item.name, CPU).eval()
        module.load_state_dict(
            {n: p for n, p in model.modules[item.name].state_dict().items() if not n.startswith("exit.")}
        )
        x = module(x)
    logits = model.modules["head"].logits(x)
    losses = F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="none").double()
    [scored] = score_windows(model, IDS.numpy(), [1.0], 3, CPU)
    assert torch.equal(scored.losses_N, losses)
    assert set(scored.exits_N.tolist()) == {2}


@table("base", ["gpt", "llama"])
@table("key_values", ["propagate", "skip", "exact"])
@table(("measure", "value"), [("softmax", 0.4), ("saturation", 0.8)])
def test_decoded_tokens_are_the_predictions_on_the_decoded_text(base, key_values, measure, value):
    """Each new token is what scoring the whole text predicts there, at the same exit: two ways to one answer."""
    model = exit_model(key_values, base, measure=measure)
    decode = model.decoder(4)
    prompt = IDS[0, :6].tolist()
    found = decode(prompt, 12, ExitThreshold(value=value))
    text = torch.tensor([[*prompt, *found.ids]])
    [scored] = score_windows(model, text.numpy(), [value], 1, CPU)
    assert scored.best_N.tolist()[5:] == list(found.ids)
    assert scored.exits_N.tolist()[5:] == list(found.exits)
    assert len(set(found.exits)) > 1, "at several exits"


@table("base", ["gpt", "llama"])
@table("drafts", [1, 3, 6])
@table("threshold", [0.0, 0.3, 0.7, 1.0])
def test_speculation_has_the_output_of_the_full_model(base, drafts, threshold):
    model = exit_model("speculative", base)
    segments = SegmentDecoder(model.family, model.modules, 24)
    for row in IDS[:, :5].tolist():
        expected = segments.decode(row, 14, ExitThreshold(value=1.0))
        found = segments.speculate(row, 14, ExitThreshold(value=threshold), drafts)
        assert found.ids == expected.ids
        assert len(found.exits) == 14
        assert found.accepted <= found.drafted
        if threshold in (0.0, 1.0):
            assert (found.drafted > 0) == (threshold == 0.0)


@pytest.mark.parametrize("key_values", ["propagate", "skip", "exact", "speculative"])
def test_continuation_stops_at_the_first_token_that_ends_it(key_values):
    """Also within drafts that are accepted together."""
    decode, prompt, threshold = exit_model(key_values).decoder(4), IDS[1, :5].tolist(), ExitThreshold(value=0.2)
    whole = decode(prompt, 12, threshold)
    for number in range(1, 12):
        found = decode(prompt, 12, threshold, ends=lambda new, number=number: len(new) >= number)
        assert found.ids == whole.ids[:number]
        assert found.exits == whole.exits[:number]


def test_speculation_accepts_some_drafts_and_refuses_some():
    model = exit_model("speculative")
    segments = SegmentDecoder(model.family, model.modules, 24)
    found = [segments.speculate(row, 14, ExitThreshold(value=0.0), 4) for row in IDS[:, :5].tolist()]
    assert 0 < sum(each.accepted for each in found) < sum(each.drafted for each in found)
    assert all(each.exits.count(0) <= each.accepted for each in found)


def test_deferred_blocks_run_once_per_token():
    model = exit_model("exact")
    rows = []
    for layer in range(4):
        mlp = model.modules[f"layers.{layer}.mlp"]
        mlp.norm.register_forward_hook(lambda _m, given, _r, layer=layer: rows.append((layer, given[0].shape[1])))
    found = SegmentDecoder(model.family, model.modules, 24).decode(IDS[0, :6].tolist(), 12, ExitThreshold(value=0.4))
    tokens = {layer: sum(count for at, count in rows if at == layer) for layer in range(4)}
    assert tokens[0] == 6 + 11
    assert tokens[1] == tokens[2] <= 17
    assert tokens[3] <= tokens[2]
    # What waits is taken along: fewer passes than tokens.
    assert any(count > 1 for at, count in rows[1:] if at > 0)
    assert {0, 2} <= set(found.exits)


def test_threshold_decays_over_the_new_tokens():
    decaying = ExitThreshold(value=0.5, decay=4.0)
    assert decaying.at(0, 10) == pytest.approx(0.55)
    assert decaying.at(5, 10) == pytest.approx(0.45 + 0.1 * 2.718281828**-2)
    assert ExitThreshold(value=0.5).at(7, 10) == 0.5
    assert ExitThreshold(value=1.0, decay=4.0).at(7, 10) == 1.0, "the full model"
    assert ExitThreshold(value=0.99, decay=0.0).at(0, 10) == pytest.approx(0.991)


def test_thresholds_are_set_at_every_exit():
    model = exit_model("propagate")
    set_threshold(model.modules, 0.77)
    assert [each.settings.threshold for each in exits_of(model.modules)] == [0.77, 0.77]


def test_report_has_shares_layers_and_agreement_with_the_full_model():
    model = exit_model("exact")
    scores = scores_of(model)
    found = report(model, THRESHOLDS, scores, [])
    for each, scored in zip(found.thresholds, scores, strict=True):
        counts = [scored.exits_N.tolist().count(number) / 48 for number in range(3)]
        assert each.exit_shares == pytest.approx(counts[:2])
        assert each.mean_layers == pytest.approx(counts[0] * 1 + counts[1] * 3 + counts[2] * 4)
        equal = [own == full for own, full in zip(scored.best_N.tolist(), scores[-1].best_N.tolist(), strict=True)]
        assert each.agreement == pytest.approx(sum(equal) / 48)
        assert each.loss == pytest.approx(float(scored.losses_N.mean()))
    assert found.thresholds[-1].agreement == 1.0
    assert found.thresholds[-1].mean_layers == 4.0
    assert found.thresholds[0].mean_layers < found.thresholds[1].mean_layers < 4.0
    assert found.columns() == (*("threshold", "loss", "perplexity", "agreement", "exit 0", "exit 2", "mean layers"),)
    assert all(len(row) == 7 for row in found.rows())


def test_decoding_is_timed_without_reading_the_prompt():
    times = iter([0.0, 10.0, 25.0, 100.0, 110.0, 140.0])
    taken = []

    def decode(prompt, new, threshold):
        taken.append((prompt, new, threshold.value))
        return DecodedTokens(ids=(1, 2, 3)[:new], exits=(0, 2, 2)[:new], drafted=4, accepted=1)

    steps = [ExitThreshold(value=0.5), ExitThreshold(value=1.0)]
    timed = decoded_results(decode, [(7,)], 3, steps, lambda: next(times))
    assert [seconds for _, seconds in timed] == [5.0, 20.0]
    assert taken == [((7,), 1, 0.5), ((7,), 3, 0.5), ((7,), 1, 1.0), ((7,), 3, 1.0)]
    model = exit_model("exact")
    found = report(model, (0.4, 1.0), scores_of(model, thresholds=(0.4, 1.0)), timed)
    first = found.thresholds[0]
    assert (first.tokens_per_s, first.accepted_share, first.decoded_match) == (2 / 5.0, 0.25, 1.0)
    assert first.decoded_layers == pytest.approx((1 + 4 + 4) / 3)
    assert len(found.rows()[0]) == len(found.columns()) == 11


def source_of(model):
    return SimpleNamespace(family=model, directory="runs/x")


def task(**options) -> ExitsConfig:
    return ExitsConfig(valid_data="text", **options)


def test_models_without_exits_and_exact_keys_of_routed_blocks_are_refused():
    with pytest.raises(UsageError, match="has no early exits; train it with --early-exit-layers"):
        check_exits(source_of(BASES["gpt"]()), "stored")
    depths = DynamicSettings(exits=EXITS, depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01))
    routed = source_of(DynamicFamily(BASES["gpt"](), depths, seed=5, width=16, std=1.0))
    with pytest.raises(UsageError, match="--exit-key-values exact: must be propagate, skip or stored"):
        check_exits(routed, "exact")
    assert check_exits(routed, "skip").settings.exits == replace(EXITS, propagate=False)


@pytest.mark.parametrize(("mode", "propagate"), [("stored", False), ("propagate", True), ("exact", False)])
def test_key_values_are_those_of_the_model_unless_others_are_requested(mode, propagate):
    found = check_exits(source_of(family(propagate=False)), mode)
    assert found.settings.exits == replace(EXITS, propagate=propagate)


def test_short_texts_several_processes_and_long_continuations_are_refused():
    with pytest.raises(UsageError, match="has 8 tokens, fewer than one window of 9"):
        windows_of(range(8), 8, task())
    with pytest.raises(UsageError, match="--new-tokens 8: must be below 8"):
        windows_of(range(9), 8, task(new_tokens=8))
    with pytest.raises(UsageError, match="must run in one process, not in 2"):
        evaluate_exits(None, task(), SimpleNamespace(size=2), {})
    rows = [list(row) for row in windows_of(range(26), 8, task(decoded_prompts=0))]
    assert rows == [list(range(9)), list(range(8, 17)), list(range(16, 25))]
    assert len(windows_of(range(26), 8, task(decoded_prompts=0, max_windows=2))) == 2


@pytest.mark.parametrize("text", ["", "0.5,", "0.5,1.5", "nan", "high"])
def test_invalid_thresholds_are_refused(text):
    with pytest.raises(UsageError, match="must be numbers from 0 to 1"):
        _ = ExitsConfig(valid_data="x", exit_thresholds=text).thresholds
