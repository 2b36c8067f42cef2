"""Files that a person names: regular files, standard input and the descriptors of a shell's process substitution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.cli.generate import read_prompts
from dynmo_train.config.resolve import read_config_file
from dynmo_train.config.sections.evaluation import GenerateConfig
from dynmo_train.formats.input_text import read_input
from dynmo_train.launch.schedulers.hostfile import read_hostfile


@pytest.fixture
def piped():
    """Makes the name of a descriptor from which a payload can be read."""
    ends = []

    def make(payload: bytes) -> str:
        end, writer = os.pipe()
        ends.append(end)
        os.write(writer, payload)
        os.close(writer)
        return f"/dev/fd/{end}"

    yield make
    for end in ends:
        os.close(end)


def test_input_from_a_descriptor_is_read(piped):
    assert read_config_file(Path(piped(b"lr = 0.5\n"))) == {"lr": 0.5}
    assert [host.name for host in read_hostfile(Path(piped(b"alpha slots=2\n")))] == ["alpha"]
    assert read_prompts(None, GenerateConfig(prompts=piped(b"one\ntwo\n"))) == ["one", "two"]


@pytest.mark.parametrize(("payload", "kind"), [(b"x" * 11, "size"), (b"\xff", "encoding")])
def test_input_from_a_descriptor_that_breaks_a_rule_is_refused(piped, payload, kind):
    with pytest.raises(DocumentError) as error:
        read_input(Path(piped(payload)), 10)
    assert [problem.kind for problem in error.value.problems] == [kind]


@pytest.mark.parametrize("name", ["/dev/fd/999", "/dev/fd/999999999"])
def test_input_from_a_closed_descriptor_is_refused(name):
    with pytest.raises(UsageError, match="bad file descriptor"):
        read_input(Path(name))


def test_input_from_a_fifo_of_another_name_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a FIFO; must be a regular file"):
        read_input(tmp_path / "pipe")


@pytest.mark.parametrize("words", ["<(echo {script})", "/dev/stdin < <(echo {script})"])
def test_explain_flags_of_a_process_substitution_reads_it(words):
    line = f"{sys.executable} -m dynmo_train explain-flags {words.format(script='pretrain_gpt.py --num-layers 2')}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "--num-layers 2" in done.stdout
