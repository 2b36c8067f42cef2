"""The balancer of CONTRIBUTING.md works from an installed package, and faults of such packages name them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from dynmo_balance.partition.registry import balancer_names
from dynmo_train.config.extensions import BALANCERS
from dynmo_train.formats.plan import read_plan
from tests.extensions.outside_package import environment, install, install_section
from tests.paths import CONTRACTS

MODULE = "faulty_balancer:boundaries"
ENTRY_POINT = """[project]
name = "faulty"
version = "1"

[project.entry-points."dynmo_balance.balancers"]
{name} = "{value}"
"""


@pytest.fixture
def run(tmp_path):
    """A run directory: a profile and its initial plan."""
    (tmp_path / "run/plans").mkdir(parents=True)
    shutil.copy(CONTRACTS / "plan/valid/initial.json", tmp_path / "run/plans/plan-000000.json")
    shutil.copy(CONTRACTS / "profile/valid/steps.jsonl", tmp_path / "run/profile.jsonl")
    return tmp_path / "run"


def dynmo_plan(site, *arguments):
    command = [sys.executable, "-m", "dynmo_balance", *map(str, arguments)]
    done = subprocess.run(command, env=environment(site), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_balancer_of_outside_package_works_in_every_command(tmp_path, run):
    site = install_section("A balancer", tmp_path / "site")
    output = tmp_path / "plan.json"
    code, _, err = dynmo_plan(site, "partition", run, "--balancer", "activations", "-o", output)
    assert code == 0, err
    assert read_plan(output).balancer == "activations"
    code, out, err = dynmo_plan(site, "compare", run, "--format", "json")
    assert code == 0, err
    assert json.loads(out)[-1]["balancer"] == "activations"
    with (run / "profile.jsonl").open("a", encoding="utf-8") as profile:
        profile.write('{"record": "plan_request", "step": 9}\n')
    code, _, err = dynmo_plan(site, "watch", run, "--once", "--balancer", "activations")
    assert code == 0, err
    assert read_plan(run / "plans/plan-000001.json").balancer == "activations"


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "value", "source", "message"),
    [
        ("broken", "no_such_module:boundaries", "", "'broken' of the package 'faulty' cannot be loaded"),
        (
            "broken",
            MODULE,
            "boundaries = 3",
            "'broken' of the package 'faulty' must be a function",
        ),
        (
            "broken",
            MODULE,
            "def boundaries(p): return (0, 1)",
            "of the package 'faulty' returned",
        ),
        ("broken", MODULE, "def boundaries(p): return 1 / 0", "of the package 'faulty' failed"),
        ("exact", MODULE, "", "the package 'faulty' registers the balancer 'exact'"),
    ],
    ids=["import", "type", "result", "exception", "name"],
)
def test_balancer_of_faulty_package_is_refused_by_name(tmp_path, run, name, value, source, message):
    files = {"pyproject.toml": ENTRY_POINT.format(name=name, value=value), "faulty_balancer.py": source}
    code, _, err = dynmo_plan(install(tmp_path / "site", files), "partition", run, "--balancer", name)
    assert (code, "Traceback" in err) == (2, False)
    assert message in err


@pytest.mark.complete
def test_unknown_balancer_is_refused_with_the_known_names(tmp_path, run):
    site = install_section("A balancer", tmp_path / "site")
    code, _, err = dynmo_plan(site, "partition", run, "--balancer", "magic")
    assert code == 2
    assert "'magic'" in err
    assert "diffusion_param, activations" in " ".join(err.split())


def test_help_does_not_import_outside_packages(tmp_path):
    files = {
        "pyproject.toml": ENTRY_POINT.format(name="broken", value=MODULE),
        "faulty_balancer.py": "raise SystemExit(9)",
    }
    assert dynmo_plan(install(tmp_path / "site", files), "partition", "--help")[0] == 0


@pytest.mark.complete
def test_trainer_accepts_the_balancer_of_an_installed_package_only(tmp_path):
    options = "pretrain gpt --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --lr 1"
    options += " --train-iters 1 --micro-batch-size 1 --data-path none --dry-run --dry-run-processes 2 --balance online"
    site = install_section("A balancer", tmp_path / "site")
    outputs = []
    for folder in (site, tmp_path / "empty"):
        command = [sys.executable, "-m", "dynmo_train", *options.split(), "--balancer", "activations"]
        done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
        outputs.append((done.returncode, done.stderr))
    assert outputs[0][0] == 0, outputs[0][1]
    assert outputs[1][0] == 2
    assert "--balancer: is 'activations'; must be one of exact, time," in outputs[1][1]


def test_trainer_lists_the_built_in_balancers_of_the_planner():
    """The packages do not import each other, so that the trainer has a list of its own."""
    assert set(BALANCERS) == set(balancer_names())
