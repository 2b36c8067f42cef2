"""Runs on conversations (``--sft``): the same bits on any placement and after a resume."""

from __future__ import annotations

import json

import pytest

from dynmo_tools import cli
from tests.chat_templates import CHATML, write_tokenizer
from tests.distributed.whole_runs import figures, tensors, train

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
WORDS = ["red", "green", "blue", "one", "two", "three", "four"]
OPTIONS = {
    "train_iters": "10",
    "eval_interval": "5",
    "vocab_size": "420",
    "seq_length": "96",
    "global_batch_size": "8",
    "pruning_start_iter": None,
    "pruning_end_iter": None,
    "pruning_freq": None,
    "freeze_schedule": None,
    "rebalance_interval": None,
}


def rows():
    for number in range(160):
        words = [WORDS[(number + at) % 7] for at in range(1 + number % 9)]
        yield {
            "messages": [
                {"role": "user", "content": " ".join(words)},
                {"role": "assistant", "content": " ".join(reversed(words))},
            ]
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("chat"), "chatml", CHATML)
    lines = [json.dumps(row) + "\n" for row in rows()]
    lines += [json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n", '{"text": "x"}\n']
    (folder / "chat.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        words = ["dynmo-prep", "binarize-chat", str(folder / "chat.jsonl"), "-o", str(folder / "data")]
        patch.setattr("sys.argv", [*words, "--tokenizer", str(folder)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 3  # a line without a conversation
    return folder / "data_chat_document"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("sft") / "one"
    text = train(None, run, 1, "--sft", "--data-path", str(data), **OPTIONS)
    assert "conversations in" in text
    return run


@pytest.mark.complete
def test_conversations_are_learned(whole):
    losses = [loss for _, (loss, _) in sorted(figures(whole).items())]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.complete
def test_run_on_conversations_has_the_same_bits_on_two_stages(data, whole, tmp_path):
    layout = {"pipeline_model_parallel_size": "2", "rebalance_interval": "2"}
    flags = ("--sft", "--data-path", str(data), "--balance", "online", "--balance-lockstep")
    text = train(None, tmp_path / "two", 2, *flags, **(OPTIONS | layout))
    assert figures(tmp_path / "two") == figures(whole)
    assert text.count("conversations in") == 1


@pytest.mark.complete
def test_run_on_conversations_resumes_with_the_same_bits(data, whole, tmp_path):
    run = tmp_path / "run"
    train(None, run, 1, "--sft", "--data-path", str(data), **OPTIONS, exit_interval="6")
    assert max(figures(run)) == 6
    train(None, run, 1, "--sft", "--data-path", str(data), **OPTIONS, load=str(run))
    assert figures(run) == figures(whole)
    assert tensors(run, 10) == tensors(whole, 10)


@pytest.mark.complete
def test_packing_and_mask_change_the_losses(data, whole, tmp_path):
    train(None, tmp_path / "padded", 1, "--sft", "--no-sft-packing", "--data-path", str(data), **OPTIONS)
    train(None, tmp_path / "text", 1, "--data-path", str(data), **OPTIONS)
    assert figures(tmp_path / "padded") != figures(whole)
    assert figures(tmp_path / "text") != figures(whole)


def test_loss_per_token_does_not_depend_on_microbatches_and_replicas(data, tmp_path):
    # Dropout draws other numbers in each microbatch; samples of one conversation differ most in learned tokens.
    flags = ("--sft", "--no-sft-packing", "--data-path", str(data), "--attention-dropout", "0", "--hidden-dropout", "0")
    options = OPTIONS | {"train_iters": "3", "eval_interval": "3"}
    # One microbatch is the whole batch: the mean over its tokens is that over the tokens of the step.
    train(None, tmp_path / "whole", 1, *flags, **options, micro_batch_size="8")
    expected = figures(tmp_path / "whole")
    # Without the option each microbatch has the same weight: the gradients differ.
    train(None, tmp_path / "mean", 1, *flags, **options, micro_batch_size="1")
    for step, (_, norm) in figures(tmp_path / "mean").items():
        assert norm != pytest.approx(expected[step][1], rel=5e-3)
    layouts = {
        "microbatches": (1, {"micro_batch_size": "1"}),
        "replicas": (2, {"data_parallel_size": None}),
        "stages": (2, {"pipeline_model_parallel_size": "2", "vocabulary_parallel": "2"}),
        "context": (2, {"context_parallel_size": "2", "data_parallel_size": None}),
    }
    for name, (workers, layout) in layouts.items():
        own = {"micro_batch_size": "2", **options, **layout}
        train(None, tmp_path / name, workers, *flags, "--calculate-per-token-loss", **own)
        for step, (loss, norm) in figures(tmp_path / name).items():
            assert (loss, norm) == pytest.approx(expected[step], rel=2e-4), name


@pytest.mark.complete
@pytest.mark.parametrize("shards", [None, "2"])
def test_depths_have_the_loss_per_token_on_context_ranks(data, tmp_path, shards):
    flags = ("--sft", "--no-sft-packing", "--data-path", str(data), "--attention-dropout", "0", "--hidden-dropout", "0")
    flags += ("--calculate-per-token-loss", "--position-embedding-type", "rotary")
    flags += ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "1")
    options = OPTIONS | {"train_iters": "3", "eval_interval": "3", "vocabulary_parallel": shards}
    train(None, tmp_path / "whole", 1, *flags, **options, micro_batch_size="8")
    layout = {"context_parallel_size": "2", "data_parallel_size": None, "micro_batch_size": "2"}
    train(None, tmp_path / "context", 2, *flags, **options, **layout)
    expected = figures(tmp_path / "whole")
    for step, (loss, norm) in figures(tmp_path / "context").items():
        assert (loss, norm) == pytest.approx(expected[step], rel=2e-4)
