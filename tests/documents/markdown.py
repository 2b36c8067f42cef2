"""What documents show: blocks of command lines, and commands within sentences and tables.

A block of command lines is fenced as ``bash`` and is executed as it is printed. A comment in the line before the fence
excludes it, with a reason of ``REASONS`` or ``run by`` and the path of another test::

    <!-- not run: needs a cluster -->
    ```bash
    sbatch job.sh
    ```
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

PROGRAMS = ("dynmo-prep", "dynmo-train", "dynmo-plan", "dynmo-ckpt")
REASONS = (
    "needs a cluster",
    "needs GPUs",
    "needs a container engine",
    "installs packages",
    "needs data of the reader",
    "runs all tests",
)
# Blocks that another test runs as they are printed: the path of the test.
RUN_BY = re.compile(r"run by (tests/[\w/.]+)")
# Documents whose command lines are those of another version or machine.
RECORDS = ("CHANGELOG.md", "tests/benchmarks/")
FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n$")
INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: line of the fence, from 1.
        language: word behind the fence; empty without one.
        text: contents.
        reason: why it is not run; None for one that is run.
    """

    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[str]:
        """Its command lines: continued lines are joined, comments and here-documents are left out."""
        lines, end = [], None
        for line in self.text.replace("\\\n", " ").splitlines():
            if end is not None:
                end = None if line == end else end
                continue
            if heredoc := re.search(r"<<\s*'?(\w+)'?", line):
                end = heredoc[1]
            words = line.partition(" #")[0].strip()
            if words and not words.startswith("#"):
                lines.append(words)
        return lines


def documents() -> list[str]:
    """Tracked Markdown files, as paths from the root."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file() and not name.startswith(RECORDS)]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = NOT_RUN.search(before)
        language = match[1].partition(" ")[0]
        found.append(Block(before.count("\n") + 1, language, match[2], reason[1] if reason else None))
    return found


def inline_code(text: str) -> list[str]:
    """Code within sentences and tables; a bar is escaped in a table."""
    return [code.replace("\\|", "|") for code in INLINE.findall(FENCE.sub("", text))]


def program_of(line: str) -> list[str] | None:
    """A command line from one of our programs on, split into words; None for another program."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a sentence
        return None
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["torchrun"] or (words and Path(words[0]).name in ("srun", "mpirun")):
        starts = [at for at, word in enumerate(words) if word in PROGRAMS]
        words = words[starts[0] :] if starts else []
    return words if words and words[0] in PROGRAMS else None
