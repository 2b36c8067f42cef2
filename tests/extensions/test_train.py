"""The technique and the family of CONTRIBUTING.md, installed next to this package and trained for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.whole_runs import write_data
from tests.extensions.outside_package import environment, install, install_section

SIZES = {
    "num-layers": "2",
    "hidden-size": "32",
    "num-attention-heads": "4",
    "seq-length": "32",
    "micro-batch-size": "2",
    "global-batch-size": "4",
    "train-iters": "8",
    "lr": "1e-3",
    "vocab-size": "97",
    "eval-iters": "0",
}
TOML = """\
[layer_drop]
drop_step = 4
"""
BROKEN = """\
[project]
name = "dynmo-broken"
version = "3.1"

[project.entry-points."dynmo_train.techniques"]
broken = "dynmo_broken:TECHNIQUE"

[project.entry-points."dynmo_train.families"]
broken-gpt = "dynmo_broken:FAMILY"
"""
OPTIONS = """\
[project]
name = "dynmo-more-options"
version = "1.0"

[project.entry-points."dynmo_train.options"]
{table} = "dynmo_more_options:MoreOptions"
"""
OPTIONS_MODULE = """\
from dataclasses import dataclass
from dynmo_train.config.options import option

@dataclass(frozen=True, kw_only=True)
class MoreOptions:
    "More options."
    {name}: int = option("A number.", default=7)
"""


def run(target: Path, *words: object, program: tuple[str, ...] = ("-m", "dynmo_train")) -> subprocess.CompletedProcess:
    """A command in a process that imports the packages installed at ``target``."""
    command = [sys.executable, *program, *map(str, words)]
    return subprocess.run(command, env=environment(target), capture_output=True, text=True, check=False, cwd=target)


def pretrain(target: Path, family: str, data: Path, directory: Path, *extra: object) -> str:
    """Train a few steps; returns stderr."""
    sizes = [part for name, value in SIZES.items() for part in (f"--{name}", value)]
    done = run(target, "pretrain", family, "--data-path", data, "--run-dir", directory, *sizes, *extra)
    assert done.returncode == 0, done.stderr
    return done.stderr


def lines(path: Path) -> list[dict]:
    """The documents of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data")


@pytest.mark.complete
def test_technique_from_an_outside_package_acts_and_lowers_costs(tmp_path, data):
    target = install_section("A dynamic technique", tmp_path / "site")
    (tmp_path / "run.toml").write_text(TOML)
    pretrain(target, "gpt", data, tmp_path / "run", "--config", tmp_path / "run.toml")

    profile = lines(tmp_path / "run" / "profile.jsonl")
    event = next(line for line in profile if line["record"] == "event")
    assert (event["kind"], event["step"]) == ("dropped", 4)
    assert event["detail"] == {"items": ["layers.1.attention", "layers.1.mlp"]}
    names = [item["name"] for item in profile[0]["items"]]
    remaining, dropped = names.index("layers.0.mlp"), names.index("layers.1.mlp")
    for step in (line for line in profile if line["record"] == "step"):
        assert step["activation_bytes"][remaining] > 0
        assert (step["activation_bytes"][dropped] > 0) == (step["step"] <= 4)
    assert "dropped" in {line["kind"] for line in lines(tmp_path / "run" / "events.jsonl")}
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["config"]["layer_drop"] == {"drop_step": 4, "drop_layers": 1}
    assert stored["config_sources"]["layer_drop"] == {"drop_step": "file", "drop_layers": "default"}

    # The planner reads the event, and plans from the costs after it.
    out = ("--output", tmp_path / "plan.json")
    planned = run(target, "partition", tmp_path / "run", "--stages", "2", *out, program=("-m", "dynmo_balance"))
    assert planned.returncode == 0, planned.stderr


@pytest.mark.complete
def test_technique_options_are_in_the_help_and_are_checked(tmp_path, data):
    target = install_section("A dynamic technique", tmp_path / "site")
    shown = run(target, "pretrain", "llama", "--help")
    assert "--drop-layers INTEGER" in shown.stdout
    refused = run(
        target,
        "pretrain",
        "gpt",
        "--data-path",
        data,
        "--drop-layers",
        "2",
        *(part for name, value in SIZES.items() for part in (f"--{name}", value)),
    )
    assert refused.returncode == 2
    assert "--drop-layers: must be below --num-layers 2; is 2" in refused.stderr


@pytest.mark.complete
def test_family_from_an_outside_package_trains_and_resumes(tmp_path, data):
    target = install_section("A model family", tmp_path / "site")
    assert "rms-gpt" in run(target, "pretrain", "--help").stdout
    pretrain(target, "rms-gpt", data, tmp_path / "run", "--exit-interval", "4")
    pretrain(target, "rms-gpt", data, tmp_path / "run", "--load", tmp_path / "run")

    assert lines(tmp_path / "run" / "profile.jsonl")[0]["model"]["family"] == "rms-gpt"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000008"
    model = json.loads((checkpoint / "manifest.json").read_text())["model"]
    assert (model["family"], model["normalization"]) == ("rms-gpt", "rmsnorm")
    for command in (("verify", checkpoint), ("info", checkpoint)):
        checked = run(target, *command, program=("-m", "dynmo_ckpt"))
        assert checked.returncode == 0, checked.stderr
    program = f"""
import json
from dynmo_train.models.registry import family_of_manifest
family = family_of_manifest(json.load(open({str(checkpoint / "manifest.json")!r}))["model"])
print(type(family).__name__, [item.name for item in family.items][-1])
"""
    assert run(target, program=("-c", program)).stdout == "RmsGpt head\n"
    without = run(tmp_path, program=("-c", program))
    assert "the model family 'rms-gpt' is not installed; install its package" in without.stderr


@pytest.mark.complete
def test_broken_entry_point_names_its_package_and_the_remedy(tmp_path, data):
    module = "import a_module_that_is_missing\n"
    target = install(tmp_path / "site", {"pyproject.toml": BROKEN, "dynmo_broken.py": module})
    warning = (
        "warning: cannot load the entry point 'broken' (dynmo_train.techniques) of dynmo-broken 3.1:"
        " ModuleNotFoundError: No module named 'a_module_that_is_missing'; fix dynmo_broken:TECHNIQUE, or remove the"
        " package: pip uninstall dynmo-broken"
    )
    assert warning in pretrain(target, "gpt", data, tmp_path / "run", "--train-iters", "1")
    refused = run(target, "pretrain", "broken-gpt")
    assert refused.returncode == 2
    assert "cannot load the entry point 'broken-gpt' (dynmo_train.families) of dynmo-broken 3.1" in refused.stderr


@pytest.mark.parametrize(
    ("table", "name", "expected"),
    [
        ("more", "more_number", None),
        ("model", "more_number", "the entry point 'model' (dynmo_more_options) has the name of the table [model]"),
        ("more", "num_layers", "the entry point 'more' (dynmo_more_options) declares --num-layers, which exists"),
    ],
)
def test_option_entry_point_adds_a_table_or_is_refused(tmp_path, table, name, expected):
    files = {
        "pyproject.toml": OPTIONS.format(table=table),
        "dynmo_more_options.py": OPTIONS_MODULE.format(name=name),
    }
    shown = run(install(tmp_path / "site", files), "pretrain", "gpt", "--help")
    if expected is None:
        assert "--more-number INTEGER" in shown.stdout
    else:
        assert shown.returncode == 2
        assert expected in shown.stderr


@pytest.mark.complete
def test_help_of_other_commands_loads_no_entry_point(tmp_path):
    slow = "raise SystemExit('loaded')\n"
    target = install(tmp_path / "site", {"pyproject.toml": BROKEN, "dynmo_broken.py": slow})
    for words in (("--help",), ("pretrain", "--help"), ("generate", "--help"), ("launch", "--help")):
        shown = run(target, *words)
        assert (shown.returncode, shown.stderr) == (0, "")
    assert "broken-gpt" in run(target, "pretrain", "--help").stdout


@pytest.mark.complete
def test_technique_in_the_registry_needs_one_file_and_one_line(tmp_path, data):
    target = install_section("A dynamic technique", tmp_path / "site")
    (target / "dynmo_layer_drop-0.1.0.dist-info" / "entry_points.txt").unlink()
    program = """
import sys
from dynmo_train.config import extensions
extensions.TECHNIQUES = {"layer_drop": "dynmo_layer_drop:LAYER_DROP"}
from dynmo_train.__main__ import run
sys.exit(run())
"""
    sizes = [part for name, value in SIZES.items() for part in (f"--{name}", value)]
    words = ["pretrain", "gpt", "--data-path", data, "--run-dir", tmp_path / "run", "--drop-step", "1", *sizes]
    done = run(target, *words, program=("-c", program))
    assert done.returncode == 0, done.stderr
    assert "dropped" in {line["kind"] for line in lines(tmp_path / "run" / "events.jsonl")}
