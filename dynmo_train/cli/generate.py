"""``dynmo-train generate``: text from the model of a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import Format, emit, emit_json, say
from .._common.document import MAX_DOCUMENT_BYTES
from .._common.errors import UsageError
from ..config.command import with_specs
from ..config.evaluation import GenerateConfig, InferenceConfig
from ..config.fields import specs_of, values_of
from ..config.rules.task_effect import generate_warnings
from ..config.task_command import model_flags
from ..formats.input_text import read_input
from ..formats.os_errors import reason
from .common import is_rank0, need_torch, world_size

if TYPE_CHECKING:
    from ..evaluation.text_generator import Completion, GenerationSettings

MAX_NEW_TOKENS = 64
STDIN = ("-", "/dev/stdin")


@with_specs(specs_of(InferenceConfig, GenerateConfig))
def generate_text(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue; may be given several times.")
    ] = None,
    report: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
    **flags: Any,
) -> None:
    """Continue prompts with the model of a checkpoint, or write texts from nothing."""
    need_torch()
    place, asked = values_of(InferenceConfig, flags), values_of(GenerateConfig, flags)
    if asked.interactive:
        if prompt or asked.prompts or asked.sample_input_file or asked.num_samples:
            raise UsageError(
                "--interactive asks for the prompts itself; leave --prompt, --prompts and --num-samples out"
            )
        if world_size() > 1:
            raise UsageError("--interactive talks to one process; start it without the launcher")
        texts = None
    else:
        texts = _prompts(prompt, asked)
    wanted = _wanted(asked, from_nothing=texts is not None and texts == [""] * len(texts))
    for line in generate_warnings(asked, wanted.sampling.temperature) if is_rank0() else ():
        say(f"warning: {line}")
    from ..evaluation.model_checkpoint import evaluation_world
    from ..evaluation.text_generator import TextGenerator

    with evaluation_world(place, asked, world_size()) as world:
        generator = TextGenerator(place, wanted, world, model_flags(ctx))
        if texts is None:
            _talk(generator.generate)
            return
        completions = generator.generate(texts)
    if is_rank0():
        _report(completions, asked.genfile or asked.sample_output_file, report)


def _wanted(asked: GenerateConfig, *, from_nothing: bool) -> GenerationSettings:
    """How to write, from the options.

    Raises:
        UsageError: several samples that would all be the same.
    """
    from ..evaluation.sampling import Sampling
    from ..evaluation.text_generator import GenerationSettings

    # Of Megatron's scripts: a top-p of 0 is off; with a top-k of 0 it is greedy, whatever the temperature.
    top_p = asked.top_p or None
    cuts = asked.top_k > 0 or top_p is not None
    temperature = asked.temperature if asked.temperature is not None else float(cuts)
    greedy = asked.greedy or (asked.top_p == 0 and not asked.top_k)
    samples = 1 if from_nothing or not asked.num_samples else asked.num_samples
    sampling = Sampling(
        temperature=0.0 if greedy else temperature,
        top_k=asked.top_k,
        top_p=1.0 if top_p is None else top_p,
    )
    sampling.check()
    if (asked.num_samples or 1) > 1 and sampling.temperature == 0.0:
        raise UsageError("--num-samples above 1 gives the same text again without --temperature above 0")
    most = asked.max_new_tokens or (asked.out_seq_length or MAX_NEW_TOKENS)
    return GenerationSettings(
        max_new_tokens=most,
        out_seq_length=asked.out_seq_length,
        sampling=sampling,
        seed=asked.seed,
        stop=asked.stop_token,
        num_samples=samples,
        batch_size=asked.batch_size,
        recompute=asked.recompute,
    )


def _report(completions: Sequence[Completion], file: str | None, report: Format) -> None:
    """The completions to a file, or to standard output; prompts that were not continued are reported as well."""
    failed = [completion for completion in completions if completion.error is not None]
    if failed:
        say(f"{len(failed)} of {len(completions)} samples have an error; the first: {failed[0].error}")
    if file is not None:
        lines = [json.dumps(completion.sample(), ensure_ascii=False) + "\n" for completion in completions]
        try:
            Path(file).write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--genfile {file}: cannot be written: {reason(error)}") from error
        say(f"{len(completions)} samples in {file}")
    elif report is Format.JSON:
        emit_json([completion.to_document() for completion in completions])
    else:
        for number, completion in enumerate(completions):
            fault = f"\nerror: {completion.error}" if completion.error is not None else ""
            emit(("---\n" if number else "") + completion.prompt + completion.completion + fault)


def _talk(write: Any) -> None:
    """Answer one line after another until the input ends; any text may be a prompt."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            say("prompt (Ctrl-D ends):")
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            emit("\n---\n".join(each.prompt + each.completion for each in write([line.rstrip("\n")])))
        except UsageError as error:
            say(str(error))


def _read_stdin() -> str:
    """All of standard input, bounded as a file is."""
    try:
        text = sys.stdin.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"standard input: {reason(error)}") from error
    if len(text) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"standard input: more than {MAX_DOCUMENT_BYTES:,} characters of prompts, the limit")
    return text


def _prompts(given: list[str] | None, asked: GenerateConfig) -> list[str]:
    """The prompts of the command line, else of a file, else of standard input; one a line. Blank lines are left out.

    Without any, as many empty ones as ``--num-samples`` says.
    """
    named = asked.prompts or asked.sample_input_file
    if given and named:
        raise UsageError("give --prompt or --prompts, not both")
    if given:
        return given
    if named is None and asked.num_samples:
        return [""] * asked.num_samples
    file = None if named in (None, *STDIN) else Path(str(named))
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt TEXT or --prompts FILE, or write one a line to standard input")
    try:
        lines = (_read_stdin() if file is None else read_input(file)).splitlines()
    except UsageError as error:
        raise UsageError(f"cannot read the prompts: {error}") from error
    if not any(line.strip() for line in lines):
        raise UsageError("no prompt: the input holds no line with text")
    blank = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if blank:
        shown = ", ".join(map(str, blank[:5])) + (", ..." if len(blank) > 5 else "")
        say(f"{len(blank)} blank {'prompt' if len(blank) == 1 else 'prompts'} left out: line {shown}")
    return [line for line in lines if line.strip()]
