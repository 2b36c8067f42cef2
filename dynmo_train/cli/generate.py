"""``dynmo-train generate``: generate text with the model of a checkpoint."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import Format, emit, emit_json, print_message
from .._common.document import MAX_DOCUMENT_BYTES
from .._common.errors import UsageError
from ..config.command import with_specs
from ..config.fields import specs_of, values_of
from ..config.panels import GENERATION
from ..config.rules.task_effect import task_warnings
from ..config.sections.evaluation import GenerateConfig, InferenceConfig
from ..config.task_command import model_flags
from ..formats.input_text import read_input
from ..formats.os_errors import reason
from .common import is_rank0, need_torch, world_size

if TYPE_CHECKING:
    from ..evaluation.chat_prompts import ChatPrompts, Conversation
    from ..evaluation.text_generator import Completion, GenerationSettings, TextGenerator

MAX_NEW_TOKENS = 64
STDIN = ("-", "/dev/stdin")


@with_specs(specs_of(InferenceConfig, GenerateConfig))
def generate_text(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Prompt to continue; repeatable.", rich_help_panel=GENERATION)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Text or special token that ends a continuation.", rich_help_panel=GENERATION),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text while it is generated.", rich_help_panel=GENERATION)
    ] = False,
    report: Annotated[
        Format, typer.Option("--format", help="Output format.", rich_help_panel=GENERATION)
    ] = Format.TEXT,
    **flags: Any,
) -> None:
    """Generate text from prompts, or unconditionally with --num-samples."""
    need_torch()
    config, options = values_of(InferenceConfig, flags), values_of(GenerateConfig, flags)
    _check_chat(options, prompt)
    conversations: list[Conversation] | None = None
    if options.messages is not None:
        conversations = conversations_of_file(options.messages)
        texts: list[str] | None = []
    elif options.interactive:
        if prompt or options.prompts or options.sample_input_file or options.num_samples:
            raise UsageError("--interactive: cannot be combined with --prompt, --prompts or --num-samples; remove them")
        if world_size() > 1:
            raise UsageError("--interactive: must run in one process; start it without the launcher")
        texts = None
    else:
        texts = read_prompts(prompt, options)
        if options.chat:
            from ..evaluation.chat_prompts import of_user

            conversations = [of_user(text, options.system) for text in texts]
    settings = generation_settings(options, unconditional=bool(texts) and set(texts or ()) == {""}, stops=stop)
    if stream:
        _check_stream(options, report, settings)
    for line in task_warnings(config, options) if is_rank0() else ():
        print_message(f"warning: {line}")
    from ..evaluation.model_checkpoint import evaluation_world
    from ..evaluation.text_generator import TextGenerator

    with evaluation_world(config, options, world_size()) as world:
        generator = TextGenerator(
            config,
            settings,
            world,
            model_flags(ctx),
            _write_piece if stream else None,
            _chat_opener(config, options) if options.is_chat else None,
        )
        if texts is None:
            _run_interactive(generator.generate)
            return
        if conversations is not None:
            texts = generator.texts(conversations)
        if stream:
            _stream(generator, texts, shows_prompts=not options.is_chat)
            return
        completions = generator.generate(texts)
    if is_rank0():
        file = options.genfile or options.sample_output_file
        _report(completions, file, report, shows_prompts=not options.is_chat)


def _check_chat(options: GenerateConfig, prompts: Sequence[str] | None) -> None:
    """Refuse options of conversations that exclude others, or have no effect.

    Raises:
        UsageError: they are given together.
    """
    for flag, value in (("--system", options.system), ("--chat-template", options.chat_template)):
        if value is not None and not options.is_chat:
            raise UsageError(f"{flag}: has no effect without --chat or --messages; add one of them, or remove it")
    if options.interactive and options.is_chat:
        raise UsageError("--interactive: continues texts, not conversations; remove --chat or --messages")
    if options.messages is not None and (prompts or options.prompts or options.sample_input_file or options.system):
        raise UsageError(
            "--messages: cannot be combined with --prompt, --prompts or --system; write them as messages of the file"
        )
    if options.chat and options.num_samples and not (prompts or options.prompts or options.sample_input_file):
        raise UsageError("--chat: an unconditional sample has no message; give --prompt TEXT")


def conversations_of_file(file: str) -> list[Conversation]:
    """The conversations of ``--messages``, a file or ``-``.

    Raises:
        UsageError: it cannot be read, or is not of conversations.
    """
    from ..evaluation.chat_prompts import conversations_of

    is_stdin = file in STDIN
    text = _read_stdin() if is_stdin else read_input(Path(file))
    return conversations_of(text, "standard input" if is_stdin else file)


def _chat_opener(config: InferenceConfig, options: GenerateConfig) -> Callable[[Path], ChatPrompts]:
    from ..evaluation.chat_prompts import open_chat_prompts

    return lambda directory: open_chat_prompts(config, directory, options.chat_template)


def _check_stream(options: GenerateConfig, report: Format, settings: GenerationSettings) -> None:
    """Refuse what has no order of text, or no text.

    Raises:
        UsageError: ``--stream`` is given with such an option.
    """
    excluded = {
        "--format json": report is Format.JSON,
        "--genfile": bool(options.genfile or options.sample_output_file),
        "--interactive": options.interactive,
        "--num-samples": settings.num_samples > 1,
        "--exit-threshold or --exit-key-values": settings.exits is not None,
        "several processes": world_size() > 1,
    }
    for flag in [flag for flag, is_given in excluded.items() if is_given]:
        raise UsageError(f"--stream: cannot be combined with {flag}; remove one")


def _write_piece(text: str) -> None:
    """Write a piece of text at once: ``emit`` ends a line."""
    emit(text, end="")


def _stream(generator: TextGenerator, texts: Sequence[str], *, shows_prompts: bool) -> None:
    """Generate prompt by prompt, and print each with its continuation while it grows."""
    for number, text in enumerate(texts):
        _write_piece(("---\n" if number else "") + (text if shows_prompts else ""))
        (done,) = generator.generate([text], first=number)
        if generator.stream is not None:
            generator.stream.finish(done.completion)
        _write_piece("\n")


def generation_settings(
    options: GenerateConfig, *, unconditional: bool, stops: Sequence[str] | None = None
) -> GenerationSettings:
    """Sampling and length settings from the options; ``stops`` are those of ``--stop``.

    Raises:
        UsageError: several samples with greedy decoding, or early exits with sampling or recomputation.
    """
    from ..evaluation.exit_generation import ExitDecoding
    from ..evaluation.sampling import Sampling
    from ..evaluation.text_generator import GenerationSettings

    samples = 1 if unconditional or not options.num_samples else options.num_samples
    # As in Megatron's scripts, --top-p 0 disables nucleus sampling.
    sampling = Sampling(temperature=options.sampling_temperature, top_k=options.top_k, top_p=options.top_p or 1.0)
    sampling.check()
    if (options.num_samples or 1) > 1 and sampling.temperature == 0.0:
        raise UsageError(
            f"--num-samples {options.num_samples}: must be 1 with greedy decoding; use --temperature above 0"
        )
    exit_flag = "--exit-threshold" if options.exit_threshold is not None else "--exit-key-values"
    if options.uses_exits and sampling.temperature > 0.0:
        raise UsageError(
            f"{exit_flag}: requires greedy decoding; add --greedy, or remove --temperature, --top-k, --top-p"
        )
    if options.uses_exits and options.recompute:
        raise UsageError(f"{exit_flag}: cannot be combined with --recompute; remove one")
    return GenerationSettings(
        exits=ExitDecoding(
            threshold=options.exit_threshold,
            decay=options.exit_decay,
            key_values=options.exit_key_values,
            max_drafts=options.draft_tokens,
        )
        if options.uses_exits
        else None,
        max_new_tokens=options.max_new_tokens or options.out_seq_length or MAX_NEW_TOKENS,
        out_seq_length=options.out_seq_length,
        sampling=sampling,
        seed=options.seed,
        stops=tuple(text for text in (*(stops or ()), options.stop_token) if text),
        num_samples=samples,
        batch_size=options.batch_size,
        recompute=options.recompute,
    )


def _report(completions: Sequence[Completion], file: str | None, report: Format, *, shows_prompts: bool) -> None:
    """Write completions to a file or standard output, and report samples with an error.

    Args:
        completions: the samples.
        file: ``--genfile``; None prints.
        report: output format.
        shows_prompts: whether the text has the prompts, too; those of conversations are full of a template's markup.
    """
    failed = [completion for completion in completions if completion.error is not None]
    if failed:
        print_message(f"{len(failed)} of {len(completions)} samples failed; first error: {failed[0].error}")
    counts = [completion.exits for completion in completions if completion.exits is not None]
    if counts:
        from ..evaluation.exit_generation import describe_exits

        print_message(describe_exits(counts))
    if file is not None:
        lines = [json.dumps(completion.sample(), ensure_ascii=False) + "\n" for completion in completions]
        try:
            Path(file).write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--genfile {file}: cannot be written: {reason(error)}") from error
        print_message(f"Wrote {len(completions)} sample{'' if len(completions) == 1 else 's'} to {file}")
    elif report is Format.JSON:
        emit_json([completion.to_document() for completion in completions])
    else:
        for number, completion in enumerate(completions):
            fault = f"\nerror: {completion.error}" if completion.error is not None else ""
            prompt = completion.prompt if shows_prompts else ""
            emit(("---\n" if number else "") + prompt + completion.completion + fault)


def _run_interactive(write: Any) -> None:
    """Generate from each line of standard input until it ends."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print_message("prompt (Ctrl-D to exit):")
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            emit("\n---\n".join(each.prompt + each.completion for each in write([line.rstrip("\n")])))
        except UsageError as error:
            print_message(str(error))


def _read_stdin() -> str:
    """Read standard input, up to the size limit of documents."""
    try:
        text = sys.stdin.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"standard input: {reason(error)}") from error
    if len(text) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"standard input: must have at most {MAX_DOCUMENT_BYTES:,} characters of prompts")
    return text


def read_prompts(given: list[str] | None, options: GenerateConfig) -> list[str]:
    """The prompts from the command line, a file or standard input, one per line without blank lines.

    Without prompts, ``--num-samples`` empty prompts.

    Raises:
        UsageError: there are two sources, none, an unreadable one, or one of blank lines.
    """
    named = options.prompts or options.sample_input_file
    if given and named:
        raise UsageError("--prompt: cannot be combined with --prompts; remove one")
    if given:
        return given
    if named is None and options.num_samples:
        return [""] * options.num_samples
    file = None if named in (None, *STDIN) else Path(str(named))
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt TEXT, --prompts FILE, or one prompt per line on standard input")
    try:
        text = _read_stdin() if file is None else read_input(file)
    except UsageError as error:
        raise UsageError(f"cannot read the prompts: {error}") from error
    # Not ``splitlines``: form feeds and Unicode's separators are characters of a prompt.
    lines = re.split(r"\r\n|\n|\r", text)
    if not lines[-1]:
        del lines[-1]
    if not any(line.strip() for line in lines):
        raise UsageError("no prompt: the input has only blank lines")
    blank = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if blank:
        shown = ", ".join(map(str, blank[:5])) + (", ..." if len(blank) > 5 else "")
        print_message(f"{len(blank)} blank {'prompt' if len(blank) == 1 else 'prompts'} skipped: line {shown}")
    return [line for line in lines if line.strip()]
