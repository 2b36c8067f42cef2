"""Two workers against one: each step with its own input size, in pairs of runs with equal outputs."""

from __future__ import annotations

import argparse
import bz2
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: megabytes of its input, its arguments after input and output, and its outputs."""

    megabytes: int
    more: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("",)


def cases(options: argparse.Namespace) -> dict[str, Case]:
    """The parallel steps. Steps with more work per document have smaller inputs."""
    gpt2 = ("--vocab-file", options.vocab, "--merge-file", options.merges, "--tokenizer-type", "GPT2BPETokenizer")
    return {
        "binarize": Case(megabytes=1000, more=gpt2, outputs=("_text_document.bin", "_text_document.idx")),
        "merge": Case(megabytes=1000),
        "add-id": Case(megabytes=1000, more=("--id-prefix", "x", "--rewrite", "--id-key", "id")),
        "shuffle": Case(megabytes=1000),
        "split-sentences": Case(megabytes=50),
        "clean": Case(megabytes=50),
        "fix": Case(megabytes=150, more=("--tasks", "ftfy_fix_text", "general_cleaning")),
        "decontaminate": Case(megabytes=100, more=("--task", f"lambada={options.task}")),
        "dedup": Case(megabytes=370),
        "find-duplicates": Case(megabytes=370),
        "remove-duplicates": Case(megabytes=1000, more=("--groups", "groups.jsonl", "--id-key", "id")),
        "extract-wiki": Case(megabytes=30),
        "train-tokenizer": Case(megabytes=400, more=("--vocab-size", "32000")),
    }


def write_documents(target: Path, source: Path, size: int) -> None:
    """Repeat the documents of a file with new ids, up to ``size`` bytes."""
    written = number = 0
    with open(target, "wb", buffering=1 << 20) as out:
        while written < size:
            with open(source, "rb") as lines:
                for line in lines:
                    row = orjson.dumps({"id": str(number), "text": orjson.loads(line)["text"]}) + b"\n"
                    written, number = written + out.write(row), number + 1
                    if written >= size:
                        break


def write_dump(target: Path, source: Path, size: int) -> None:
    """Repeat the pages of a dump, up to about ``size`` bytes."""
    text = bz2.decompress(source.read_bytes())
    begin, end = text.index(b"<page>"), text.rindex(b"</page>") + len(b"</page>\n")
    times = max(size // (end - begin), 1)
    target.write_bytes(text[:begin] + text[begin:end] * times + text[end:])


def input_of(step: str, megabytes: int, options: argparse.Namespace, folder: Path) -> Path:
    """The input of a step, written by the first call."""
    kind = "xml" if step == "extract-wiki" else "jsonl"
    path = folder / f"data-{megabytes}.{kind}"
    if not path.exists():
        write, source = (write_dump, options.dump) if kind == "xml" else (write_documents, options.text)
        write(path.with_suffix(".making"), Path(source), megabytes * 10**6)
        path.with_suffix(".making").rename(path)
    if step == "remove-duplicates" and not (folder / "groups.jsonl").exists():
        groups = (orjson.dumps({str(at): [str(at * 10), str(at * 10 + 3)]}) + b"\n" for at in range(20_000))
        (folder / "groups.jsonl").write_bytes(b"".join(groups))
    return path


def commands(step: str, options: argparse.Namespace, folder: Path) -> Callable[[int], list[str]]:
    """A function from the number of workers to the arguments of a step; it deletes the outputs of the last run."""
    case = cases(options)[step]
    data = input_of(step, case.megabytes, options, folder)

    def arguments(workers: int) -> list[str]:
        for path in folder.glob(f"w{workers}.out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        subprocess.run(["wc", "-l", str(data)], check=True, stdout=subprocess.DEVNULL)  # fills the page cache
        named = ["--input", str(data), "--output-prefix"] if step == "binarize" else [str(data), "-o"]
        return [step, *named, f"w{workers}.out", *case.more, "--workers", str(workers)]

    return arguments


def check(step: str, options: argparse.Namespace, folder: Path) -> None:
    """Exit if the outputs of one and two workers differ."""
    for ending in cases(options)[step].outputs:
        subprocess.run(["cmp", *(str(folder / f"w{count}.out{ending}") for count in (1, 2))], check=True)
