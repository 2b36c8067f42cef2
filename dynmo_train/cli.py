"""The command line of ``dynmo-train``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import Facts, check, dry_run_processes, dry_run_values, read_config_file, resolve, with_deepspeed
from .config.command import MegatronCommand, with_options
from .console import Format, emit, emit_json, emit_table, run_app
from .errors import EXIT_USAGE, MissingExtraError, UsageError
from .formats._document import DocumentError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help never cuts the name of an option
    help="Train models whose layers change cost while they train, with the pipeline kept in balance.",
)
pretrain = typer.Typer(no_args_is_help=True, help="Train a model from its first step, or go on with a run.")
app.add_typer(pretrain, name="pretrain")
launch = typer.Typer(no_args_is_help=True, help="Run a command in several processes.")
app.add_typer(launch, name="launch")


class DeviceName(StrEnum):
    """Where a command computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.toml", help="Options from a TOML file; the command line goes before it."),
]


def _need_torch() -> None:
    """Raise ``MissingExtraError`` where torch is not installed; loads nothing."""
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "train")


def _world_size() -> int:
    """Processes of this run, as the launcher says; 1 where there is none."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or text == "0":
        raise UsageError(f"WORLD_SIZE must be the number of processes of the run, is {text!r}")
    return int(text)


@launch.command("local")
def launch_local(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What each process runs: a command of dynmo-train.")
    ],
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes to start.")] = 1,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", help="Folder for the output of every process [default: a temporary folder]."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Times to go on from the last checkpoint after a failure.")
    ] = 0,
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0, help="Seconds that a process may take to end when it is told to.")
    ] = 5.0,
) -> None:
    """Run COMMAND in several processes on this machine; shows what rank 0 says.

    Ends with the exit code of the process that failed. A process that ends with 75 asks for all to be started again.
    """
    if arguments[0] == "launch":
        raise UsageError("launch cannot start another launch; give it pretrain or another command that computes")
    _need_torch()
    from .launch.local import LocalLaunch
    from .launch.local import launch_local as run

    folder = log_dir or Path(tempfile.mkdtemp(prefix="dynmo-launch-"))
    asked = LocalLaunch(nproc=nproc, arguments=tuple(arguments), log_dir=folder, grace_s=grace_s)
    code = run(asked, max_restarts=max_restarts)
    if log_dir is None and code == 0:
        shutil.rmtree(folder)
    raise typer.Exit(code)


RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="Named sizes, such as gpt-345m or llama-2-7b; --config goes before."),
]


def _pretrain(family: str, config: Path | None, recipe: str | None, flags: dict[str, Any]) -> None:
    """Resolve and check the configuration, and train."""
    _need_torch()
    from .config.recipes import read_recipe
    from .data.tokenizer import read_vocab_size

    try:
        values = read_recipe(recipe, family) if recipe else {}
        values |= read_config_file(config) if config else {}
        dry = bool(flags.get("dry_run") or values.get("dry_run"))
        world_size = dry_run_processes(flags, values) if dry else _world_size()
        resolved = resolve(
            flags=flags,
            file={**(dry_run_values(family, flags, values) if dry else {}), **with_deepspeed(flags, values)},
            command={"family": family},
            facts=Facts(world_size=world_size, tokenizer_vocab_size=read_vocab_size),
        )
        check(resolved, world_size)
    except DocumentError:
        # Every process of a run has the same command line: the first one tells what is wrong with it.
        if os.environ.get("RANK", "0") != "0":
            raise typer.Exit(EXIT_USAGE) from None
        raise
    if dry:
        from .dryrun import show_dry_run

        show_dry_run(resolved, resolved.run.dry_run_device, Format(resolved.run.dry_run_format))
        return
    from .loop import run_pretrain

    raise typer.Exit(run_pretrain(resolved))


@pretrain.command("gpt", cls=MegatronCommand)
@with_options
def pretrain_gpt(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a GPT on an indexed data set, in this process or, under `dynmo-train launch`, in several."""
    _pretrain("gpt", config, recipe, flags)


@pretrain.command("llama", cls=MegatronCommand)
@with_options
def pretrain_llama(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a Llama, or with --num-experts a Mixtral, on an indexed data set, in one process or several."""
    _pretrain("llama", config, recipe, flags)


@pretrain.command("bert", cls=MegatronCommand)
@with_options
def pretrain_bert(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a BERT on an indexed data set of sentences (dynmo-prep binarize --split-sentences)."""
    _pretrain("bert", config, recipe, flags)


@pretrain.command("t5", cls=MegatronCommand)
@with_options
def pretrain_t5(config: ConfigFile = None, recipe: RecipeName = None, **flags: Any) -> None:
    """Train a T5 on an indexed data set of sentences (dynmo-prep binarize --split-sentences)."""
    _pretrain("t5", config, recipe, flags)


@app.command("generate")
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
    _need_torch()
    texts = _prompts(prompt, prompts)
    import torch

    from .tasks.generate import Request, generate
    from .tasks.sampling import Sampling

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


@app.command("tune-sparse")
def tune_sparse(
    hidden_size: Annotated[int, typer.Option("--hidden-size", min=1, help="Width of the residual stream.")],
    ffn_hidden_size: Annotated[
        int | None, typer.Option("--ffn-hidden-size", min=1, help="Width inside the MLP [default: 4 x --hidden-size].")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Tokens of a microbatch: --micro-batch-size x --seq-length.")
    ] = 512,
    output: Annotated[Path | None, typer.Option("--output", help="File to write the table to.")] = None,
    num_threads: Annotated[int, typer.Option("--num-threads", min=1, help="Threads of arithmetic on CPU.")] = 1,
    device: Annotated[
        DeviceName, typer.Option("--device", help="Where to compute; auto is cuda where present.")
    ] = DeviceName.AUTO,
    report: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
) -> None:
    """Measure from which sparsity on sparse products pay, for each matrix of a model.

    The file is for --sparse-table of pretrain.
    """
    _need_torch()
    import torch

    from .dynamics.tuning import NEVER, model_shapes, tune, write_sparse_table

    torch.set_num_threads(num_threads)
    warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta state")
    if device is DeviceName.AUTO:
        device = DeviceName.CUDA if torch.cuda.is_available() else DeviceName.CPU
    shapes = model_shapes(hidden_size, ffn_hidden_size or 4 * hidden_size)
    table = tune(shapes, rows, torch.device(device))
    if output is not None:
        write_sparse_table(output, table)
    if report is Format.JSON:
        emit_json({"thresholds": table})
        return
    cells = [(rule, "never" if value >= NEVER else f"{value:g}") for rule, value in table.items()]
    emit_table(f"Sparse products, {rows} rows, {device}", ("rule", "pays from sparsity"), cells)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Run directory that the ratio's upper part comes from.")],
    second: Annotated[Path, typer.Argument(help="Run directory of the same mathematics, placed otherwise.")],
    form: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
) -> None:
    """Compare two runs step by step: are the losses the same bits, and what did a step cost?

    Ends with exit code 1 where any loss or gradient norm of a common step differs.
    """
    from .compare import compare_runs, comparison_rows

    result = compare_runs(first, second)
    if form is Format.JSON:
        emit_json(result.document())
    else:
        emit_table(f"{result.steps} common steps", ("", first.name, second.name), comparison_rows(result))
        emit(f"step time ratio {result.ratio:.2f}; after the last move {result.ratio_settled:.2f}")
        where = "" if result.identical else f" (first at step {result.first_difference})"
        emit(f"losses {'identical, bit for bit' if result.identical else 'differ'}{where}")
    raise typer.Exit(0 if result.identical else 1)


@app.command()
def monitor(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, help="Seconds between two looks.")] = 2.0,
    form: Annotated[Format, typer.Option("--format", help="How to report; json looks once.")] = Format.TEXT,
) -> None:
    """Watch a run: loss, tokens per second, load of the stages, bubble, plans. Ends when the run is done."""
    from .monitor import document_of, text_of, view_of, watch

    if form is Format.JSON:
        emit_json(document_of(view_of(run)))
    elif once or not sys.stdout.isatty():
        emit(text_of(view_of(run)))
    else:
        watch(run, every_s)


def main() -> None:
    """Entry point of the console script ``dynmo-train``."""
    run_app(app, "dynmo-train")
