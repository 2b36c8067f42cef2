"""Megatron's options of stages give the stages of Megatron: against a recorded table of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of, resolve_checked
from dynmo_train.config.options import DefaultContext
from dynmo_train.config.pipeline_layout import blocks_per_stage, parse_layout
from dynmo_train.models.registry import family_of
from dynmo_train.trainer.settings_from_config import initial_partition
from tests.tables import table

TABLE = json.loads((Path(__file__).parent / "megatron" / "placement.json").read_text())["cases"]
MODEL = {
    "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 32, "micro_batch_size": 1,
    "global_batch_size": 8, "train_iters": 2, "lr": 0.1, "data_path": "d",
}  # fmt: skip


def options_of(case):
    names = {
        "layout": "layout",
        "first": "first",
        "last": "last",
        "embedding": "counts_embedding",
        "loss": "counts_loss",
    }
    return {ours: case[theirs] for theirs, ours in names.items() if case.get(theirs) is not None}


@table("case", TABLE, ids=lambda case: "-".join(f"{v}" for k, v in case.items() if k != "stages"))
def test_blocks_per_stage_are_those_of_megatron(case):
    def stages():
        return blocks_per_stage(case["layers"], case["ranks"], case.get("virtual", 1), **options_of(case))

    if case["stages"] is None:
        with pytest.raises(UsageError):
            stages()
        return
    counts = stages()
    begins = [sum(counts[:at]) for at in range(len(counts))]
    assert [list(pair) for pair in zip(begins, counts, strict=True)] == case["stages"]


FLAGS = {
    "layout": "pipeline_model_parallel_layout",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}


def config_from(case, **more):
    flags = {FLAGS[name]: value for name, value in case.items() if name in FLAGS and value}
    if case.get("virtual", 1) > 1:
        flags |= {"schedule": "interleaved-1f1b", "virtual_stages_per_worker": case["virtual"]}
    return resolve_checked(
        flags={**MODEL, "num_layers": case["layers"], **flags, **more},
        file={},
        command={"family": "gpt"},
        context=DefaultContext(world_size=case["ranks"]),
    )


@table("case", [case for case in TABLE if case["stages"] is not None and len(case) > 4][::4])
def test_initial_partition_has_the_blocks_of_megatron(case):
    config = config_from(case)
    family = family_of(config)
    partition = initial_partition(config, family, None)
    layers = [[name for name in stage if name.endswith(".attention")] for stage in partition.stages]
    assert [len(names) for names in layers] == [count for _, count in case["stages"]]
    assert partition.stages[0][0] == family.items[0].name
    assert partition.stages[-1][-1] == family.items[-1].name
    assert partition.stage_ranks == tuple(stage % case["ranks"] for stage in range(len(case["stages"])))


@table(
    ("text", "message"),
    [
        ("", "begin with E"),
        ("t|tL", "begin with E"),
        ("Et|t", "end with L"),
        ("EEt|tL", "each once"),
        ("Et|mL", "multi-token"),
        ("Ex|tL", "'x' must be"),
        ("E((t|)*2)*2L", "must be"),
        ("E(t|)*999999L", "unrolled"),
        ("Et*999999|L", "unrolled"),
        ("E(t|)*2*999999L", "unrolled"),
        ("E\0L", "must be"),
    ],
)
def test_parse_layout_invalid_text_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_layout(text)


def test_layout_derives_schedule_and_stages_per_rank():
    config = config_from({"layers": 6, "ranks": 2, "layout": "Et|tt|tt|tL"})
    assert config.parallel.schedule == "interleaved-1f1b"
    assert config.parallel.virtual_stages_per_worker == 2


def test_blocks_per_virtual_stage_count_embedding_and_loss():
    words = {"num_layers_per_virtual_pipeline_stage": 2}
    config = config_from({"layers": 14, "ranks": 4, "embedding": True, "loss": True}, **words)
    assert config.parallel.blocks_of_stages(14) == (1, 2, 2, 2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"layout": "Et|ttL", "first": 1}, "--pipeline-model-parallel-layout"),
        ({"first": 1, "embedding": True}, "--decoder-first-pipeline-num-layers"),
        ({"layout": "Et|tL"}, "--pipeline-model-parallel-layout"),
        ({"last": 9}, "--decoder-last-pipeline-num-layers"),
        ({"loss": True}, "--account-for-loss-in-pipeline-split"),
    ],
)
def test_options_of_stages_that_disagree_are_refused(flags, flag):
    with pytest.raises(DocumentError) as caught:
        config_from({"layers": 4, "ranks": 2, **flags})
    assert flag in [problem.path for problem in caught.value.problems]


def test_layout_is_for_the_start_and_not_for_v_schedules():
    with pytest.raises(DocumentError, match="--schedule zb-v"):
        config_from({"layers": 4, "ranks": 2, "layout": "Et|t|t|tL"}, schedule="zb-v", virtual_stages_per_worker=2)
    assert not config_of(**MODEL, num_layers=2).parallel.has_layout


def test_dry_run_has_the_parameters_of_the_layout():
    from dynmo_train.trainer.dryrun.report import dry_run

    even = dry_run(config_from({"layers": 6, "ranks": 2}), "cpu")
    uneven = dry_run(config_from({"layers": 6, "ranks": 2, "layout": "Et|tttttL"}), "cpu")
    assert uneven.parameters == even.parameters
    block, words, norm = 12 * 16 * 16 + 13 * 16, 128 * 16, 2 * 16
    assert even.parameters_per_worker == 3 * block + words + 8 * 16
    assert uneven.parameters_per_worker == 5 * block + words + norm
