"""The head of a page: what ran, when, on what, and the main figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .page import Tile
from .run_data import RunData
from .series import Track
from .units import NONE, count_text, digits, plural, share_text, size_text, time_text

RECENT = 10
"""Figures of the beginning and the end are the mean of a tenth of the steps, but at most of this number."""
FAMILIES = {"gpt": "GPT", "llama": "Llama", "mixtral": "Mixtral", "bert": "BERT", "ict": "ICT", "t5": "T5"}


def model_text(run: RunData) -> str:
    """The model in a line: ``GPT, 8 layers, hidden size 256, sequence length 128, 6.81 M parameters``."""
    model = run.header.get("model")
    if not model:
        return "The model is unknown: there is no profile"
    items = run.header["items"]
    parameters = sum(item["param_count"] for item in items if item["tied_to"] is None)
    family = str(model["family"])
    return (
        f"{FAMILIES.get(family, family)} · {plural(model['num_layers'], 'layer')}"
        f" · hidden size {model['hidden_size']:,} · sequence length {model['sequence_length']:,}"
        f" · {count_text(parameters)} parameters"
    )


def _config(run: RunData, concern: str, name: str) -> Any:
    values = run.run.get("config")
    group = values.get(concern) if isinstance(values, Mapping) else None
    return group.get(name) if isinstance(group, Mapping) else None


def _utc(text: str | None) -> str:
    return text.replace("T", " ").removesuffix("Z") + " UTC" if text else NONE


def commit_text(run: RunData) -> str:
    """Version and commit of the program that trained."""
    versions = run.run.get("versions")
    if not isinstance(versions, Mapping):
        return NONE
    return " · ".join(str(versions[name]) for name in ("dynmo", "commit") if name in versions) or NONE


def progress_text(run: RunData) -> str:
    """How far the run is: ``24 of 30 steps``."""
    done = run.step_ns.steps[-1] if len(run.step_ns) else 0
    total = _config(run, "training", "train_iters")
    if not isinstance(total, int) or done >= total:
        return plural(done, "step")
    return f"{done:,} of {plural(total, 'step')}; not finished when this page was written"


def facts(run: RunData) -> list[tuple[str, str]]:
    """Names and values of the head of a page."""
    header = run.header
    seconds = sum(run.step_ns.values)
    pauses = sum(result.get("pause_ns") or 0 for result in run.results.values())
    rows = [
        ("Progress", progress_text(run)),
        ("Run time", f"{time_text(seconds + pauses)} in steps and migrations" if seconds else NONE),
        ("Started", _utc(run.starts[0] if run.starts else None)),
        ("Version and commit", commit_text(run)),
        ("Run id", str(header.get("run_id") or run.run.get("run_id") or NONE)),
    ]
    if header:
        devices = sorted({str(worker["device"]) for worker in header["workers"]})
        sizes = [
            f"{header[key]} {name}"
            for key, name in (
                ("tensor_parallel_size", "tensor-parallel"),
                ("data_parallel_size", "data-parallel"),
                ("expert_parallel_size", "expert-parallel"),
            )
            if header[key] > 1
        ]
        pipeline = f"{plural(len(header['workers']), 'worker')} on {' and '.join(devices)}, {header['schedule']}"
        rows.append(("Pipeline", ", ".join([pipeline, *sizes])))
        count, samples = header["microbatches"], plural(header["micro_batch_size"], "sample")
        rows.append(("Step", f"{count:,} microbatch{'' if count == 1 else 'es'} of {samples}"))
    return rows


def ends(track: Track) -> tuple[float | None, float | None]:
    """The mean of the first and of the last tenth of the steps; at most ``RECENT`` steps each."""
    count = max(1, min(RECENT, len(track) // 10))
    # The first step of a run is a warm-up.
    begin = 1 if len(track) > 2 * count else 0
    return track.mean(begin, begin + count), track.mean(max(0, len(track) - count), len(track))


def tiles(run: RunData) -> Sequence[Tile]:
    """The main figures of a run."""
    result = []
    first, last = ends(run.step_ns)
    if last is not None:
        note = f"was {time_text(first)}: {share_text(last / first - 1, signed=True)}" if first else ""
        result.append(Tile(label="Step time", value=time_text(last), note=note))
        tokens = run.tokens.mean(max(0, len(run.tokens) - RECENT), len(run.tokens))
        if tokens and last:
            result.append(Tile(label="Tokens per second", value=count_text(tokens / last * 1e9), note="at the end"))
    loss = next((track for name, track in run.losses.items() if "validation" not in name), None)
    if loss is not None and len(loss):
        begin, end = loss.values[0], ends(loss)[1]
        result.append(Tile(label="Loss", value=digits(end or 0.0), note=f"was {digits(begin)} at the first step"))
    last = ends(run.bubble)[1]
    if last is not None:
        result.append(
            Tile(label="Bubble", value=share_text(last), note=f"at most {share_text(max(run.bubble.values))}")
        )
    result.append(_migrations(run))
    if run.memory.first is not None:
        peak = max(value for vector in run.memory.means() for value in vector if value is not None)
        result.append(Tile(label="Peak memory", value=size_text(peak), note="of the worker with the most"))
    return result


def _migrations(run: RunData) -> Tile:
    applied = [result for result in run.results.values() if result["result"] == "applied"]
    if not applied:
        return Tile(label="Migrations", value="0", note="no layer moved")
    moved = sum(result.get("bytes") or 0 for result in applied)
    paused = sum(result.get("pause_ns") or 0 for result in applied)
    note = f"{size_text(moved)} moved, paused for {time_text(paused)}"
    return Tile(label="Migrations", value=f"{len(applied):,}", note=note)
