"""What a user can see of a tree, area by area: each function executes the inputs in a tree and fills a record.

Nothing of the compared tree is imported but its console entry points and the public readers of ``READERS``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.documents.test_document_runs import EXACT_OUTPUT, SUBMITTERS, files, runnable
from tests.equality.records import Record, digest, normalized, without
from tests.equality.trees import Done, Tree

Inputs = dict[str, Any]
# Public readers of formats that no command of the package reads by itself: format -> package -> names since the first
# commit that is compared, the newest first, and what the reader takes.
READERS: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "plan": {
            "train": (("dynmo_train.formats.plan:read_plan", "dynmo_balance.formats.plan:read_plan"), "path"),
        },
        "checkpoint": {
            "train": (
                ("dynmo_train.formats.checkpoint.reader:load_manifest", "dynmo_ckpt.formats.checkpoint:load_manifest"),
                "path",
            ),
        },
        "dataset": {
            "train": (("dynmo_train.formats.dataset:read_sidecar", "dynmo_tools.formats.dataset:read_sidecar"), "str"),
        },
        "indexed": {
            "train": (("dynmo_train.formats.indexed:open_indexed", "dynmo_tools.formats.indexed:open_indexed"), "str"),
        },
    }
)
PROBLEM = re.compile(r"^\s+(\S.*?): .* \[(\w+)\]$", re.M)
# Fields of records and documents that differ between two executions of one commit.
VOLATILE = frozenset(
    {
        *("written_by", "created_utc", "manifest_crc32", "time_utc", "run_id", "step_ns", "stalled_s", "pause_ns"),
        *("version", "host", "hosts", "pid", "elapsed_s", "seconds", "wall_s", "started_utc", "x_dynmo_ckpt"),
    }
)


NOT_COMPARED = "not compared: "


def _names(tree: Tree, folder: Path, inputs: Path) -> dict[str, str]:
    return {
        str(folder): "{folder}",
        str(inputs): "{inputs}",
        str(tree.root): "{tree}",
        str(tree.programs): "{programs}",
        str(tree.environment["HOME"]): "{home}",
        str(tree.work): "{work}",
    }


def _shown(done: Done, names: Mapping[str, str], *, is_measured: bool = False) -> dict[str, Any]:
    codes: Any = done.codes[0] if len(done.codes) == 1 else list(done.codes)
    texts = (normalized(text, names, is_measured=is_measured) for text in (done.out, done.err))
    return {"exit code": codes, **dict(zip(("stdout", "stderr"), texts, strict=True))}


def _json_of(text: str) -> Any:
    """A printed document, so that differences are found by field; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fresh(tree: Tree, *parts: str) -> Path:
    folder = tree.work.joinpath(*(re.sub(r"[^\w.-]", "_", part) for part in parts))
    folder.mkdir(parents=True)
    return folder


# ---------------------------------------------------------------- runs


def runs(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """Losses, gradient norms and the tensors of the last checkpoint of training runs."""
    if given["groups"]:
        tree.warm_up("dynmo-train", *_filled(given["warm_up"], inputs, tree.work / "warm-up"))
    for results in tree.map(lambda group: list(_run_group(tree, inputs, group)), given["groups"]):
        for key, value in results:
            record.add(key, value)


def _filled(words: Iterable[str], inputs: Path, folder: Path) -> list[str]:
    return [word.replace("{inputs}", str(inputs)).replace("{folder}", str(folder)) for word in words]


def _run_group(tree: Tree, inputs: Path, group: Inputs) -> Iterable[tuple[str, Any]]:
    """Runs of one layout, of which each may resume the one before it."""
    folder = _fresh(tree, "runs", str(group["number"]))
    for run in group["runs"]:
        key = f"{group['number']}/{run['name']}"
        words = _filled(run["words"], inputs, folder)
        target = folder / run["folder"]
        with _answering(target, run):
            done = tree.run("dynmo-train", *words, folder=folder, ranks=run["ranks"], timeout_s=900.0)
        value: dict[str, Any] = {"command": run["words"], "exit codes": list(done.codes)}
        if any(done.codes) and run["ranks"] == 1:
            # Of several ranks, it is a race whether rank 0 reports its own failure or the loss of another one.
            lines = normalized(done.err, _names(tree, folder, inputs), is_measured=True).splitlines()
            value["error"] = [line for line in lines if line.startswith("dynmo-train: error")]
        yield key, _without_paths(value | _run_values(target), _names(tree, folder, inputs))
    shutil.rmtree(folder)


def _without_paths(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with a word for each path of the machine; a checkpoint records that of its data."""
    text = json.dumps(value)
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return json.loads(text)


def _run_values(run: Path) -> dict[str, Any]:
    """Figures of each step, and each tensor of the last checkpoint with its checksum."""
    metrics = run / "metrics.jsonl"
    values: dict[str, Any] = {
        "metrics": [without(json.loads(line), VOLATILE) for line in metrics.read_bytes().splitlines()]
        if metrics.exists()
        else None
    }
    manifests = sorted((run / "checkpoints").glob("step-*/manifest.json"))
    if not manifests:
        return values | {"checkpoint": None}
    manifest = json.loads(manifests[-1].read_text(encoding="utf-8"))
    tensors = {
        name: [
            tensor["dtype"],
            tensor["shape"],
            sorted((str(part["index"]), part["crc32"]) for part in tensor["shards"]),
        ]
        for name, tensor in manifest.pop("tensors").items()
    }
    return values | {"tensors": json.loads(json.dumps(tensors)), "checkpoint": without(manifest, VOLATILE)}


class _answering:
    """Within: a planner that moves layers and releases workers where the run's input asks for it.

    It exchanges documents of the run directory with the trainer, as any external planner does.
    """

    def __init__(self, target: Path, run: Inputs) -> None:
        self._target, self._run = target, run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)

    def __enter__(self) -> None:
        if self._run["moves"]:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._run["moves"]:
            self._thread.join()

    def _answer_all(self) -> None:
        from tests.distributed.scripted_planner import ScriptedPlanner

        planner = ScriptedPlanner(self._target)
        while not self._ended.is_set():
            waiting = planner.pending()
            if waiting is not None:
                move = self._run["moves"].get(str(waiting[1]))
                if move is None:
                    planner.answer()
                else:
                    planner.answer(self._partition(planner, move), released=move["released"])
            time.sleep(0.02)

    def _partition(self, planner: Any, move: Inputs) -> list[list[str]]:
        """Items of each stage that stays; cuts are between layers, or within them where the run allows it."""
        chance, items = random.Random(move["seed"]), planner.items()
        stages = [stage for stage in planner.active()["stages"] if stage["worker"] not in move["released"]]
        layer_of = [name.rpartition(".")[0] if "layers." in name else name for name in items]
        allowed = [at for at in range(1, len(items)) if self._run["cuts layers"] or layer_of[at] != layer_of[at - 1]]
        cuts = sorted(chance.choice(allowed) for _ in range(len(stages) - 1))
        return [items[begin:end] for begin, end in pairwise([0, *cuts, len(items)])]


# ---------------------------------------------------------------- documents


SCRIPT_TIMEOUT_S = 1800.0
# Files whose contents two executions of one commit never share, and why; their names are compared.
VOLATILE_FILES: tuple[tuple[str, str], ...] = (
    ("*profile*.jsonl", "measured times"),
    ("*events*.jsonl", "measured times"),
    ("*run.json", "machine, process and time of the run"),
    ("*.html", "pages of measured runs"),
    ("*/plans/plan-*.json", "plans from measured times"),
    ("*.work/*.json", "times and processes of tasks"),
    ("*pipeline-summary.json", "times and processes of tasks"),
)


def documents(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """What the command blocks of every document print and write."""
    for name, results in zip(
        given["documents"], tree.map(lambda name: _document(tree, inputs, name), given["documents"]), strict=True
    ):
        for key, value in results.items():
            record.add(f"{name} {key}", value)
        for file, value in results["files"].items():
            if value.startswith(NOT_COMPARED):
                record.exclude(f"{name} file {file}", value.removeprefix(NOT_COMPARED))


def _document(tree: Tree, inputs: Path, name: str) -> dict[str, Any]:
    """Exit code, output of each block and files of a document, whose blocks run in order in one folder."""
    text = (inputs / "documents" / name).read_text(encoding="utf-8")
    folder = _fresh(tree, "documents", name)
    work, shims = folder / "work", folder / "shims"
    work.mkdir()
    shims.mkdir()
    for submitter in SUBMITTERS:
        (shims / submitter).write_text(f'#!/bin/sh\necho "{submitter} $*" >> {shims}/calls\n')
        (shims / submitter).chmod(0o755)
    for file, program in files(text).items():
        (work / file).write_text(program, encoding="utf-8")
    parts = runnable(text)
    script = "".join(f"echo '--- block {at}' | tee /dev/stderr\n{part.text}" for at, part in enumerate(parts))
    environment = tree.environment | {"PATH": f"{shims}{os.pathsep}{tree.environment['PATH']}"}
    outputs, code = _bash(script, work, environment)
    names = _names(tree, folder, inputs)
    is_measured = name not in EXACT_OUTPUT
    values: dict[str, Any] = {"exit code": code}
    for at, part in enumerate(parts):
        shown = {end: _block(output, at) for end, output in zip(("stdout", "stderr"), outputs, strict=True)}
        values[f"block {at}"] = {"commands": part.text} | {
            end: normalized(output, names, is_measured=is_measured) for end, output in shown.items()
        }
    values["files"] = _files(work, names, is_measured)
    calls = shims / "calls"
    values["submitted"] = normalized(calls.read_text(encoding="utf-8"), names) if calls.exists() else ""
    shutil.rmtree(folder)
    return values


def _bash(script: str, folder: Path, environment: Mapping[str, str]) -> tuple[tuple[str, str], int]:
    with (folder.parent / "out").open("wb") as out, (folder.parent / "err").open("wb") as err:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):  # what the script has left in the background ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    out_text, err_text = (
        (folder.parent / end).read_text(encoding="utf-8", errors="backslashreplace") for end in ("out", "err")
    )
    return (out_text, err_text), code


def _block(output: str, number: int) -> str:
    _, _, rest = output.partition(f"--- block {number}\n")
    return rest.partition("--- block ")[0]


def _files(work: Path, names: Mapping[str, str], is_measured: bool) -> dict[str, str]:
    """Name -> digest of each file; of texts after ``normalized``."""
    found = {}
    for path in sorted(work.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(work).as_posix()
        reasons = [reason for pattern, reason in VOLATILE_FILES if is_measured and fnmatch.fnmatchcase(name, pattern)]
        found[name] = f"{NOT_COMPARED}{reasons[0]}" if reasons else _file_digest(path, names, is_measured)
    return {normalized(name, names): value for name, value in found.items()}


def _file_digest(path: Path, names: Mapping[str, str], is_measured: bool) -> str:
    """A digest of the contents: of JSON without the fields that vary, of texts after ``normalized``."""
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        with contextlib.suppress(ValueError):
            lines = [data] if path.suffix == ".json" else data.splitlines()
            documents = [without(json.loads(line), VOLATILE) for line in lines]
            data = "".join(f"{json.dumps(document)}\n" for document in documents).encode()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return digest(data)
    return digest(normalized(text, names, is_measured=is_measured).encode())


# ---------------------------------------------------------------- verdicts


def verdicts(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """Whether each document is accepted, else the paths and kinds of its problems."""
    for key, reason in given["excluded"].items():
        record.exclude(key, reason)
    for case in given["warm_up"]:
        program, *words = _filled(case["command"], inputs / "verdicts", inputs / "verdicts" / case["folder"])
        tree.warm_up(program, *words)
    if given["cases"]:
        place = inputs / "verdicts" / given["cases"][0]["folder"]
        for readers, kind in (reader for of_format in READERS.values() for reader in of_format.values()):
            tree.warm_up_reader(readers, place / given["cases"][0]["file"], kind)
    for case, values in zip(
        given["cases"], tree.map(lambda case: _verdicts_of(tree, inputs, case), given["cases"]), strict=True
    ):
        for by, value in values.items():
            record.add(f"{case['key']} by {by}", value)


def _verdicts_of(tree: Tree, inputs: Path, case: Inputs) -> dict[str, Any]:
    """The verdict of the command on a case, and of the public readers of its format."""
    folder = _fresh(tree, "verdicts", case["key"])
    shutil.copytree(inputs / "verdicts" / case["folder"], folder / "given")
    place = folder / "given"
    program, *words = _filled(case["command"], inputs / "verdicts", place)
    done = tree.run(program, *words, folder=folder)
    found = {program: _verdict(done, _names(tree, place, inputs) | {str(folder): "{work}"})}
    for package, (readers, kind) in READERS.get(case["format"], {}).items():
        verdict = tree.read(readers, place / case["file"], kind, folder)
        # A reader may name the file as the place of the problem.
        found[f"reader of {package}"] = _without_paths(verdict, _names(tree, place, inputs))
    shutil.rmtree(folder)
    return found


def _verdict(done: Done, names: Mapping[str, str]) -> Any:
    code, text = done.codes[0], normalized(done.out + done.err, names)
    if "Traceback (most recent call last)" in text:
        return {"fails": text.strip().splitlines()[-1]}
    problems = sorted([path, kind] for path, kind in PROBLEM.findall(text.replace("\\n", "\n")))
    if code and problems:
        return {"refused": problems}
    return {"exit code": code} if not code else {"exit code": code, "message": text}


# ---------------------------------------------------------------- plans


def plans(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """Boundaries, certificates and simulated times of random problems."""
    if given["problems"]:
        source = inputs / "plans" / given["problems"][0]["profile"] if given["problems"][0].get("profile") else None
        if source:
            tree.warm_up("dynmo-plan", "partition", str(source), "--format", "json")
    for problem, values in zip(
        given["problems"], tree.map(lambda problem: _plan(tree, inputs, problem), given["problems"]), strict=True
    ):
        record.add(problem["key"], values)


def _plan(tree: Tree, inputs: Path, problem: Inputs) -> dict[str, Any]:
    folder = _fresh(tree, "plans", problem["key"])
    names = _names(tree, folder, inputs)
    values = {}
    for words in problem["commands"]:
        done = tree.run("dynmo-plan", *_filled(words, inputs / "plans", folder), folder=folder)
        shown = _shown(done, names)
        document = _json_of(shown["stdout"])
        values[" ".join(words)] = shown | {"stdout": without(document, VOLATILE)}
    written = folder / "profile.jsonl"
    if written.exists():
        lines = [without(json.loads(line), VOLATILE) for line in written.read_text(encoding="utf-8").splitlines()]
        values["profile"] = digest(json.dumps(lines).encode())
    shutil.rmtree(folder)
    return values


# ---------------------------------------------------------------- checkpoints


def checkpoints(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """Bytes of every file that conversions write, and what they print."""
    if given["chains"]:
        tree.warm_up("dynmo-ckpt", *_filled(given["warm_up"], inputs / "checkpoints", tree.work))
    for results in tree.map(lambda chain: list(_chain(tree, inputs, chain)), given["chains"]):
        for key, value in results:
            record.add(key, value)


def _chain(tree: Tree, inputs: Path, chain: Inputs) -> Iterable[tuple[str, Any]]:
    """Conversions in one folder, of which each reads the input or what earlier ones have written."""
    folder = _fresh(tree, "checkpoints", chain["name"])
    names = _names(tree, folder, inputs)
    for step in chain["steps"]:
        done = tree.run("dynmo-ckpt", *_filled(step["words"], inputs / "checkpoints", folder), folder=folder)
        shown = _shown(done, names, is_measured=True)
        shown["stdout"] = _comparable(_json_of(shown["stdout"]))
        out = folder / step["out"]
        digests = {
            path.relative_to(out).as_posix(): _checkpoint_digest(path, names)
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        yield f"{chain['name']} {step['name']}", shown | {"files": digests}
    shutil.rmtree(folder)


def _checkpoint_digest(path: Path, names: Mapping[str, str]) -> str:
    data = path.read_bytes()
    if path.suffix == ".json":
        return digest(json.dumps(_comparable(_json_of(normalized(data.decode("utf-8"), names)))).encode())
    return digest(data)


def _comparable(document: Any) -> Any:
    """A document without fields that vary, and without checksums of files in which they do; those are compared."""
    document = without(document, VOLATILE)
    if isinstance(document, dict) and isinstance(files := document.get("files"), dict):
        document["files"] = {name: None if name.endswith(".json") else entry for name, entry in files.items()}
    return document


# ---------------------------------------------------------------- dry runs


STAND_IN = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$EQUALITY_CALLS"\nprintf "\\1\\0" >> "$EQUALITY_CALLS"\n'
STAND_INS = (
    *("dynmo-train", "dynmo-prep", "dynmo-ckpt", "dynmo-plan", "srun", "sbatch", "python", "kubectl", "docker"),
    *("curl", "wget", "git", "pip", "sudo", "apt-get"),
)


def dry_runs(tree: Tree, inputs: Path, given: Inputs, record: Record) -> None:
    """The commands that published scripts become, and the translation of their flags."""
    jobs = [(_script_of_others, name) for name in given["scripts"]] + [(_own_script, name) for name in given["own"]]
    for (_, name), value in zip(jobs, tree.map(lambda job: job[0](tree, inputs, job[1]), jobs), strict=True):
        for key, shown in value.items():
            record.add(f"{name} {key}", shown)


def _script_of_others(tree: Tree, inputs: Path, name: str) -> dict[str, Any]:
    folder = _fresh(tree, "dry_runs", name)
    path = str(inputs / "dry_runs" / name)
    names = _names(tree, folder, inputs)
    commands = {"run --dry-run": ("run", "--dry-run", path), "explain-flags": ("explain-flags", path)}
    return {key: _shown(tree.run("dynmo-train", *words, folder=folder), names) | {} for key, words in commands.items()}


def _own_script(tree: Tree, inputs: Path, name: str) -> dict[str, Any]:
    """How a script of ``bin/`` calls the commands: they are stand-ins that write down their words."""
    folder = _fresh(tree, "dry_runs", name)
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir()
    for program in STAND_INS:
        (programs / program).write_text(STAND_IN)
        (programs / program).chmod(0o755)
    path = tree.root / name
    if not path.exists():
        return {"calls": "(no such script)"}
    environment = tree.environment | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "EQUALITY_CALLS": str(calls),
        "PYTHON": str(tree.programs / "python"),
    }
    (folder / "work").mkdir()
    (out, err), code = _bash(f"bash {path} {OWN_ARGUMENTS.get(name, '')}", folder / "work", environment)
    names = _names(tree, folder, inputs)
    words = [
        normalized(word, names) if word != "\1" else "\n"
        for word in (calls.read_text(encoding="utf-8").split("\0") if calls.exists() else ())
    ]
    shown = {"exit code": code, "calls": " ".join(words).split("\n")}
    return {"calls": shown | {"stdout": normalized(out, names), "stderr": normalized(err, names)}}


OWN_ARGUMENTS: Mapping[str, str] = MappingProxyType({"bin/ASPLOS23/tbl2_fig9_tbl4.sh": "2.5B CB-FE-SC"})


# ---------------------------------------------------------------- help


def help_texts(tree: Tree, _inputs: Path, given: Inputs, record: Record) -> None:
    """``--help`` and ``--help-all`` of every command and subcommand."""
    found: dict[str, Any] = {}
    level: list[tuple[str, ...]] = [(program,) for program in given["programs"]]
    folder = _fresh(tree, "help")
    while level:
        shown = list(tree.map(lambda words: _help(tree, folder, words), level))
        following = []
        for words, text in zip(level, shown, strict=True):
            found[" ".join(words)] = text
            following += [(*words, name) for name in _subcommands(text["--help"]["stdout"])]
        level = following
    for key, value in sorted(found.items()):
        for flag, text in value.items():
            record.add(f"{key} {flag}", text)


def _help(tree: Tree, folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    names = _names(tree, folder, folder)
    program, *others = words
    return {flag: _shown(tree.run(program, *others, flag, folder=folder), names) for flag in ("--help", "--help-all")}


def _subcommands(text: str) -> list[str]:
    """Names in sections of commands: lines that are indented by two spaces."""
    sections = re.findall(r"^(?:[A-Z][\w ]*)?[Cc]ommands:\n((?:  .*\n|\n)*)", text + "\n", re.M)
    return [match[1] for section in sections for match in re.finditer(r"^  ([\w-]+)(?=  |$)", section, re.M)]


AREAS: Mapping[str, Callable[[Tree, Path, Inputs, Record], None]] = MappingProxyType(
    {
        "help": help_texts,
        "dry_runs": dry_runs,
        "plans": plans,
        "verdicts": verdicts,
        "checkpoints": checkpoints,
        "documents": documents,
        "runs": runs,
    }
)
