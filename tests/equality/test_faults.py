"""A tree with a fault differs from this one in the fault's area, at a key that shows it; this one equals itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.compare_commits import main
from tests.equality.areas import AREAS
from tests.equality.trees import copy_tracked
from tests.paths import ROOT

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(1800)]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of one line, the inputs that execute it, and the key that shows it.

    Attributes:
        file: of the tree.
        old: text of the file.
        new: what replaces it.
        inputs: arguments that choose inputs of the area.
        key: of the report.
    """

    file: str
    old: str
    new: str
    inputs: tuple[str, ...]
    key: str


FAULTS = {
    "help": Fault(
        file="dynmo_balance/cli/partition.py",
        old="Make one plan with its certificate",
        new="Make a plan with its certificate",
        inputs=("--only", "dynmo-plan"),
        key="dynmo-plan partition --help",
    ),
    "dry_runs": Fault(
        file="dynmo_train/config/compat/flags.py",
        old='"--checkpoint-activations": becomes("--recompute-granularity", "full")',
        new='"--checkpoint-activations": becomes("--recompute-granularity", "selective")',
        inputs=("--only", "deepspeed_heredoc.sh"),
        key="deepspeed_heredoc.sh explain-flags",
    ),
    "plans": Fault(  # another one of several shortest runs that prove a bottleneck
        file="dynmo_balance/partition/exact.py",
        old="(run[1] - run[0], run[0])",
        new="(run[1] - run[0], -run[0])",
        inputs=("--count", "24"),
        key="profile ",
    ),
    "verdicts": Fault(
        file="dynmo_balance/formats/plan_fields.py",
        old='"bubble_fraction": number(0, 1)',
        new='"bubble_fraction": number(0, 2)',
        inputs=("--only", "fixture plan/invalid/b*"),
        key="fixture plan/invalid/bubble-above-one by dynmo-plan",
    ),
    "checkpoints": Fault(
        file="dynmo_ckpt/huggingface/models.py",
        old='"torch_dtype": dtype',
        new='"torch_dtype": dtype.upper()',
        inputs=("--only", "gpt/native"),
        key="gpt/native from native to hf",
    ),
    "documents": Fault(
        file="dynmo_balance/cli/verify.py",
        old="every number is correct",
        new="each number is correct",
        inputs=("--only", "dynmo_balance/README.md"),
        key="dynmo_balance/README.md block 0",
    ),
    "runs": Fault(
        file="dynmo_train/models/families/family.py",
        old="std = self.shape.init_method_std",
        new="std = self.shape.init_method_std * 1.001",
        inputs=("--only", "5"),
        key="5/whole",
    ),
}


def test_every_area_has_a_fault():
    assert FAULTS.keys() == AREAS.keys()


@pytest.mark.parametrize("area", FAULTS)
def test_fault_is_reported_at_its_key(area, tmp_path, capsys):
    fault = FAULTS[area]
    broken = copy_tracked(ROOT, tmp_path / "broken")
    text = (broken / fault.file).read_text(encoding="utf-8")
    assert fault.old in text
    (broken / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    code = main([f"{ROOT}/", f"{broken}/", "--area", area, *fault.inputs])
    printed = capsys.readouterr().out
    assert code == 1, printed
    assert re.search(rf"^  {re.escape(fault.key)}.*: \d+ fields differ$", printed, re.M), printed


@pytest.mark.parametrize("area", FAULTS)
def test_tree_equals_itself(area, capsys):
    assert main([f"{ROOT}/", f"{ROOT}/", "--area", area, *FAULTS[area].inputs]) == 0, capsys.readouterr().out
