"""The result document of a benchmark run: machine and commit, JSON, and tables in Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
MARKS = ("<!-- figures: begin -->\n", "<!-- figures: end -->")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions of what decides the figures."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu
        )
    versions = {}
    for name in (
        "torch",
        "numpy",
        "transformers",
        "tokenizers",
        "datasketch",
        "deepspeed",
        "datatrove",
        "megatron-core",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def commit() -> str:
    """Hash of the checked-out commit; ``+`` at its end where tracked files differ; "unknown" outside of a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("rev-parse", "--short=10", "HEAD")
    return f"{found}{'+' if git('status', '--porcelain', '--untracked-files=no') else ''}" if found else "unknown"


def document(cases: list[dict[str, Any]], *, command: str, repeats: int) -> dict[str, Any]:
    """The result document of these cases.

    Args:
        cases: Entries of ``run_case``.
        command: Command line of the run.
        repeats: Repetitions of each program.
    """
    return {
        "format": "dynmo.benchmarks",
        "version": 1,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": command,
        "repeats": repeats,
        "machine": machine(),
        "cases": cases,
    }


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` with the cases of ``old`` that it lacks; each case keeps the commit, date and machine that it is from."""
    fresh = {case["name"] for case in new["cases"]}
    earlier = [
        {**{key: old[key] for key in ("date", "commit", "machine")}, **case}
        for case in old["cases"]
        if case["name"] not in fresh
    ]
    return {**new, "cases": sorted([*new["cases"], *earlier], key=lambda case: (case["area"], case["name"]))}


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Two digits behind the point, or none above 100."""
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def markdown(result: dict[str, Any]) -> str:
    """The document as a page: what it was measured on, and a table for each area."""
    host = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
    measured = (
        f"Made by `{result['command']}` at commit {result['commit']} on {result['date']}: {host['cpu']},"
        f" {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB, {host['gpu'] or 'no GPU'};"
        f" Python {host['python']}, {packages}."
    )
    method = (
        f"Each program ran {result['repeats']} times after a warm-up, in turns with its peers."
        " Spread is (max - min) / median. A ratio above 1 means that ours is better."
    )
    lines = ["# Benchmarks", "", measured, method]
    # Cases that a run with --merge kept, or that were added to the document of another run.
    others = [
        f"`{case['name']}` at commit {case['commit']} on {case['date']}" for case in result["cases"] if "commit" in case
    ]
    lines += [f"From other runs: {', '.join(others)}."] if others else []
    for area in dict.fromkeys(case["area"] for case in result["cases"]):
        lines += [
            "",
            f"**{area}**",
            "",
            "| what | program | median | spread | repetitions | ratio |",
            "|---|---|---|---|---|---|",
        ]
        for case in result["cases"]:
            if case["area"] == area:
                lines += _rows(case)
    return "\n".join(lines) + "\n"


def _rows(case: dict[str, Any]) -> list[str]:
    rows = []
    title = f"{case['text']} (`{case['name']}`)"
    for name, found in case["programs"].items():
        values = ", ".join(map(number, found["values"]))
        ratio = ratio_text(found["ratio"]) if "ratio" in found else ""
        cells = [title, name, f"{number(found['median'])} {case['unit']}", f"{found['spread']:.0%}", values, ratio]
        rows.append(f"| {' | '.join(cells)} |")
        title = ""
    rows += [f"| {title} | {name} | | | {reason} | |" for name, reason in case["missing"].items()]
    return rows


def figures(result: dict[str, Any]) -> str:
    """The README's table: every case, its peers and the ratio to each, also where a peer is better."""
    lines = ["| measured | ours | peers | ratio |", "|---|---|---|---|"]
    for case in result["cases"]:
        ours = case["programs"][case["ours"]]
        peers = {name: found for name, found in case["programs"].items() if name != case["ours"]}
        if peers:
            values = " / ".join(f"{name} {number(found['median'])}" for name, found in peers.items())
            ratios = " / ".join(ratio_text(found["ratio"]) for found in peers.values())
            lines.append(f"| {case['text']} | {number(ours['median'])} {case['unit']} | {values} | {ratios} |")
    return "\n".join(lines) + "\n"


def with_figures(text: str, result: dict[str, Any]) -> str:
    """``text`` with the table between its marks replaced by that of ``result``."""
    begin, end = MARKS
    head, rest = text.split(begin)
    return f"{head}{begin}{figures(result)}{end}{rest.split(end, 1)[1]}"


def read(path: Path) -> dict[str, Any]:
    """The result document of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(result: dict[str, Any], folder: Path) -> None:
    """``results.json`` and ``results.md`` in an existing folder."""
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(markdown(result), encoding="utf-8")
