"""The commands of ``dynmo-prep``: one per step of ``runner/registry.py``, and those that are not steps.

    argv ─> classic_args ─> typer ─> values ─> build ─> settings ─┬─> Job ─> dispatch_step, run_job ─> Summary
                                                                  └─> Execution
    Summary ─> one line or JSON on stdout; messages on stderr; exit code

``--help`` must be instant: modules of steps, numpy and the runner are imported within the commands.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import (
    Format,
    command_line,
    emit,
    emit_json,
    human_bytes,
    print_message,
    progress,
    run_app,
)
from .._common.document import MAX_JOBS
from .._common.errors import DynmoError, UsageError
from ..config.options import build, command, number, parameters
from ..config.settings import MAX_BYTES, MAX_PAGE_BYTES, MAX_SEED, IndexForm, InvalidUtf8, RunSettings, TokenDtype
from ..runner.registry import MISSING_NAMES, Step, default_work, name_conflicts, steps
from .classic_args import expand_list_flags, from_classic_syntax

if TYPE_CHECKING:
    from ..runner.job import Summary

# The output is complete, but a script must see that lines are missing from it.
EXIT_SOME_REJECTED = 3
MAX_SECONDS = 86_400

# The order of help pages: that of a pipeline, from the corpus to the dataset.
COMMAND_ORDER = (
    "sample-corpus",
    "blacklist-urls",
    "fetch-urls",
    "extract-wiki",
    "merge",
    "add-id",
    "clean",
    "fix",
    "dedup",
    "find-duplicates",
    "group-duplicates",
    "remove-duplicates",
    "decontaminate",
    "shuffle",
    "split-sentences",
    "train-tokenizer",
    "binarize",
    "binarize-chat",
    "merge-indexed",
    "convert-indexed",
    "inspect",
    "verify",
    "pipeline",
    "status",
)

app = command_line(
    *COMMAND_ORDER,
    help="Prepare training data: from raw text to a clean, deduplicated, tokenized and indexed dataset.",
)

FormatOption = Annotated[Format, typer.Option("--format", help="Report format on stdout.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
WorkOption = Annotated[
    Path | None,
    typer.Option("--work-dir", help="Folder for task manifest, parts and rejects [default: OUTPUT.work]"),
]


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _step_parameters(step: Step) -> list[inspect.Parameter]:
    # Inputs are accepted in both ways: shells expand patterns to arguments, Megatron's tools have --input.
    inputs = typer.Argument(help=step.input_help)
    more = typer.Option("--input", "--input-files", help="Input file or pattern, in addition to INPUTS. Repeat.")
    output = typer.Option("--output", "-o", *step.output_names, help=step.output_help)
    return [
        _keyword("inputs", Annotated[list[str] | None, inputs], None),
        _keyword("input_", Annotated[list[str] | None, more], None),
        _keyword("output", Annotated[Path, output]),
        *parameters(step.settings),
        *parameters(RunSettings),
        _keyword("work_dir", WorkOption, None),
        _keyword("format_", FormatOption, Format.TEXT),
    ]


def _step_callback(step: Step) -> Callable[..., None]:
    def body(**values: Any) -> None:
        """Run the step with the values of its flags.

        Raises:
            UsageError: no inputs, or invalid settings.
            DynmoError: a task failed, or the file system did.
            typer.Exit: with code 3, some lines were rejected or names not found.
        """
        from ..io.paths import expand_inputs
        from ..runner.job import run_job
        from ..runner.submit import dispatch_step
        from ..runner.task_manifest import Job

        run = build(RunSettings, values)
        patterns = [*(values["inputs"] or []), *(values["input_"] or [])]
        if not patterns:
            raise UsageError(f"{step.name}: no inputs; name at least one input file or pattern")
        output: Path = values["output"]
        job = Job(
            step=step.name,
            inputs=expand_inputs(patterns),
            output=output,
            work=values["work_dir"] or default_work(output),
            settings=build(step.settings, values),
            limits=_limits(run),
            package=step.package,
        )
        with _report_os_errors():
            done = dispatch_step(job, step, run, _execution(run), sys.argv[1:])
            if done is not None:
                # A subset produces no data, so its line is a message. That of a submission has the job id, for scripts.
                (print_message if run.task_index is not None else emit)(done)
                return
            summary = run_job(job, step.phases_of(), _execution(run))
        if values["format_"] is Format.JSON:
            emit_json(summary.as_json())
        else:
            emit(_summary_line(summary))
        if summary.counts.num_rejected:
            print_message(f"{step.name}: the rejected lines are in {job.work / 'rejects'}")
        if summary.facts.get(MISSING_NAMES):
            print_message(
                f"{step.name}: {summary.facts[MISSING_NAMES]:,} names of {job.settings.groups} are in no input; "
                "use all inputs of find-duplicates and the same --id-key"
            )
        if summary.counts.num_rejected or summary.facts.get(MISSING_NAMES):
            raise typer.Exit(EXIT_SOME_REJECTED)

    return body


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))


def _summary_line(summary: Summary) -> str:
    """One line: documents and bytes in, documents out, dropped and rejected by reason, seconds and MB/s."""
    counts = summary.counts
    parts = [f"{counts.documents_in:,} documents in ({human_bytes(counts.bytes_in)})", f"{counts.documents_out:,} out"]
    if counts.changed:
        parts.append(f"{counts.changed:,} changed")
    if counts.dropped:
        parts.append(f"{sum(counts.dropped.values()):,} dropped ({_reasons(counts.dropped)})")
    if counts.rejected:
        parts.append(f"{counts.num_rejected:,} rejected ({_reasons(counts.rejected)})")
    if counts.blank_lines:
        parts.append(f"{counts.blank_lines:,} blank lines")
    parts += [f"{name.replace('_', ' ')} {_value_text(value)}" for name, value in summary.facts.items()]
    rate = human_bytes(counts.bytes_in / summary.seconds) if summary.seconds else "0 B"
    duration = "reused from an earlier run" if summary.reused else f"{summary.seconds:.1f} s, {rate}/s"
    return f"{summary.step}: {'; '.join(parts)}; {duration}"


def _value_text(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {element}" for key, element in value.items())
    return str(value)


@contextlib.contextmanager
def _report_os_errors() -> Iterator[None]:
    """Report an error of the file system in one line."""
    try:
        yield
    # An OSError too, but of stdout: run_app ends quietly when a reader such as ``head`` is done.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DynmoError(f"{error.filename or 'disk'}: {error.strerror or error}") from error


def _limits(run: RunSettings) -> Any:
    from ..runner.task_manifest import Limits

    return Limits(
        task_bytes=run.task_bytes, max_line_bytes=run.max_line_bytes, repair_utf8=run.utf8 is InvalidUtf8.REPLACE
    )


def _execution(run: RunSettings, *, rerun_changed: bool = False) -> Any:
    from ..runner.job import Execution

    return Execution(
        workers=run.workers,
        executor=run.executor,
        overwrite=run.overwrite,
        max_rejects=run.max_rejects,
        rerun_changed=rerun_changed,
        log_interval=run.log_interval,
    )


def _add_step(step: Step) -> None:
    """Make the command of a step; that of a filter that cannot be loaded takes any arguments and reports the error."""
    if step.error:
        allow_any = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(step.name, help=f"Unavailable: {step.error}", context_settings=allow_any)(step.check)
    else:
        text = inspect.cleandoc(step.settings.__doc__ or "")
        app.command(step.name)(command(step.name, text, _step_parameters(step), _step_callback(step)))


# A filter of another package never replaces a command; main() warns about it.
for _step in steps().values():
    if _step.name not in COMMAND_ORDER or not _step.package:
        _add_step(_step)


@app.command("sample-corpus")
def sample_corpus(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output: JSON lines (also .gz, .xz, .bz2, .zst).")],
    max_bytes: Annotated[int, number(help="Maximum bytes of text; 0 is unlimited.", minimum=0, maximum=MAX_BYTES)] = 0,
    seed: Annotated[int, number(help="Seed of the document order.", minimum=0, maximum=MAX_SEED)] = 0,
    overwrite: OverwriteOption = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Write a corpus that every machine has: the documentation of the installed Python."""
    from ..extract.sample_corpus import stdlib_folder, write_sample

    report = write_sample(stdlib_folder(), output, max_bytes=max_bytes, seed=seed, overwrite=overwrite)
    if format_ is Format.JSON:
        emit_json(report)
    else:
        emit(
            f"sample-corpus: {report['documents']:,} documents, {human_bytes(report['bytes'])}, "
            f"from {report['source']}: {output}; {report['seconds']:.1f} s"
        )


def _pipeline_callback(
    *,
    recipe: str,
    set_: list[str] | None,
    work_dir: Path,
    input_: list[str] | None,
    step: str | None,
    format_: Format,
    **values: Any,
) -> None:
    from ..runner.recipe import inputs_of, parse_recipe, recipe_text, run_pipeline
    from ..runner.submit import dispatch_pipeline

    run = build(RunSettings, values)
    text, source = recipe_text(recipe)
    report = print_message if format_ is Format.JSON else emit
    recipe_ = parse_recipe(text, source, set_ or [])
    # A changed step of a recipe replaces its own output without --overwrite; other files are never replaced.
    execution = _execution(run, rerun_changed=True)
    inputs = inputs_of(recipe_, input_ or [], work_dir)
    with _report_os_errors():
        done = dispatch_pipeline(
            recipe_, inputs, work_dir, _limits(run), step=step, run=run, execution=execution, argv=sys.argv[1:]
        )
        if done is not None:
            (print_message if step is not None else emit)(done)
            return
        document = run_pipeline(
            recipe_, inputs, work_dir, _limits(run), execution, lambda summary: report(_summary_line(summary))
        )
    if format_ is Format.JSON:
        emit_json(document)
    else:
        tokens = f"{document['tokens']:,} tokens" if document["tokens"] is not None else "no dataset"
        emit(
            f"pipeline: {document['documents_in']:,} documents in, {document['documents_out']:,} out, "
            f"{tokens}; {document['seconds']:.1f} s; {work_dir / 'pipeline-summary.json'}"
        )
    if document["documents_rejected"] or any(step_["facts"].get(MISSING_NAMES) for step_ in document["steps"]):
        raise typer.Exit(EXIT_SOME_REJECTED)


app.command("pipeline")(
    command(
        "pipeline",
        "Run a recipe, a chain of steps; resume where an earlier run stopped.",
        [
            _keyword("recipe", Annotated[str, typer.Argument(help="Recipe file (.toml), or quickstart.")]),
            _keyword(
                "set_",
                Annotated[list[str] | None, typer.Option("--set", help="Override a value: step.key=value. Repeat.")],
                None,
            ),
            _keyword("work_dir", Annotated[Path, typer.Option(help="Folder for all outputs.")], Path()),
            _keyword(
                "input_",
                Annotated[
                    list[str] | None, typer.Option("--input", help="Input instead of those of the recipe. Repeat.")
                ],
                None,
            ),
            _keyword(
                "step", Annotated[str | None, typer.Option(help="Run only this step, or a subset of its tasks.")], None
            ),
            *parameters(RunSettings),
            _keyword("format_", FormatOption, Format.TEXT),
        ],
        _pipeline_callback,
    )
)


@app.command("status")
def status(
    folder: Annotated[
        Path, typer.Argument(help="Work folder, or a folder of work folders such as --work-dir of a pipeline.")
    ],
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show the progress of the runs in a folder."""
    from ..runner.status import status_of

    found = status_of(folder)
    if format_ is Format.JSON:
        emit_json(found)
        return
    for run in found:
        phases = ", ".join(f"{phase['name']} {phase['done']}/{phase['tasks']}" for phase in run["phases"])
        emit(
            f"{run['step']}: {'done' if run['complete'] else phases}; {run['documents_in']:,} documents in, "
            f"{run['rejected']:,} rejected; {run['output']}"
        )


@app.command("inspect")
def inspect_dataset(
    prefix: Annotated[Path, typer.Argument(help="PREFIX of PREFIX.bin and PREFIX.idx.")],
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show the contents of an indexed dataset."""
    from ..formats.indexed import describe

    view = describe(prefix)
    if format_ is Format.JSON:
        emit_json(view)
        return
    for name, value in view.items():
        if value is None:
            continue
        emit(f"{name.replace('_', ' ')}: {value:,}" if type(value) is int else f"{name.replace('_', ' ')}: {value}")


@app.command("verify")
def verify_dataset(
    prefix: Annotated[Path, typer.Argument(help="PREFIX of PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json whose ids bound the tokens.")] = None,
) -> None:
    """Check an indexed dataset and the checksums of its sidecar; on errors, list all and exit with code 2."""
    from ..formats.indexed import verify
    from ..tokenization.tokenizers import TokenizerFiles, load_tokenizer

    files = TokenizerFiles(model=tokenizer)
    view = verify(prefix, None if tokenizer is None else load_tokenizer(files).vocabulary())
    checksums = "checksums match" if view["has_sidecar"] else "no sidecar, checksums not compared"
    counts = f"{view['documents']:,} documents, {view['sequences']:,} sequences, {view['tokens']:,} tokens"
    emit(f"{prefix}: valid: {counts}; {checksums}")


@app.command("group-duplicates")
def group_duplicates(
    pairs: Annotated[Path, typer.Argument(help="Pairs, the output of find-duplicates.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output: groups, the survivor of each first.")],
    threshold: Annotated[float, number(help="Minimum Jaccard index of a pair (0 to 1).", minimum=0, maximum=1)] = 0.9,
    overwrite: OverwriteOption = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Group near-duplicates that their pairs connect; documents at the ends of a chain may differ."""
    from ..dedup.groups import write_groups
    from ..io.paths import check_new_outputs

    check_new_outputs([pairs], [output], overwrite=overwrite)
    groups = write_groups(pairs, output, threshold)
    report = {
        "groups": groups.groups,
        "largest_group": groups.largest,
        "documents": groups.documents,
        "output": str(output),
    }
    if format_ is Format.JSON:
        emit_json(report)
    else:
        emit(
            f"group-duplicates: {report['groups']:,} groups of {report['documents']:,} documents, "
            f"the largest of {report['largest_group']:,}; {output}"
        )


@app.command("blacklist-urls")
def blacklist_urls(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output: accepted URLs, one per line.")],
    inputs: Annotated[
        list[str] | None, typer.Argument(help="URL files (one per line), patterns, or folders of .txt files.")
    ] = None,
    domains: Annotated[
        Path | None, typer.Option(help="Blocked registered domains, one per line [default: Megatron's list]")
    ] = None,
    endings: Annotated[
        Path | None, typer.Option(help="Blocked URL endings, one per line [default: Megatron's list]")
    ] = None,
    save_dropped: Annotated[
        Path | None, typer.Option(help="File for dropped URLs with their reasons (tab-separated).")
    ] = None,
    overwrite: OverwriteOption = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Drop URLs of blocked domains and file types, malformed URLs and duplicates."""
    from ..io.paths import check_new_outputs, expand_inputs
    from ..web.url_filter import built_in_list, expand_folder, read_list, write_urls

    if not inputs:
        raise UsageError("blacklist-urls: no inputs; name at least one file, pattern or folder")
    paths = expand_inputs(expand_folder(inputs))
    tables = [save_dropped] if save_dropped else []
    check_new_outputs(paths, [output, *tables], overwrite=overwrite, tables=tables)
    with progress("blacklist-urls", sum(path.stat().st_size for path in paths), "bytes") as tick:
        counts = write_urls(
            paths,
            output,
            domains=read_list(domains) if domains else built_in_list("blocked_domains"),
            endings=read_list(endings) if endings else built_in_list("blocked_endings"),
            tick=tick,
            dropped=save_dropped,
        )
    if format_ is Format.JSON:
        emit_json(
            {"urls_in": counts.urls_in, "urls_out": counts.urls_out, "dropped": counts.dropped, "output": str(output)}
        )
        return
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.items())
    emit(f"blacklist-urls: {counts.urls_in:,} URLs in; {counts.urls_out:,} out; dropped: {dropped}; {output}")


@app.command("fetch-urls")
def fetch_urls(
    inputs: Annotated[list[str], typer.Argument(help="URL files (one per line), patterns, or folders of .txt files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output: JSON lines with url, title, text.")],
    connections: Annotated[
        int, number(help="Maximum concurrent requests, to different hosts.", minimum=1, maximum=MAX_JOBS)
    ] = 8,
    delay_s: Annotated[
        float, number(help="Minimum seconds between two requests to one host.", minimum=0, maximum=MAX_SECONDS)
    ] = 1.0,
    timeout_s: Annotated[
        float, number(help="Timeout of a connection or read, in seconds.", minimum=0.001, maximum=MAX_SECONDS)
    ] = 20.0,
    max_bytes: Annotated[
        int, number(help="Maximum bytes of a response; larger pages fail.", minimum=1, maximum=MAX_PAGE_BYTES)
    ] = 8 << 20,
    robots: Annotated[bool, typer.Option(help="Obey robots.txt.")] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Internal address, network (CIDR) or host name to allow, such as 10.0.0.0/8. Repeat."),
    ] = None,
    user_agent: Annotated[
        str, typer.Option(help="User-Agent header; name a web page or e-mail address of yours.")
    ] = "",
    overwrite: Annotated[
        bool,
        typer.Option(help="Replace an existing output; discard a journal of other URLs or rules."),
    ] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Download the text of web pages with rate limits and robots.txt; resume after an interruption."""
    from ..io.paths import check_new_outputs, expand_inputs
    from ..web.fetch import FetchRules, UrlList, digest_rules, discard_stale_journal, fetch_all, write_pages
    from ..web.http_client import AllowedHosts
    from ..web.url_filter import expand_folder

    # Checked here: http.client would refuse the header field at each URL, which then counts as failed.
    if not (user_agent.isprintable() and user_agent.isascii()):
        raise UsageError(f"--user-agent {user_agent!r}: must be printable ASCII")
    allowed = AllowedHosts.parse(allow_host or [])
    paths = expand_inputs(expand_folder(inputs))
    rules = FetchRules(
        connections=connections, delay_s=delay_s, timeout_s=timeout_s, max_bytes=max_bytes, robots=robots,
        allowed=allowed, **({"user_agent": user_agent} if user_agent else {}),
    )  # fmt: skip
    journal = default_work(output) / "journal.jsonl"
    # With a journal, the output may be that of the same run: write_pages compares it before it is replaced.
    check_new_outputs(paths, [output], overwrite=overwrite or journal.exists())
    journal.parent.mkdir(parents=True, exist_ok=True)
    with _report_os_errors(), UrlList(paths, journal.parent) as urls:
        digest = digest_rules(urls, rules)
        if overwrite:
            discard_stale_journal(journal, digest)
        with progress("fetch-urls", urls.count, "URLs") as tick:
            fetch_all(urls, rules, journal, tick, digest=digest)
            failures = write_pages(urls, journal, output, digest=digest, overwrite=overwrite)
    report = {
        "urls_in": urls.count,
        "pages": urls.count - sum(failures.values()),
        "failed": failures,
        "output": str(output),
    }
    if format_ is Format.JSON:
        emit_json(report)
    else:
        failed = ", ".join(f"{count:,} {reason}" for reason, count in failures.items()) or "none"
        emit(f"fetch-urls: {report['urls_in']:,} URLs; {report['pages']:,} pages; failed: {failed}; {output}")


PrefixesArgument = Annotated[
    list[str] | None, typer.Argument(help="PREFIX of PREFIX.bin and PREFIX.idx, a pattern, or a folder of datasets.")
]


@app.command("merge-indexed")
def merge_indexed(
    output: Annotated[Path, typer.Option("--output", "-o", "--output-prefix", help="PREFIX of the new dataset.")],
    prefixes: PrefixesArgument = None,
    input_: Annotated[
        list[str] | None, typer.Option("--input", help="Prefix, pattern or folder, in addition to PREFIXES. Repeat.")
    ] = None,
    widen: Annotated[bool, typer.Option(help="Convert tokens of different types to the widest type.")] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Concatenate indexed datasets without reading their tokens."""
    from ..tokenization.indexed_ops import expand_prefixes, merge_datasets

    found = expand_prefixes([*(prefixes or []), *(input_ or [])])
    if not found:
        raise UsageError("merge-indexed: no inputs; name at least one dataset")
    index = merge_datasets(found, output, widen=widen, overwrite=overwrite)
    emit(
        f"merge-indexed: {len(found):,} datasets; {index.num_documents:,} documents, "
        f"{len(index.lengths):,} sequences, {index.num_tokens:,} tokens; {output}"
    )


@app.command("convert-indexed")
def convert_indexed(
    prefix: Annotated[Path, typer.Argument(help="PREFIX of PREFIX.bin and PREFIX.idx.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PREFIX of the new dataset.")],
    to: Annotated[IndexForm, typer.Option("--to", "--dataset-impl", help="Form of the new index.")] = IndexForm.MMAP,
    dtype: Annotated[
        TokenDtype | None,
        typer.Option(help="Data type of the new tokens [default: unchanged; int32 for cached and lazy]"),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Convert an indexed dataset to another form or token type."""
    import numpy as np

    from ..tokenization.indexed_ops import convert_dataset

    index = convert_dataset(prefix, output, to, None if dtype is None else np.dtype(dtype.value), overwrite=overwrite)
    emit(
        f"convert-indexed: {index.num_documents:,} documents, {index.num_tokens:,} {index.dtype.name} tokens, "
        f"{to.value}; {output}"
    )


def main() -> None:
    """Run the command line."""
    for message in name_conflicts(COMMAND_ORDER):
        print_message(f"dynmo-prep: warning: {message}")
    # In place, not passed on: a Slurm script repeats sys.argv, which then has the flags of this command line only.
    sys.argv[1:] = expand_list_flags(from_classic_syntax(sys.argv[1:]))
    run_app(app, "dynmo-prep")
