"""``dynmo-plan verify``: the tool's own plans are accepted, and a forged value of any field is refused."""

from __future__ import annotations

import json
import random
from copy import deepcopy

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.analysis.verify.inputs import load_inputs
from dynmo_balance.analysis.verify.plan import verify
from dynmo_balance.formats.plan import parse_plan, read_plan
from tests.paths import CONTRACTS

STEPS = "profile/valid/steps.jsonl"
LAYERS = 6
SCORE_DECAY = 10_000_000
QUESTION = ("constraints", "version")
"""What a plan was asked for is not derived; a changed question is caught where an answer does not fit it."""

PLANS = {
    "plain": (),
    "memory": ("--memory", "10MB"),
    "memory-of-the-profile": (),
    "interleaved": ("--schedule", "interleaved-1f1b", "--virtual-stages", "2"),
    "interleaved-memory": ("--schedule", "interleaved-1f1b", "--virtual-stages", "2", "--memory", "20MB"),
    "zb-v": ("--schedule", "zb-v", "--stages", "2"),
    "zb-v-memory": ("--schedule", "zb-v", "--stages", "2", "--memory", "16MB"),
    "zb-v-tied": ("--schedule", "zb-v", "--stages", "2", "--tied-together"),
    "zero-bubble": ("--schedule", "zero-bubble"),
    "gpipe": ("--schedule", "gpipe"),
    "sublayer": ("--granularity", "sublayer"),
    "sublayer-auto": ("--granularity", "auto"),
    "custom": ("--schedule", "custom", "--granularity", "auto", "--microbatches", "4", "--stages", "2"),
    "pinned": ("--pin", "head:2", "--min-layers", "0"),
    "tied": ("--tied-together", "--stages", "1"),
    "uniform": ("--balancer", "uniform"),
    "diffusion": ("--balancer", "diffusion"),
    "made-up-workers": ("--stages", "5"),
}


def item(name, kind, layer, size, tied_to=None):
    return {
        "name": name,
        "layer": layer,
        "kind": kind,
        "param_count": size // 4,
        "param_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size,
        "boundary_bytes": 50_000,
        "cut_before": True,
        "tied_to": tied_to,
    }


def header(memory=None):
    items = [item("embedding", "embedding", "embedding", 400_000)]
    for at in range(LAYERS):
        items.append(item(f"layers.{at}.attention", "attention", f"layers.{at}", 200_000))
        items.append(item(f"layers.{at}.mlp", "mlp", f"layers.{at}", 300_000))
    items.append(item("head", "head", "head", 410_000, tied_to="embedding"))
    return {
        "record": "header",
        "format": "dynmo.profile",
        "version": 1,
        "written_by": "a test",
        "created_utc": "2026-01-01T00:00:00Z",
        "run_id": "verified",
        "segment": 0,
        "model": {"family": "gpt", "num_layers": LAYERS, "hidden_size": 64, "sequence_length": 32},
        "schedule": "1f1b",
        "virtual_stages_per_worker": 1,
        "granularity": "layer",
        "microbatches": 6,
        "micro_batch_size": 1,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "link": {"bandwidth_bytes_per_s": 1_000_000_000, "latency_ns": 7_000},
        "workers": [
            {
                "worker": at,
                "ranks": [at],
                "hosts": ["a"],
                "device": "cpu",
                "memory_bytes": memory,
                "relative_speed": speed,
                "releasable": at > 0,
            }
            for at, speed in enumerate((1.0, 0.7, 1.3))
        ],
        "items": items,
    }


def write_run(folder, memory=None):
    """A run with three workers of unequal speed and nine steps of noisy costs, a sixth of the front frozen."""
    random_ = random.Random(7)
    first = header(memory)
    count = len(first["items"])
    records = [first]
    for step in range(1, 10):
        noisy = [[random_.randint(200_000, 900_000) for _ in range(count)] for _ in range(4)]
        frozen = [0, 0, 0]
        records.append(
            {
                "record": "step",
                "step": step,
                "plan_id": 0,
                "step_ns": 40_000_000,
                "forward_ns": noisy[0],
                "backward_ns": frozen + noisy[1][3:],
                "activation_bytes": noisy[2],
                "busy_ns": [20_000_000] * 3,
                "peak_memory_bytes": [1_000_000] * 3,
            }
        )
    folder.mkdir(exist_ok=True)
    (folder / "profile.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "profile.jsonl"


@pytest.fixture
def made(plan, tmp_path):
    """Makes a plan with the tool itself: the plan's path and the options that ``verify`` needs."""

    def make(name):
        profile = write_run(tmp_path, SCORE_DECAY if name == "memory-of-the-profile" else None)
        path = tmp_path / "made.json"
        assert plan("partition", profile, *PLANS[name], "-o", path)[0] == 0
        return path, ("--profile", profile)

    return make


@pytest.fixture
def made_from_base(plan, made, tmp_path):
    path, options = made("uniform")
    base, moved = tmp_path / "base.json", tmp_path / "moved.json"
    path.rename(base)
    assert plan("partition", options[1], "--current", base, "-o", moved)[0] == 0
    assert json.loads(moved.read_text())["migration"]["moves"]
    return moved, (*options, "--base", base)


def leaves(value, path=()):
    """The paths of all numbers, booleans and lists of names in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not (path == () and key in QUESTION):
                yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        if path[-1] == "blocking_items":
            yield path
        for at, inner in enumerate(value):
            yield from leaves(inner, (*path, at))
    elif isinstance(value, bool | int | float):
        yield path


def forgeries(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, *([value - 1] if value else [])]
    if isinstance(value, float):
        return [round(value + 2e-6, 6), round(value - 1e-3, 6)]
    return [value[1:] if value else ["head"], [*value, "head"]]


def forged(document):
    for path in leaves(document):
        value = document
        for key in path:
            value = value[key]
        for other in forgeries(value):
            changed = deepcopy(document)
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = other
            yield path, value, other, changed


def is_accepted(document, name, profile, base):
    try:
        plan = parse_plan(document, name)
        inputs = load_inputs(plan, profile)
    except UsageError:
        return False
    return not verify(plan, inputs, base, name)


def check_every_forgery(plan, path, options):
    code, out, err = plan("verify", path, *options)
    assert code == 0, err
    assert "every number is correct" in out
    profile, base = options[1], read_plan(options[3]) if len(options) > 2 else None
    document = json.loads(path.read_text())
    assert is_accepted(document, path.name, profile, base)
    tried = list(forged(document))
    assert len(tried) > 20
    assert [
        (where, value, other)
        for where, value, other, changed in tried
        if is_accepted(changed, path.name, profile, base)
    ] == []


@pytest.mark.parametrize("name", PLANS)
def test_verify_each_forged_value_is_refused(plan, made, name):
    check_every_forgery(plan, *made(name))


def test_verify_forged_migration_is_refused(plan, made_from_base):
    check_every_forgery(plan, *made_from_base)


def test_verify_frozen_items_move_without_optimizer_state(plan, made, tmp_path):
    path, options = made("uniform")
    base, moved = tmp_path / "base.json", tmp_path / "moved.json"
    path.rename(base)
    assert plan("partition", options[1], "--current", base, "--pin", "layers.0:1", "-o", moved)[0] == 0
    moves = {move["item"]: move["bytes"] for move in json.loads(moved.read_text())["migration"]["moves"]}
    sizes = {one["name"]: (one["param_bytes"], one["optimizer_bytes"]) for one in header()["items"]}
    assert moves["layers.0.mlp"] == sizes["layers.0.mlp"][0]
    assert moves["layers.1.mlp"] == sum(sizes["layers.1.mlp"])
    code, _, err = plan("verify", moved, *options, "--base", base)
    assert code == 0, err


def test_verify_plan_without_its_base_is_refused(plan, made_from_base):
    path, options = made_from_base
    code, _, err = plan("verify", path, *options[:2])
    assert code == 1
    assert "base_plan_id: plan 0 is not available" in err


def test_verify_memory_above_that_of_the_profile_is_refused(plan, made):
    path, options = made("memory-of-the-profile")
    document = json.loads(path.read_text())
    document["constraints"]["memory_bytes"][1] = 10 * SCORE_DECAY
    path.write_text(json.dumps(document))
    code, _, err = plan("verify", path, *options)
    assert code == 1
    assert "constraints.memory_bytes[1]: is 100,000,000, the profile's worker has 10,000,000" in err


def test_verify_shards_of_a_whole_output_layer_are_refused(plan, made):
    path, options = made("plain")
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"x_vocabulary": {"shards_per_worker": [1, 1, 1]}}))
    code, _, err = plan("verify", path, *options)
    assert code == 1
    assert "x_vocabulary: is {'shards_per_worker': [1, 1, 1]}, recomputed None" in err


def test_verify_valid_plan_prints_the_rules_it_obeys(plan, made):
    path, options = made("memory")
    code, out, _ = plan("verify", path, *options)
    assert code == 0
    assert out == (
        f"{path}: every number is correct | layer granularity, 6 microbatches, at least 1 unit per stage,"
        " 10.0 MB of memory on 3 of 3 workers\n"
    )


def test_verify_plan_with_released_workers_is_accepted(plan, tmp_path):
    profile, path = write_run(tmp_path), tmp_path / "made.json"
    assert plan("repack", profile, "--keep", "0.4", "-o", path)[0] == 0
    assert json.loads(path.read_text())["released_workers"]
    check_every_forgery(plan, path, ("--profile", profile))


def test_verify_initial_plan_of_a_run_is_accepted(plan):
    code, out, err = plan("verify", CONTRACTS / "plan/valid/initial.json", "--profile", CONTRACTS / STEPS)
    assert (code, err) == (0, "")
    assert "every number is correct" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balancer": "uniform"}, "read_to_step: is 0, the profile has no record of that step"),
        ({"read_to_step": 10**6}, "read_to_step: is 1000000, the profile has no record of that step"),
        ({"migration": {"pause_ns": 7}}, "migration.pause_ns: is 7, recomputed 0"),
    ],
)
def test_verify_false_number_of_an_initial_plan_is_refused(plan, tmp_path, changes, words):
    document = json.loads((CONTRACTS / "plan/valid/initial.json").read_text())
    document["migration"].update(changes.get("migration", {}))
    document.update({key: value for key, value in changes.items() if key != "migration"})
    path = tmp_path / "initial.json"
    path.write_text(json.dumps(document))
    code, _, err = plan("verify", path, "--profile", CONTRACTS / STEPS)
    assert code == 1
    assert words in err


def test_verify_plan_of_watch_is_accepted(plan, made, tmp_path):
    path, _ = made("uniform")
    document = json.loads(path.read_text())
    document.update(balancer="initial", predicted=None, optimality=None, base_plan_id=None)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/plan-000000.json").write_text(json.dumps(document))
    assert plan("watch", tmp_path, "--once", "--policy", "always")[0] == 0
    base = tmp_path / "plans/plan-000000.json"
    check_every_forgery(plan, tmp_path / "plans/plan-000001.json", ("--profile", tmp_path, "--base", base))
