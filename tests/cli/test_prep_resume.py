"""dynmo-prep: killed runs resume, dead workers are named, subsets and executors write the same bytes."""

from __future__ import annotations

import importlib
import json
import random
import re
import signal
import subprocess
import sys

import pytest

from dynmo_tools.config.settings import MergeSettings
from dynmo_tools.runner.slurm import Submission, sbatch_script
from dynmo_tools.runner.submit import remove_flags
from dynmo_tools.runner.task import Phase, WorkerDiedError
from dynmo_tools.runner.task_manifest import Job, make_manifest, store_manifest

WORDS = ["The", "river", "runs", "past", "old", "mills", "under", "bridges", "of", "stone", "where", "nobody", "waits"]


def documents(path, count=300):
    rng = random.Random(8)
    rows = [{"id": n, "text": " ".join(rng.choices(WORDS, k=rng.randrange(130, 200))) + "."} for n in range(count)]
    rows += [{"id": "copy", "text": rows[count // 2]["text"]}, {"id": "short", "text": "Short."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RECIPE = """
[pipeline]
input = "in.jsonl"
[[step]]
run = "clean"
language = ""
[[step]]
run = "dedup"
[[step]]
run = "shuffle"
[[step]]
run = "train-tokenizer"
vocab-size = 280
[[step]]
run = "binarize"
append-eod = true
"""

# Each run is forked from one process, which has imported everything once.
KILLED = """
import importlib, json, os, pkgutil, random, signal, sys
import dynmo_tools
from dynmo_tools import cli
for module in pkgutil.walk_packages(dynmo_tools.__path__, "dynmo_tools."):
    if module.name not in ("dynmo_tools.__main__", "dynmo_tools.runner.ray"):
        importlib.import_module(module.name)
import ftfy, tokenizers, zstandard
real = os.replace

def run(left):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    def replace(*names):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*names)
    os.replace = replace
    code = 1
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os._exit(code)

sys.argv[0] = "dynmo-prep"
draw, codes = random.Random(20), []
while len(codes) < 60 and 0 not in codes:
    codes.append(run(draw.randrange(1, 20)))
os.write(1, json.dumps(codes).encode())
"""


def finals(folder):
    names = ("03-shuffle.jsonl.zst", "tokenizer.json", "data_text_document.bin", "data_text_document.idx")
    return {name: (folder / name).read_bytes() for name in names}


def pipeline(folder):
    folder.mkdir()
    documents(folder / "in.jsonl")
    (folder / "recipe.toml").write_text(RECIPE)
    return ["pipeline", str(folder / "recipe.toml"), "--work-dir", str(folder), "--task-bytes", "60000"]


def test_run_killed_repeatedly_writes_the_same_bytes(prep, tmp_path):
    whole = pipeline(tmp_path / "whole")
    assert prep(*whole)[0] == 0
    broken = pipeline(tmp_path / "broken")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *broken], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    *kills, last = json.loads(done.stdout[done.stdout.rindex("[") :])
    assert (set(kills), last) == ({-signal.SIGKILL}, 0), done.stderr
    assert len(kills) >= 15
    assert finals(tmp_path / "broken") == finals(tmp_path / "whole")
    assert not [path for path in (tmp_path / "broken").rglob("*.tmp-*")]


INTERRUPTED = """
import os, signal
from dynmo_tools import cli
from dynmo_tools.runner import local

real = local.WorkerPool.run
def run(*arguments):
    for number, answer in enumerate(real(*arguments), 1):
        yield answer
        if number == 2:
            os.killpg(0, signal.SIGINT)  # as a terminal does: to this process and its workers
local.WorkerPool.run = run
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.complete
def test_ctrl_c_leaves_no_partial_files_and_the_run_resumes(tmp_path, prep):
    """Ctrl-C is sent after the second of several tasks, counted by the process itself."""
    source = documents(tmp_path / "in.jsonl")
    arguments = ["clean", str(source), "-o", str(tmp_path / "out.jsonl"), "--workers", "2", "--task-bytes", "30000"]
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, tmp_path / "interrupted.py", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    assert done.returncode == 130, done.stderr
    assert "run the same command again to resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert not [path for path in tmp_path.rglob("*.tmp-*")]
    tasks = json.loads(prep("status", tmp_path, "--format", "json")[1])[0]
    code, _, err = prep(*arguments)
    assert (code, "resumed:" in err) == (0, True), tasks
    assert prep("clean", source, "-o", tmp_path / "plain.jsonl", "--task-bytes", 30_000)[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_dead_worker_ends_the_run_with_its_task_name(tmp_path, monkeypatch):
    from dynmo_tools.runner.local import WorkerPool

    job = Job(
        step="merge",
        inputs=(documents(tmp_path / "in.jsonl"),),
        output=tmp_path / "o",
        work=tmp_path,
        settings=MergeSettings(),
    )
    store_manifest(job, make_manifest(job))
    phase = Phase(name="odd", run="tests_only:die", tasks=3)
    # A spawned process imports what it runs: from a module of its own, wherever pytest was started.
    (tmp_path / "dying.py").write_text("import os\ndef die(connection, *_):\n    connection.recv()\n    os._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dynmo_tools.runner.local.worker_main", importlib.import_module("dying").die)
    with WorkerPool(job, 2) as pool, pytest.raises(WorkerDiedError, match=r"task odd-0000\d died \(exit code 7\)"):
        list(pool.run(phase, range(3), lambda documents, size: None))


def test_workers_are_reused_across_phases(tmp_path, monkeypatch):
    from dynmo_tools.runner.local import WorkerPool

    job = Job(step="merge", inputs=(), output=tmp_path / "o", work=tmp_path, settings=MergeSettings())
    (tmp_path / "reporting_worker.py").write_text(
        "import os\n"
        "def serve(connection, *_):\n"
        "    while (task := connection.recv()) is not None:\n"
        "        connection.send(('done', task[1], (os.getpid(), task[0].name)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dynmo_tools.runner.local.worker_main", importlib.import_module("reporting_worker").serve)
    results = []
    with WorkerPool(job, 2) as pool:
        for name in ("one", "two"):
            phase = Phase(name=name, run="tests_only:report", tasks=4)
            results += [marker for _, marker in pool.run(phase, range(4), lambda documents, size: None)]
    assert sorted(phase for _, phase in results) == ["one"] * 4 + ["two"] * 4
    assert len({process for process, _ in results}) == 2


def test_second_run_in_a_work_folder_is_refused(prep, tmp_path):
    import fcntl

    source = documents(tmp_path / "in.jsonl", 5)
    (tmp_path / "out.jsonl.work").mkdir()
    with open(tmp_path / "out.jsonl.work" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = prep("merge", source, "-o", tmp_path / "out.jsonl")
    assert (code, "another run uses this work folder" in err) == (2, True)


def test_subsets_of_each_phase_write_the_same_bytes(prep, tmp_path):
    source = documents(tmp_path / "in.jsonl")
    common = ("dedup", source, "--task-bytes", 30_000, "-o")
    assert prep(*common, tmp_path / "whole.jsonl")[0] == 0
    parts = (*common, tmp_path / "parts.jsonl")
    code, _, err = prep(*parts, "--task-index", 0, "--task-count", 2, "--phase", "remove")
    assert (code, "phase remove needs sign" in err) == (2, True)
    for phase in ("sign", "bands", "connect", "verify", "mark", "remove", "join"):
        for index in (1, 0):
            code, _, err = prep(*parts, "--task-index", index, "--task-count", 2, "--phase", phase)
            assert (code, f"dedup: {phase}: subset {index} of 2: ran" in err) == (0, True)
    code, out, _ = prep("status", tmp_path, "--format", "json")
    assert [run["complete"] for run in json.loads(out)] == [True, False]
    assert prep(*parts)[0] == 0
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    code, out, _ = prep("status", tmp_path)
    assert out.count("dedup: done; 302 documents in") == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--task-index", 2, "--task-count", 2), "must be from 0 to"),
        (("--task-index", 0), "requires --task-count"),
        (("--task-index", 0, "--task-count", 1, "--phase", "none"), "has the phases map, join"),
        (("--executor", "slurm"), "sbatch is not on PATH"),
        (("--executor", "slurm", "--task-count", 5000), "must be from 1 to 1000"),
    ],
)
def test_subset_out_of_range_is_refused(prep, tmp_path, monkeypatch, more, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = prep("merge", documents(tmp_path / "in.jsonl", 5), "-o", tmp_path / "out.jsonl", *more)
    assert (code, message in err) == (2, True)


SBATCH = """#!/bin/bash
# A Slurm that runs every job at once, and refuses one whose dependency it never gave out.
folder=$(dirname "$0"); count=$(ls "$folder"/job-* 2>/dev/null | wc -l); number=$((count + 100))
while [ $# -gt 0 ]; do case "$1" in
  --array) array=$2; shift;; --wrap) wrap=$2; shift;; --dependency=*) after=${1##*:};; esac; shift; done
if [ -n "$after" ] && [ ! -e "$folder/job-$after" ]; then echo "no job $after" >&2; exit 1; fi
echo "$wrap" > "$folder/job-$number"
if [ -n "$array" ]; then
  for index in $(seq 0 ${array#0-}); do SLURM_ARRAY_TASK_ID=$index bash -c "$wrap" >> "$folder/log" 2>&1 || exit 1; done
else bash -c "$wrap" >> "$folder/log" 2>&1 || exit 1; fi
echo "$number;cluster"
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A folder at the front of PATH with a stand-in for Slurm."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "sbatch").write_text(SBATCH)
    (fake / "dynmo-prep").write_text(
        f"#!/bin/bash\nexec {sys.executable} -c 'from dynmo_tools.cli import main; main()' \"$@\"\n"
    )
    for path in fake.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:/usr/bin:/bin")
    return fake


@pytest.mark.complete
def test_sbatch_failure_cancels_earlier_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "sbatch").write_text("#!/bin/bash\n[ ! -e jobs ] || exit 1\necho 41 | tee jobs\n")
    (tmp_path / "scancel").write_text('#!/bin/bash\necho "$@" > cancelled\n')
    for name in ("sbatch", "scancel"):
        (tmp_path / name).chmod(0o755)
    made = sbatch_script([Submission(name=name, line="true") for name in ("one", "two")], tmp_path / "logs")
    done = subprocess.run(["bash", "-c", made], capture_output=True, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "cancelled").read_text()) == (1, "41\n")


@pytest.mark.complete
@pytest.mark.distributed
@pytest.mark.parametrize("emit", [False, True])
def test_slurm_arrays_write_the_same_bytes(prep, sbatch, tmp_path, emit):
    source = documents(tmp_path / "in.jsonl")
    common = ("shuffle", source, "--task-bytes", 80_000, "-o")
    assert prep(*common, tmp_path / "whole.jsonl")[0] == 0
    target = (*common, tmp_path / "slurm.jsonl", "--task-count", 2)
    if emit:
        code, out, _ = prep(*target, "--emit-sbatch", tmp_path / "submit.sh")
        assert (code, "run it on a Slurm machine" in out, (sbatch / "log").exists()) == (0, True, False)
        assert subprocess.run(["bash", tmp_path / "submit.sh"], check=True, capture_output=True).stdout
    else:
        code, out, err = prep(*target, "--executor", "slurm")
        assert (code, "submitted; the last job is 103;cluster" in out) == (0, True), err
    assert (tmp_path / "slurm.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.complete
@pytest.mark.distributed
def test_slurm_arrays_with_overwrite_replace_the_output(prep, sbatch, tmp_path):
    source = documents(tmp_path / "in.jsonl")
    target = ("shuffle", source, "--task-bytes", 80_000, "-o", tmp_path / "out.jsonl")
    assert prep(*target, "--seed", 3)[0] == 0
    old = (tmp_path / "out.jsonl").read_bytes()
    code, _, err = prep(*target, "--task-count", 2, "--executor", "slurm", "--overwrite")
    assert code == 0, err + (sbatch / "log").read_text()
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines()) == sorted(old.splitlines())
    assert (tmp_path / "out.jsonl").read_bytes() != old
    assert "--overwrite" not in (tmp_path / "out.jsonl.work" / "submit.sh").read_text()


SLURM_RECIPE = """
pipeline = { prefix = "data" }
step = [
  { run = "merge" },
  { run = "shuffle", name = "mix" },
  { run = "binarize", tokenizer-type = "WhitespaceVocab", vocab-file = "VOCAB" },
]
"""


@pytest.fixture
def recipe(tmp_path):
    """The command line of a pipeline, but for its work folder and executor."""
    (tmp_path / "words.json").write_text('{"<unk>": 0, "a": 1}')
    (tmp_path / "recipe.toml").write_text(SLURM_RECIPE.replace("VOCAB", str(tmp_path / "words.json")))
    source = documents(tmp_path / "in.jsonl")
    return ("pipeline", tmp_path / "recipe.toml", "--input", source, "--task-bytes", 80_000, "--work-dir")


def made(folder):
    return [(folder / f"data_text_document.{ending}").read_bytes() for ending in ("bin", "idx")]


@pytest.mark.complete
@pytest.mark.distributed
@pytest.mark.parametrize("emit", [False, True])
def test_pipeline_in_slurm_arrays_writes_the_same_bytes(prep, sbatch, recipe, tmp_path, emit):
    target = (*recipe, tmp_path / "slurm", "--task-count", 2)
    if emit:
        code, out, _ = prep(*target, "--emit-sbatch", tmp_path / "submit.sh")
        assert (code, "run it on a Slurm machine" in out, (sbatch / "log").exists()) == (0, True, False)
        lines = (tmp_path / "submit.sh").read_text()
        names = re.findall(r"--job-name (\S+) (?:--array 0-(\d))?", lines)
        assert names == [
            ("merge-map", "1"), ("merge-join", "0"), ("merge-finish", ""), ("mix-scatter", "1"), ("mix-order", "1"),
            ("mix-join", "0"), ("mix-finish", ""), ("binarize-tokenize", "1"), ("binarize-join", "0"),
            ("binarize-finish", ""), ("pipeline", ""),
        ]  # fmt: skip
        return
    assert prep(*recipe, tmp_path / "local")[0] == 0
    code, out, err = prep(*target, "--executor", "slurm")
    assert (code, "submitted; the last job is 110;cluster" in out) == (0, True), err
    assert made(tmp_path / "slurm") == made(tmp_path / "local")
    steps = json.loads((tmp_path / "slurm" / "pipeline-summary.json").read_text())["steps"]
    assert [(step["name"], step["reused"]) for step in steps] == [("merge", True), ("mix", True), ("binarize", True)]


@pytest.mark.complete
@pytest.mark.distributed
def test_pipeline_in_slurm_arrays_with_overwrite_replaces_outputs(prep, sbatch, recipe, tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("01-merge.jsonl.zst", "data_text_document.bin", "data_text_document.idx"):
        (folder / name).write_text("foreign")
    target = (*recipe, folder, "--task-count", 2, "--executor", "slurm")
    assert prep(*target)[0] != 0
    code, _, err = prep(*target, "--overwrite")
    assert code == 0, err + (sbatch / "log").read_text()
    assert prep(*recipe, tmp_path / "local")[0] == 0
    assert made(folder) == made(tmp_path / "local")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--task-index", 0, "--task-count", 2), "select it with --step"),
        (("--step", "other"), "its steps are merge, mix, binarize"),
        (("--executor", "slurm", "--task-count", 2000), "must be from 1 to 1000"),
        (("--step", "mix"), "cannot be read"),  # what the step before makes
    ],
)
def test_pipeline_subset_out_of_range_is_refused(prep, recipe, tmp_path, more, message):
    code, _, err = prep(*recipe, tmp_path / "work", *more)
    assert (code, message in err) == (2, True), err


@pytest.mark.complete
@pytest.mark.distributed
def test_pipeline_on_ray_writes_the_same_bytes(recipe, tmp_path):
    """In a process of its own: Ray starts threads and children that outlive a test."""
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    program = [sys.executable, "-c", "from dynmo_tools.cli import main; main()"]
    for executor in ("local", "ray"):
        command = [*program, *map(str, recipe), tmp_path / executor, "--executor", executor]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
    assert made(tmp_path / "ray") == made(tmp_path / "local")
    assert "Processed" in done.stderr


def test_remove_flags_removes_flags_with_values():
    given = ["clean", "a", "--executor", "slurm", "--seed", "1", "--emit-sbatch=x"]
    assert remove_flags(given, ("--executor", "--emit-sbatch")) == ["clean", "a", "--seed", "1"]


@pytest.mark.complete
def test_merge_parquet_input_has_all_rows(prep, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"é {n}", "n": n} for n in range(2500)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert prep("merge", tmp_path / "in.parquet", "-o", tmp_path / "out.jsonl")[0] == 0
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows


def test_full_disk_is_reported_without_output(prep, tmp_path, monkeypatch):
    import errno

    from dynmo_tools.runner import task

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = documents(tmp_path / "in.jsonl", 20)
    monkeypatch.setattr(task.os, "fsync", full)
    code, _, err = prep("shuffle", source, "-o", tmp_path / "out.jsonl")
    monkeypatch.undo()
    assert code == 1
    assert "No space left on device" in err
    assert not (tmp_path / "out.jsonl").exists()
