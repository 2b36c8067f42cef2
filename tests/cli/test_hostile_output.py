"""No command of the four programs prints control characters of data to a terminal: files, names, options, messages."""

from __future__ import annotations

import importlib
import io
import json
import re
import signal
import sys

import numpy as np
import pytest

from dynmo_train.launch.elastic.node_agent import _Tail
from tests.cli.test_help import commands
from tests.cli.test_root_options import COMMANDS
from tests.paths import ROOT

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\rover"
# The commands' own output has styles and cursor movements of rich on a terminal, but none of these.
PARTS = ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\x7f", "\rover")
# They print no data, or work for minutes without a file.
WITHOUT_DATA = {("sample-corpus",), ("measure-costs",), ("tune-sparse",), ("doctor",), ("formats",), ("cache", "clear")}
ONCE = {("watch",): ["--once"], ("monitor",): ["--once"]}
DIRECT = re.compile(r"sys\.std(out|err)\.(write|buffer)|(typer|click)\.echo\(|\bprint\(|print_exc|Console\(")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Runs a command on a terminal; returns its exit code and all that it printed."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(signal.SIGTERM)

    def run(program, *words):
        terminal = Terminal()
        package = COMMANDS[program]
        for name, value in (("stdout", terminal), ("stderr", terminal), ("argv", [program, *words])):
            monkeypatch.setattr(sys, name, value)
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{package}._common.console").run_app(
                importlib.import_module(f"{package}.cli").app, program
            )
        return ended.value.code, terminal.getvalue()

    yield run
    signal.signal(signal.SIGTERM, before)


def unescaped(text):
    return [part for part in PARTS if part in text]


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["file", "absent", "folder"])
def test_every_command_escapes_the_names_and_contents_of_its_files(tmp_path, monkeypatch, shown, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        (tmp_path / HOSTILE).write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    elif kind == "folder":
        (tmp_path / HOSTILE).mkdir()
    wrong, num_shown = [], 0
    for program, package in COMMANDS.items():
        for words, command in commands(program, package):
            if words in WITHOUT_DATA:
                continue
            extra = ["--dry-run"] if words[0] == "launch" else ONCE.get(words, [])
            for each in command.params:
                if each.param_type_name == "argument":
                    extra = [*extra, HOSTILE]
                elif each.required:
                    extra = [*extra, each.opts[0], HOSTILE]
            code, text = shown(program, *words, *extra)
            num_shown += "\\x1b[31mred" in text
            if unescaped(text) or not isinstance(code, int):
                wrong.append((program, *words, code, unescaped(text)))
    assert wrong == []
    assert num_shown > 30


def run_directory(folder, name):
    run = folder / name
    (run / "plans").mkdir(parents=True)
    config = {"model": {"family": HOSTILE}, "training": {"train_iters": 4}}
    (run / "run.json").write_text(json.dumps({"segment": 0, "config": config}))
    step = {"lm_loss": 1.0, "step_ns": 10**8, "tokens": 10, "learning_rate": 1e-3, "updated": True}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **step}) + "\n" for n in (1, 2)))
    event = {"time_utc": "2026-01-01T00:00:00Z", "step": 1, "message": HOSTILE}
    incident = {"incident": "hang", "cause": HOSTILE, "hosts": [HOSTILE], "ranks": [1]}
    lines = [{**event, "kind": "checkpoint"}, {**event, "kind": "incident", **incident}]
    losses = {"seconds_lost": 1.0, "steps_lost": 1}
    (run / "events.jsonl").write_text("".join(json.dumps({**line, **losses}) + "\n" for line in lines))


def test_outputs_that_show_data_escape_it(tmp_path, monkeypatch, shown):
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    run_directory(tmp_path, HOSTILE)
    line = HOSTILE.replace("\r", "")
    (tmp_path / "s.sh").write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1 --data-path '{line}'\n")
    (tmp_path / "m").mkdir()
    save_file({HOSTILE: np.zeros((2, 2), np.float32)}, tmp_path / "m/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m/config.json").write_text(json.dumps({"model_type": HOSTILE, "architectures": [HOSTILE]}))
    wrong = {}
    for words in (
        ("dynmo-train", "monitor", HOSTILE, "--once"),
        ("dynmo-train", "compare", HOSTILE, HOSTILE),
        ("dynmo-train", "explain-flags", "s.sh"),
        ("dynmo-train", "run", "--dry-run", "s.sh"),
        ("dynmo-train", "launch", "local", "--dry-run", "--", "pretrain", "gpt", "--data-path", HOSTILE),
        ("dynmo-train", "launch", "slurm", "--dry-run", "--", "pretrain", "gpt", "--data-path", HOSTILE),
        ("dynmo-train", "pretrain", "gpt", "--data-path", HOSTILE, "--recipe", HOSTILE),
        ("dynmo-ckpt", "info", "m"),
        ("dynmo-ckpt", "diff", "m", "m"),
        ("dynmo-plan", "recipe", HOSTILE),
        ("dynmo-prep", "pipeline", HOSTILE),
    ):
        _, text = shown(*words)
        if unescaped(text) or ("\\x1b[31m" not in text and words[1] != "compare"):
            wrong[words[:2]] = text
    assert wrong == {}


def test_generated_text_and_output_of_ranks_keep_lines_and_tabs_only(tmp_path, monkeypatch):
    from dynmo_train.cli.generate import _write_piece

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    _write_piece(f"a\tb\n{HOSTILE[:1]}")
    _write_piece(HOSTILE[1:])
    log = tmp_path / "stdout.log"
    log.write_text(f"first\rsecond\n{HOSTILE}\n", newline="")
    tail = _Tail(lambda: str(log), terminal)
    tail.start()
    tail.finish()
    escaped = "\\x1b[31mred\\x1b]0;title\\x07\\x9b2J\\x7f"
    assert terminal.getvalue() == f"a\tb\n{escaped}\\x0dover" + f"first\nsecond\n{escaped}\nover\n"
    file = io.StringIO()
    tail = _Tail(lambda: str(log), file)
    tail.start()
    tail.finish()
    assert HOSTILE.replace("\r", "\n") in file.getvalue()  # a file and a pipe receive what the rank wrote


def test_only_the_shared_console_writes_to_standard_streams():
    """``emit``, ``print_message`` and the tables escape; what writes to a stream by itself has a reason here."""
    own = ("console.py", "streams.py", "help.py", "completion.py", "monitor.py", "live_view.py", "progress.py")
    paths = [path for package in COMMANDS.values() for path in (ROOT / package).rglob("*.py") if path.name not in own]
    assert [str(path) for path in paths if DIRECT.search(path.read_text())] == []
