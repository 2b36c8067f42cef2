"""``dynmo-train generate``: text from the model of a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..console import Format, emit, emit_json
from ..errors import UsageError
from .common import DeviceName, need_torch


def generate_text(
    load: Annotated[
        Path,
        typer.Option("--load", help="Run directory, its checkpoints, one checkpoint, or a Hugging Face directory."),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="File with a prompt on each line [default: standard input].")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Tokens to add to a prompt at most.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Divisor of the logits; 0 always takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw among this many likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among the fewest tokens with this probability in all.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")] = 1234,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Continuations of each prompt.")] = 1,
    tokenizer_model: Annotated[
        Path | None, typer.Option("--tokenizer-model", help="Path of a tokenizer.json [default: the checkpoint's].")
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir",
            help="Folder for Hugging Face input in native form [default: $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo].",
        ),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option("--device", help="Where to compute; auto is cuda where present.")
    ] = DeviceName.AUTO,
    report: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
) -> None:
    """Continue prompts with the model of a checkpoint."""
    need_torch()
    texts = _prompts(prompt, prompts)
    import torch

    from ..tasks.generate import Request, generate
    from ..tasks.sampling import Sampling

    request = Request(
        load=load,
        prompts=tuple(texts),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        num_samples=num_samples,
        tokenizer_model=tokenizer_model,
        cache_dir=cache_dir,
    )
    if device is DeviceName.AUTO:
        device = DeviceName.CUDA if torch.cuda.is_available() else DeviceName.CPU
    completions = generate(request, torch.device(device))
    if report is Format.JSON:
        emit_json([completion.to_document() for completion in completions])
        return
    for number, completion in enumerate(completions):
        emit(("---\n" if number else "") + completion.prompt + completion.completion)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, else of a file, else of standard input; one a line, blank lines left out."""
    if given and file:
        raise UsageError("give --prompt or --prompts, not both")
    if given:
        return given
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt TEXT or --prompts FILE, or write one a line to standard input")
    try:
        lines = (file.read_text(encoding="utf-8") if file else sys.stdin.read()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts: {error}") from error
    if not any(line.strip() for line in lines):
        raise UsageError("no prompt: the input holds no line with text")
    return [line for line in lines if line.strip()]
