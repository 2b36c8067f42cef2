"""What a run was made of: a resume without it is refused, with the option that permits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo_train.config import option_specs
from dynmo_train.config.resolve import resolve
from dynmo_train.formats.checkpoint import Checkpoint, CheckpointError
from dynmo_train.trainer.checkpoint.run_options import (
    KEY,
    OptionChanges,
    check_same_options,
    compare_options,
    keep_schedules,
    recorded_options,
)
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL

MOCK = {name: value for name, value in SMALL.items() if name != "data_path"} | {"mock_data": True}
TECHNIQUES = {
    "freezing": {"freeze_schedule": "2:1"},
    "adaptive freezing": {"freeze_adaptive": True, "freeze_window": 4},
    "pruning": {"sparsify": True, "final_sparsity": 0.5},
    "mixture of depths": {"mod_capacity": 0.5},
    "early exit": {"early_exit_layers": "1"},
    "sparse attention": {"sparse_attention": True},
    "compression": {"grad_comp": True, "use_error_feedback": True},
    "curriculum": {"curriculum_shortest": 8},
    "adapters' dropout": {"lora_rank": 2, "lora_dropout": 0.1},
}
DATA = {
    "seed": {"seed": 7},
    "split": {"split": "9,1,0"},
    "order": {"sample_order": "megatron"},
    "documents": {"reset_attention_mask": True},
    "conversations": {"sft": True},
}


def config(**options):
    return resolve(flags={**MOCK, **options}, command={"family": "gpt"})


def manifest(**options):
    return {KEY: recorded_options(config(**options))}


def changes(there, here):
    found = compare_options(manifest(**there), config(**here))
    return found.refused, found.printed


@table(("name", "options"), [*TECHNIQUES.items(), *DATA.items()])
def test_resume_with_other_options_is_refused_and_names_each(name, options):
    refused, printed = changes(options, {})
    named = {name for name in options if name != "lora_rank"}
    assert {text.split()[0][2:].replace("-", "_") for text in refused} == named
    assert printed == ()
    assert changes(options, options) == ((), ())
    checkpoint = Checkpoint(directory=Path("step-1"), manifest=manifest(**options))
    with pytest.raises(CheckpointError, match="--allow-changed-options"):
        check_same_options(checkpoint, config())
    check_same_options(checkpoint, config(allow_changed_options=True))


@table(("name", "options"), TECHNIQUES.items())
def test_technique_may_be_added_and_is_printed(name, options):
    refused, printed = changes({}, options)
    assert refused == ()
    assert {text.split()[0][2:].replace("-", "_") for text in printed} == {
        name for name in options if name != "lora_rank"
    }


@table(
    ("options", "is_printed"),
    [
        ({"clip_grad": 0.5, "bf16": True, "hidden_dropout": 0.2}, True),
        ({"seq_length": 64}, True),
        # The schedule has warnings of its own; placement, length and logs change no step.
        ({"lr": 1.0, "train_iters": 99, "micro_batch_size": 1, "log_interval": 7, "num_workers": 2}, False),
        ({"sparse_threshold": 0.5, "early_exit_threshold": 0.5, "schedule": "gpipe"}, False),
    ],
)
def test_other_options_may_change(options, is_printed):
    refused, printed = changes({"hidden_dropout": 0.1}, {"hidden_dropout": 0.1, **options})
    assert refused == ()
    assert len(printed) == (len(options) if is_printed else 0)


def test_data_is_compared_by_its_contents(tmp_path):
    """A data set may have moved; another one under the same name is another one."""
    for name, text in (("a/text", "1"), ("b/text", "1"), ("c/text", "2")):
        (tmp_path / name).parent.mkdir()
        for suffix in (".bin", ".idx"):
            Path(f"{tmp_path / name}{suffix}").write_text(text)
    there = {"mock_data": False, "data_path": str(tmp_path / "a/text")}
    moved, other = ({**there, "data_path": str(tmp_path / f"{name}/text")} for name in "bc")
    assert changes(there, moved) == ((), ())
    (text,), _ = changes(there, other)
    assert text == f"--data-path {other['data_path']} is not that of the checkpoint"
    blend = {**there, "data_path": f"0.3 {moved['data_path']} 0.7 {other['data_path']}"}
    assert len(changes(there, blend)[0]) == 1
    refused, _ = changes(there, {})
    assert set(refused) == {"--mock-data is false there, true here", "--data-path is not given here"}


def test_checkpoint_of_an_earlier_version_has_seed_and_split():
    earlier = {"data": {"seed": 1, "split": "969,30,1", "sequence_length": 8, "prefix": "x"}}
    assert compare_options(earlier, config()).refused == ("--seed is 1 there, 1234 here",)
    assert compare_options({"data": None}, config(seed=1, sparsify=True)) == compare_options({}, config())


@table(
    ("technique", "schedule", "value"),
    [
        ({"sparsify": True}, "pruning_end_iter", 100),
        ({"curriculum_shortest": 8}, "curriculum_steps", 100),
        ({"grad_comp": True, "grad_comp_warm_up": 0.3}, "grad_comp_warm_up_iters", 30),
    ],
)
def test_schedule_that_follows_from_the_length_stays_in_a_longer_run(technique, schedule, value, capsys):
    first, longer = config(**technique, train_iters=100), config(**technique, train_iters=200)
    stored = {KEY: recorded_options(first)}
    resumed = keep_schedules(longer, stored, prints=True)
    flag = f"--{schedule.replace('_', '-')}"
    printed = f"schedules of the checkpoint: {flag} {value}, not {2 * value}; to change them, give these options"
    assert capsys.readouterr().err == f"{printed} and --allow-changed-options\n"
    of_schedule = next(spec for spec in option_specs().values() if spec.name == schedule).concern
    assert getattr(resumed.concern(of_schedule), schedule) == value
    assert compare_options(stored, resumed) == OptionChanges((), ())
    # The next checkpoint has it, too, and so the next resume.
    assert recorded_options(resumed) == recorded_options(first)
    given = keep_schedules(config(**technique, train_iters=200, **{schedule: 2 * value}), stored, prints=True)
    assert compare_options(stored, given).refused == (f"{flag} is {value} there, {2 * value} here",)
    # A technique that the first run did not have has its own schedule.
    assert keep_schedules(longer, {KEY: recorded_options(config(train_iters=100))}, prints=True) == longer
    assert capsys.readouterr().err == ""
