"""Lines of the log, bytes of TensorBoard files, and the FLOPs of a step."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynmo_train.config import config_document, config_of
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.flops import matrix_parameters, step_flops
from dynmo_train.trainer.monitoring.tensorboard import EventWriter, crc32c, event, record
from dynmo_train.trainer.monitoring.training_log import (
    IterationStats,
    TrainingLog,
    argument_lines,
    batch_line,
    evaluation_line,
    graphs_line,
    iteration_line,
    parameter_lines,
    startup_lines,
    target_lines,
    tensorboard_scalars,
    vocabulary_line,
)
from dynmo_train.trainer.rebalance.plan_controller import AppliedPlan

SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 50257,
    "micro_batch_size": 1,
    "global_batch_size": 288,
    "train_iters": 50,
    "lr": 0.001,
    "data_path": "corpus",
}
FIGURES = {
    "iteration": 25,
    "train_iters": 73242187,
    "consumed_samples": 50,
    "elapsed_ms": 87.0,
    "learning_rate": 1.638e-8,
    "global_batch_size": 2,
    "lm_loss": 10.86954,
    "loss_scale": 4294967296.0,
    "grad_norm": 0.0,
    "skipped": 0,
    "nan": 0,
}


def test_iteration_line_equals_megatrons():
    assert iteration_line(IterationStats(**FIGURES)) == (
        " iteration       25/73242187 | consumed samples:           50 | elapsed time per iteration (ms): 87.0"
        " | learning rate: 1.638E-08 | global batch size:     2 | lm loss: 1.086954E+01 | loss scale: 4294967296.0"
        " | grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_decoupled_learning_rate_is_in_the_line_and_the_scalars():
    stats = IterationStats(**FIGURES, decoupled_learning_rate=2.5e-4)
    assert " | learning rate: 1.638E-08 | decoupled learning rate: 2.500E-04 | global" in iteration_line(stats)
    assert tensorboard_scalars(stats)["decoupled-learning-rate"] == 2.5e-4
    assert "decoupled-learning-rate" not in tensorboard_scalars(IterationStats(**FIGURES))


def test_skipped_iteration_has_no_loss_and_no_norm():
    figures = FIGURES | {
        "iteration": 1,
        "train_iters": 508626,
        "consumed_samples": 288,
        "elapsed_ms": 255940.5,
        "learning_rate": 0.0,
        "global_batch_size": 288,
        "lm_loss": None,
        "grad_norm": None,
        "skipped": 1,
    }
    assert iteration_line(IterationStats(**figures)) == (
        " iteration        1/  508626 | consumed samples:          288 | elapsed time per iteration (ms): 255940.5"
        " | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 4294967296.0"
        " | number of skipped iterations:   1 | number of nan iterations:   0 |"
    )


def test_evaluation_line_equals_megatrons():
    assert evaluation_line("iteration 100", {"lm_loss": 2.0}) == (
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert evaluation_line("the end of training for test data", {"lm_loss": 30.0, "sop_loss": 0.0}) == (
        " validation loss at the end of training for test data | lm loss value: 3.000000E+01"
        " | lm loss PPL: 4.851652E+08 | sop loss value: 0.000000E+00 | sop loss PPL: 1.000000E+00 | "
    )
    assert evaluation_line("iteration 1", {"lm_loss": 0.0, "top5_acc": 50.0}, "loss").endswith(
        " | loss PPL: 1.000000E+00 | top5_acc value: 5.000000E+01 | "
    )


def result(milliseconds):
    return SimpleNamespace(step_ns=milliseconds * 1_000_000)


def after_moves(capsys, move_after):
    """What the log prints of 14 steps; steps take 10 ms up to the first move, 5 ms after it."""
    config = config_of(**SMALL | {"log_interval": 1000})
    log = TrainingLog(config, SimpleNamespace(is_rank0=True, size=2), lambda _samples, _tokens: 0)
    for step in range(1, 15):
        log.log_step(step, 0, 2, 32, result(10 if step <= move_after[0] else 5))
        if step in move_after:
            log.log_move(AppliedPlan(plan_id=step, moves=[("layers.1", 0, 1, 2048)], pause_ns=1_500_000), step)
    return capsys.readouterr().out.splitlines()


def test_move_line_has_mean_step_times_of_five_steps(capsys):
    assert after_moves(capsys, [6]) == [
        " plan 6 applied after iteration 6: moved 1 item (2,048 bytes) in 1.5 ms",
        "   layers.1: worker 0 -> 1, 2,048 bytes",
        " plan 6: step time 10.0 ms -> 5.0 ms (ratio 2.00, means of 5 steps)",
    ]


def test_move_followed_by_another_has_no_step_times(capsys):
    lines = [line for line in after_moves(capsys, [4, 8]) if "layers" not in line]
    assert lines == [
        " plan 4 applied after iteration 4: moved 1 item (2,048 bytes) in 1.5 ms",
        " plan 8 applied after iteration 8: moved 1 item (2,048 bytes) in 1.5 ms",
        " plan 8: step time 5.0 ms -> 5.0 ms (ratio 1.00, means of 5 steps)",
    ]


class Writer:
    def __init__(self):
        self.calls = []

    def scalars(self, step, scalars):
        self.calls.append((step, scalars))

    def close(self, exit_code=None):
        self.calls.append(exit_code)


def test_every_writer_gets_the_scalars_of_steps_and_evaluations(capsys):
    first, second = Writer(), Writer()
    config = config_of(**SMALL | {"log_interval": 2})
    world = SimpleNamespace(is_rank0=True, size=1)
    log = TrainingLog(config, world, lambda _samples, _tokens: 0, [first, second])
    for step, loss in ((1, 3.0), (2, 2.0)):
        losses = {"lm_loss": loss}
        fields = {
            "step_ns": 10**9,
            "updated": True,
            "losses": losses,
            "loss": loss,
            "next_rate": 0.5,
            "next_decoupled_rate": None,
        }
        more = {"loss_scale": 1.0, "grad_norm": 4.0, "compression": None}
        log.log_step(step, 0, 2, 32, SimpleNamespace(**fields, **more))
    log.log_evaluation(2, {"lm_loss": 0.0, "top5_acc": 50.0}, "iteration 2", "test")
    log.close(75)
    step = {"learning-rate": 0.5, "batch-size": 2.0, "lm loss": 2.5, "loss-scale": 1.0, "grad-norm": 4.0}
    assert first.calls == [
        (2, step | {"iteration-time": 1.0}),
        (2, {"lm loss test": 0.0, "lm loss test ppl": 1.0}),
        (2, {"top5_acc test": 50.0}),
        75,
    ]
    assert second.calls == first.calls


def test_throughput_follows_the_step_time():
    line = iteration_line(IterationStats(**FIGURES | {"tflops": 138.04}))
    assert "(ms): 87.0 | throughput per GPU (TFLOP/s/GPU): 138.0 | learning rate" in line


def test_argument_lines_first_start_lists_what_was_given():
    lines = argument_lines(config_of(**SMALL, fp16=True), Path("r"), None)
    assert any(line.startswith("  fp16 ....") and line.endswith(" True") for line in lines)
    assert not any(line.startswith("  adam_beta1") for line in lines)
    assert any(line.endswith(" arguments: r/run.json") for line in lines)


def test_argument_lines_restart_lists_what_changed():
    before = config_document(config_of(**SMALL))["config"]
    resumed = config_of(**SMALL, load="r", save="r", run_dir="r")
    assert argument_lines(resumed, Path("r"), before) == ["arguments: as in the previous start, in r/run.json"]
    lines = argument_lines(config_of(**SMALL | {"lr": 0.5}), Path("r"), before)
    assert [line.split(" ... ")[0].split()[0] for line in lines[1:-2]] == ["lr"]
    assert lines[1].endswith(f" {SMALL['lr']} -> 0.5")


def test_startup_lines_equal_megatrons():
    config = config_of(**SMALL, fp16=True)
    arguments = argument_lines(config, Path("r"), None, is_verbose=True)
    lines = startup_lines(config, {(0, 0): 7, (1, 0): 8, (0, 1): 9}, arguments)
    assert lines[0] == "using torch.float16 for parameters ..."
    assert lines[1] == "------------------------ arguments ------------------------"
    assert "  adam_beta1 ...................................... 0.9" in lines
    assert "  accumulate_allreduce_grads_in_fp32 .............. True" in lines
    assert arguments[-1] == "-------------------- end of arguments ---------------------"
    assert arguments[1:-1] == sorted(arguments[1:-1], key=str.lower)
    assert batch_line(config) == "setting number of micro-batches to constant 288"
    wide = config_of(**SMALL | {"make_vocab_size_divisible_by": 1024})
    assert vocabulary_line(wide) == " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)"
    assert parameter_lines({(0, 1): 9, (1, 0): 8, (0, 0): 7}) == [
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 7",
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 8",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 9",
    ]
    assert target_lines(146484375, 5863680, 11520) == [
        " > datasets target sizes (minimum size):",
        "    train:      146484375",
        "    validation: 5863680",
        "    test:       11520",
    ]


def test_batch_size_ramp_is_logged():
    given = {**SMALL, "train_iters": None, "train_samples": 5000, "global_batch_size": 32}
    stepped = config_of(**given, step_batch_size_schedule="0:16 1K:32")
    assert batch_line(stepped) == "using step batch size schedule: 0:16 1K:32"
    assert batch_line(config_of(**given, rampup_batch_size="16 8 1000")) == (
        "will use batch size rampup starting from global batch size 16 to global batch size 32"
        " with batch size increments 8 over 1000 samples."
    )


def test_event_checksum_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


def parse(payload):
    """Fields of a message as (number, value) pairs."""
    found, at = [], 0
    while at < len(payload):
        key, at = payload[at], at + 1
        if key & 7 == 1:
            found.append((key >> 3, struct.unpack_from("<d", payload, at)[0]))
            at += 8
        elif key & 7 == 5:
            found.append((key >> 3, struct.unpack_from("<f", payload, at)[0]))
            at += 4
        else:
            value = shift = 0
            while True:
                byte, at = payload[at], at + 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            if key & 7 == 2:
                found.append((key >> 3, payload[at : at + value]))
                at += value
            else:
                found.append((key >> 3, value))
    return found


def test_full_disk_drops_whole_events(tmp_path, monkeypatch, capsys):
    writer = EventWriter(tmp_path)
    [path] = tmp_path.iterdir()
    sound, file = path.read_bytes(), writer.file

    class Full:
        """A file that writes five bytes, and fails at the next write."""

        name, truncate = str(path), file.truncate

        def __init__(self):
            self.taken = 0

        def write(self, payload):
            self.taken += 1
            if self.taken % 2 == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return file.write(payload[:5])

    writer.file = Full()
    for step in (1, 2):
        writer.scalars(step, {"lm loss": 2.5})
    assert path.read_bytes() == sound
    assert capsys.readouterr().err.count("No space left on device") == 1
    writer.file = file
    writer.scalars(3, {"lm loss": 2.5})
    writer.close()
    assert path.read_bytes().startswith(sound)
    assert len(path.read_bytes()) == len(sound) + len(record(event(0.0, 3, {"lm loss": 2.5})))


def messages_of(path):
    """The events of a file."""
    payload, messages = path.read_bytes(), []
    while payload:
        (length,) = struct.unpack("<Q", payload[:8])
        message = payload[12 : 12 + length]
        assert record(message) == payload[: 16 + length]
        messages.append(parse(message))
        payload = payload[16 + length :]
    return messages


def test_event_file_contains_the_scalars(tmp_path):
    writer = EventWriter(tmp_path / "board")
    writer.scalars(300, tensorboard_scalars(IterationStats(**FIGURES)))
    writer.scalars(301, {"lm loss": 2.5})
    writer.close()
    [path] = (tmp_path / "board").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    messages = messages_of(path)
    assert dict(messages[0])[3] == b"brain.Event:2"
    assert dict(messages[1])[2] == 300
    values = [dict(parse(value)) for _, value in parse(dict(messages[1])[5])]
    assert {value[1].decode() for value in values} == {
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "grad-norm",
        "iteration-time",
    }
    assert dict(parse(dict(parse(dict(messages[2])[5]))[1])) == {1: b"lm loss", 2: 2.5}


def test_event_file_of_a_resumed_run_drops_later_steps_of_earlier_files(tmp_path):
    """After a kill an earlier file has steps beyond the checkpoint, which a session log of a start drops."""
    EventWriter(tmp_path, 300).close()
    [path] = tmp_path.iterdir()
    version, start = map(dict, messages_of(path))
    assert version[3] == b"brain.Event:2"
    assert (start[2], parse(start[7])) == (301, [(1, 1)])


def test_event_file_is_readable_by_tensorboard(tmp_path):
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name, reason="tensorboard is not installed").EventAccumulator
    writer = EventWriter(tmp_path)
    writer.scalars(300, tensorboard_scalars(IterationStats(**FIGURES)))
    writer.scalars(301, {"lm loss": 2.5})
    writer.close()
    read = accumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in read.Scalars("lm loss")] == [
        (300, pytest.approx(10.86954)),
        (301, 2.5),
    ]
    assert [each.value for each in read.Scalars("batch-size")] == [2.0]
    resumed = EventWriter(tmp_path / "later", 300)
    resumed.scalars(301, {"lm loss": 3.5})
    resumed.close()
    Path(resumed.file.name).rename(tmp_path / "events.out.tfevents.9999999999.host.1")
    losses = accumulator(str(tmp_path)).Reload().Scalars("lm loss")
    assert [(each.step, each.value) for each in losses] == [(300, pytest.approx(10.86954)), (301, 3.5)]


def test_event_bytes_equal_a_stored_one():
    assert event(1.0, 5, {"a": 0.5}).hex() == "09000000000000f03f10052a0a0a080a0161150000003f"


@pytest.mark.parametrize(
    ("tied", "matrices"), [(True, 4 * (12 * 64 * 64) + 128 * 64), (False, 4 * (12 * 64 * 64) + 128 * 64)]
)
def test_flops_of_a_step_equal_a_written_sum(tied, matrices):
    family = Gpt(
        GptShape(
            num_layers=4,
            hidden_size=64,
            ffn_hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=32,
            vocab_size=100,
            padded_vocab_size=128,
            tied_embeddings=tied,
        )
    )
    assert matrix_parameters(family) == matrices
    flops = step_flops(family, width=64, samples=2, tokens=32)
    assert flops == 2 * 32 * (6 * matrices + 12 * 4 * 32 * 64)


def test_graphs_line_groups_items_by_reason():
    line = graphs_line(("embedding", "a", "b", "head"), {"embedding": "first", "head": "first", "b": "second"})
    assert line == " CUDA graphs: 1 of 4 items of worker 0 are captured | embedding, head: first; b: second"
    assert graphs_line(("a", "b"), {}) == " CUDA graphs: 2 of 2 items of worker 0 are captured"
