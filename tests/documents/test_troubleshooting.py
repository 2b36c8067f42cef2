"""The page of messages: each is printed by a command that goes wrong as the page describes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.whole_runs import write_data
from tests.paths import ROOT
from tests.tables import table

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
PAGE = (ROOT / "dynmo_train" / "cli" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`.+?`(?: or `.+?`)?) \| (.+?) \| (.+?) \|$", re.M)
MESSAGES = [re.findall(r"`([^`]+)`", cells[0]) for cells in ROW.findall(PAGE)]
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8"
    " --train-iters 3 --lr 1e-3 --eval-iters 0"
)
PRETRAIN = f"dynmo-train pretrain gpt {SIZES}"
MOCK = f"{PRETRAIN} --mock-data --vocab-size 97"
# Command -> a part of the message, as the page has it. The commands run in this order in one folder.
PROVOKED = {
    PRETRAIN: "--data-path: is required",
    f"{PRETRAIN} --data-path absent --vocab-size 97": "no such file [missing]",
    f"{PRETRAIN} --data-path cut --vocab-size 97": "lengths: add up to",
    f"{PRETRAIN} --data-path corpus_text_document --vocab-size 100": "is too small",
    f"{MOCK} --tokenizer-model absent.json": "no tokenizer file at",
    f"dynmo-train pretrain bert {SIZES} --data-path corpus_text_document --tokenizer-model bpe.json": (
        "has no token for cls"
    ),
    f"{PRETRAIN} --data-path plain --vocab-size 97 --global-batch-size 10000": "split of ",
    f"{MOCK} --pipeline-model-parallel-size 2": "it must divide the world size",
    f"{MOCK} --pipeline-model-parallel-size 16 ": "layers of the model",
    f"{MOCK} --global-batch-size 7": "data-parallel replicas",
    f"dynmo-train launch local --nproc 2 -- {MOCK.removeprefix('dynmo-train ')} --tensor-model-parallel-size 2"
    " --num-attention-heads 1": "must be a multiple of --tensor-model-parallel-size",
    f"{MOCK} --no-such-flag": "No such option:",
    f"{MOCK} --run-dir run": None,
    f"{MOCK} --run-dir run ": "already contains a run",
    f"{MOCK} --run-dir run --load run --hidden-size 32": "is a checkpoint of another model",
    f"{MOCK} --run-dir run --load run --seed 7": "is of a run with other options",
    f"{MOCK} --load absent": "does not exist; give the path of a checkpoint",
    f"{MOCK} --run-dir /proc/absent": "cannot write the run directory",
    f"{MOCK} --device cuda": "has no CUDA support here",
    f"{MOCK} --seq-length 200000 --max-position-embeddings 200000": "ran out of memory",
    f"{PRETRAIN} --data-path plain --vocab-size 90": "contains the token id",
    f"{MOCK} --train-iters 20 --lr 1e30 --clip-grad 0": "steps in a row were not finite",
    f"{MOCK} --balance online --run-dir alone": None,
    "cat alone/events.jsonl": "--balance online has no effect",
    "dynmo-plan partition run --stages 9": "stages of at least 1 units need",
    "dynmo-plan partition run --stages 2 --memory 1MB": "with its activations in flight",
    "dynmo-plan verify bpe.json --profile run": "format: must be 'dynmo.plan'",
    "dynmo-ckpt info absent": "no checkpoint here; known formats are",
    "dynmo-ckpt merge run merged": None,
    "dynmo-ckpt merge run merged ": "exists; choose another directory",
    "dynmo-train generate --load run --prompt hello": "contains no tokenizer",
    "dynmo-prep clean corpus.jsonl -o corpus.jsonl": "is both input and output",
    "dynmo-prep binarize keys.jsonl -o keys --tokenizer bpe.json": "lack --json-key text",
    "dynmo-prep clean broken.jsonl -o clean.jsonl": "lines are invalid documents",
}
# What needs a second machine, a device or a disk that fails: these stand in the source, and have tests of their own.
IN_SOURCE = (
    "finds no CUDA device",
    "is not the run directory of rank 0",
    "cannot be resolved",
    "cannot open the rendezvous store at",
    "which hosts the rendezvous; launch again",
    "joining again",
    "joined; start one launcher per --node-rank",
    "until its next save",
    "waiting nodes cannot join, training continues without them:",
    "the checkpoint of step",
    "(--planner-timeout-s); training continues",
)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = command.split()
    program = Path(sys.executable).parent / words[0]
    words = [str(program), *words[1:]] if program.exists() else words
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Output of each command."""
    folder = tmp_path_factory.mktemp("troubles")
    for command in (
        "dynmo-prep sample-corpus --output corpus.jsonl",
        "dynmo-prep train-tokenizer corpus.jsonl -o bpe.json --vocab-size 300",
        "dynmo-prep binarize corpus.jsonl -o corpus --tokenizer bpe.json",
    ):
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    write_data(folder / "plain")
    (folder / "cut.idx").write_bytes((folder / "plain.idx").read_bytes())
    (folder / "cut.bin").write_bytes(b"\0\0")
    (folder / "keys.jsonl").write_text('{"texts": "a"}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"\n')
    found = {}
    for command, part in PROVOKED.items():
        done = run(command, folder)
        assert part is not None or done.returncode == 0, done.stderr
        found[command] = done.stdout + done.stderr
    return found


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in message.split("...")))


def flat(text: str) -> str:
    """Without the line breaks of a terminal's width."""
    return re.sub(r"\s+", " ", text)


@table("command", [command for command, part in PROVOKED.items() if part])
def test_troubleshooting_message_is_printed(outputs, command):
    part, printed = PROVOKED[command], flat(outputs[command])
    listed = [message for row in MESSAGES for message in row if part in message]
    assert listed, f"the page has no message with {part!r}"
    assert any(pattern(message).search(printed) for message in listed), printed[-800:]


def test_troubleshooting_lists_no_other_messages():
    parts = [*(part for part in PROVOKED.values() if part), *IN_SOURCE]
    unknown = [message for row in MESSAGES for message in row if not any(part in message for part in parts)]
    assert unknown == []
    assert len(MESSAGES) >= 30


@table("part", IN_SOURCE)
def test_troubleshooting_message_is_in_the_source(part):
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "dynmo_train").rglob("*.py")]
    assert any(part in flat(text).replace('" f"', "").replace('" "', "") for text in sources)
