"""The head of a page: what ran, when, on what, and the main figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .page import Tile
from .run_data import TRAINING_LOSSES, RunData
from .series import Track
from .units import NONE, count_text, digits, plural, share_text, size_text, time_text

RECENT = 10
"""Figures of the beginning and the end are the mean of a tenth of the steps, but at most of this number."""
COMMIT_DIGITS = 12
"""Digits of a commit, as ``git log --abbrev=12`` shows them."""
FAMILIES = {"gpt": "GPT", "llama": "Llama", "mixtral": "Mixtral", "bert": "BERT", "ict": "ICT", "t5": "T5"}


def model_text(run: RunData) -> str:
    """The model in a line: ``GPT · 8 layers · hidden size 256 · sequence length 128 · 6.81 M parameters``."""
    model = run.header.get("model")
    parts = []
    if model:
        items = run.header["items"]
        sizes = [model[name] for name in ("family", "num_layers", "hidden_size", "sequence_length")]
        parameters = sum(item["param_count"] for item in items if item["tied_to"] is None)
        parts = [f"{count_text(parameters)} parameters"]
    else:
        sizes = [_config(run, "model", name) for name in ("family", "num_layers", "hidden_size", "seq_length")]
    family, *numbers = sizes
    if family is None or not all(isinstance(number, int) for number in numbers):
        return "The model is unknown: there is neither a profile nor a run.json"
    layers, width, length = numbers
    name = FAMILIES.get(str(family), str(family))
    parts = [name, plural(layers, "layer"), f"hidden size {width:,}", f"sequence length {length:,}", *parts]
    return " · ".join(parts)


def _config(run: RunData, concern: str, name: str) -> Any:
    values = run.run.get("config")
    group = values.get(concern) if isinstance(values, Mapping) else None
    return group.get(name) if isinstance(group, Mapping) else None


def _utc(text: Any) -> str:
    return f"{text}".replace("T", " ").removesuffix("Z") + " UTC" if text else NONE


def commit_text(run: RunData) -> str:
    """Version and commit of the program that trained."""
    versions = run.run.get("versions")
    if not isinstance(versions, Mapping):
        return NONE
    commit, dash, state = str(versions.get("commit", "")).partition("-")
    shown = [str(versions.get("dynmo", "")), f"{commit[:COMMIT_DIGITS]}{dash}{state}"]
    return " · ".join(filter(None, shown)) or NONE


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
        ("Started", _utc(run.starts[0] if run.starts else run.run.get("created_utc"))),
        ("Version and commit", commit_text(run)),
        ("Run id", str(header.get("run_id") or run.run.get("run_id") or NONE)),
    ]
    if header:
        devices = sorted({str(worker["device"]) for worker in header["workers"]})
        stated = header.get("x_context_parallel_size")
        context = stated if isinstance(stated, int) and stated > 0 else 1
        axes = {
            "tensor-parallel": header["tensor_parallel_size"],
            "context-parallel": context,
            # Counts the context-parallel ranks, too.
            "data-parallel": header["data_parallel_size"] // context,
            "expert-parallel": header["expert_parallel_size"],
        }
        sizes = [f"{size} {name}" for name, size in axes.items() if size > 1]
        pipeline = f"{plural(len(header['workers']), 'worker')} on {' and '.join(devices)}, {header['schedule']}"
        released = len(run.workers) - len(header["workers"])
        sizes += [f"{plural(released, 'worker')} released"] if released else []
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
        note = (
            f"was {time_text(first)} ({share_text(last / first - 1, signed=True)})"
            if first and len(run.step_ns) > 1
            else ""
        )
        result.append(Tile(label="Step time", value=time_text(last), note=note))
        tokens = run.tokens.mean(max(0, len(run.tokens) - RECENT), len(run.tokens))
        if tokens and last:
            result.append(Tile(label="Tokens per second", value=count_text(tokens / last * 1e9), note="at the end"))
    result += _loss_tile(run)
    last = ends(run.bubble)[1]
    if last is not None:
        result.append(
            Tile(label="Bubble", value=share_text(last), note=f"highest: {share_text(max(run.bubble.values))}")
        )
    result.append(_migrations(run))
    if run.memory.first is not None:
        peak = max(value for vector in run.memory.means() for value in vector if value is not None)
        result.append(Tile(label="Peak memory", value=size_text(peak), note="of the worker with the most"))
    return result


def _loss_tile(run: RunData) -> list[Tile]:
    track = next((run.losses[name] for name in TRAINING_LOSSES if name in run.losses), None)
    if track is None or not (len(track) or len(run.not_finite)):
        return []
    invalid = plural(len(run.not_finite), "step") if len(run.not_finite) else ""
    last = ends(track)[1]
    if last is None or (len(run.not_finite) and run.not_finite.steps[-1] > track.steps[-1]):
        return [Tile(label="Loss", value="not finite", note=f"in {invalid}")]
    note = f"was {digits(track.values[0])} at the first step" if len(track) > 1 else ""
    return [Tile(label="Loss", value=digits(last), note=f"not finite in {invalid}" if invalid else note)]


def _migrations(run: RunData) -> Tile:
    applied = [result for result in run.results.values() if result["result"] == "applied"]
    if not applied:
        return Tile(label="Migrations", value="0", note="no layer moved")
    moved = sum(result.get("bytes") or 0 for result in applied)
    paused = sum(result.get("pause_ns") or 0 for result in applied)
    note = f"{size_text(moved)} moved, paused for {time_text(paused)}"
    return Tile(label="Migrations", value=f"{len(applied):,}", note=note)
