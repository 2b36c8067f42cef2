"""The wheel installed without extras, in an environment without torch and other optional modules."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cli import object_store
from tests.unit.dynmo_ckpt import native_checkpoints

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")
BASE = ("numpy", "typer", "rich")
OPTIONAL = ("torch", "tokenizers", "safetensors", "ftfy", "langdetect", "datasketch", "orjson", "transformers")
FIXTURES = ROOT / "tests" / "contracts" / "fixtures"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]


def run(*command, cwd, check=True):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def requirements_of(extra):
    """The distributions that one extra of the project asks for, with those of the extras that it names."""
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "dynmo-toolkit":
            for inner in requirement.extras:
                yield from requirements_of(inner)
        else:
            yield requirement.name


def needed(names):
    """These distributions and all that they need, in the environment that runs the tests."""
    found, left = {}, [(name, "") for name in names]
    while left:
        name, extra = left.pop()
        distribution = importlib.metadata.distribution(name)
        if (distribution.name, extra) in found:
            continue
        found[distribution.name, extra] = distribution
        for each in map(Requirement, distribution.requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                left += [(each.name, inner) for inner in ("", *each.extras)]
    return list({distribution.name: distribution for distribution in found.values()}.values())


def link(distribution, site_packages):
    """Make the files of an installed distribution, and no others, importable from another environment."""
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        # A namespace package, such as google, has parts of several distributions.
        if not (site_packages / name).is_symlink():
            (site_packages / name).symlink_to(distribution.locate_file(name))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    found = [each.version for each in importlib.metadata.distributions(name="setuptools")][:1]
    if not found or int(found[0].partition(".")[0]) < 77:
        pytest.skip(f"the wheel is built by this environment's setuptools, 77 or newer; found {found or 'none'}")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    return next(folder.glob("dynmo_toolkit-*.whl"))


def install(wheel, home, distributions, extra=""):
    """The ``bin`` of a new environment that holds the wheel and these distributions: pip finds nothing missing."""
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    site_packages = next((home / "venv" / "lib").glob("python*/site-packages"))
    for distribution in distributions:
        link(distribution, site_packages)
    python = home / "venv" / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-index", f"{wheel}{extra}", cwd=home)
    return python.parent


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The programs of the wheel without extras."""
    return install(wheel, tmp_path_factory.mktemp("installed"), needed(BASE))


def test_wheel_has_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(PACKAGES)}
    there = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    assert packed == {path.as_posix() for path in there if "__pycache__" not in path.parts}


def test_wheel_optional_modules_are_absent(programs, tmp_path):
    text = f"import importlib.util as u; print([name for name in {OPTIONAL!r} if u.find_spec(name)])"
    assert run(programs / "python", "-c", text, cwd=tmp_path).stdout == "[]\n"
    where = run(programs / "python", "-c", "import dynmo_balance; print(dynmo_balance.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(programs.parent))


@pytest.mark.parametrize("program", ["dynmo-prep", "dynmo-train", "dynmo-plan", "dynmo-ckpt"])
def test_wheel_every_program_has_help(programs, tmp_path, program):
    done = run(programs / program, "--help", cwd=tmp_path)
    assert f"Usage: {program}" in done.stdout
    assert done.stderr == ""


def test_wheel_planner_without_extras_writes_a_plan(programs, tmp_path):
    profile = FIXTURES / "profile" / "valid" / "events.jsonl"
    plan = (programs / "dynmo-plan",)
    steps = json.loads(run(*plan, "what-if", profile, "--format", "json", cwd=tmp_path).stdout)
    assert len(steps["rows"]) > 2
    run(*plan, "partition", profile, "--stages", 2, "-o", tmp_path / "plan.json", cwd=tmp_path)
    stages = json.loads((tmp_path / "plan.json").read_text())["stages"]
    assert [stage["worker"] for stage in stages] == [0, 1]
    assert "exact" in run(*plan, "compare", profile, cwd=tmp_path).stdout
    run(*plan, "report", profile, "-o", tmp_path / "report.html", cwd=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The MIT License (MIT)" in page  # of the library within the page
    assert "var uPlot=" in page
    # Every command of the planner, not only these, is free of the extras.
    text = (
        "import pkgutil, dynmo_balance as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'dynmo_balance.'):\n"
        "    if module.name != 'dynmo_balance.__main__':\n"
        "        __import__(module.name)\n"
    )
    run(programs / "python", "-c", text, cwd=tmp_path)


def test_wheel_ckpt_inspects_verifies_and_exports(programs, tmp_path):
    """What dynmo-ckpt does with native and Hugging Face checkpoints needs nothing but the base."""
    model = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "in", native_checkpoints.parameters(model), model)
    ckpt = (programs / "dynmo-ckpt",)
    assert str(model["num_layers"]) in run(*ckpt, "info", "in", cwd=tmp_path).stdout
    assert "ok" in run(*ckpt, "verify", "in", cwd=tmp_path).stdout
    run(*ckpt, "convert", "in", "out", "--to", "hf", cwd=tmp_path)
    run(*ckpt, "convert", "out", "back", "--to", "native", cwd=tmp_path)
    assert run(*ckpt, "diff", "in", "back", cwd=tmp_path).stdout == "no tensor differs\n"


TRAIN = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --vocab-size 9 --train-iters 1 --lr 1"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("dynmo-prep clean in.jsonl -o out.jsonl", "prep"),
        ("dynmo-prep dedup in.jsonl -o out.jsonl", "prep"),
        ("dynmo-prep shuffle in.jsonl -o out.jsonl", "prep"),
        ("dynmo-prep train-tokenizer in.jsonl -o out.json", "prep"),
        ("dynmo-prep binarize in.jsonl -o out --tokenizer-model t.json", "prep"),
        ("dynmo-prep pipeline quickstart --input in.jsonl", "prep"),
        ("dynmo-prep blacklist-urls in.txt -o out.txt", "prep"),
        (f"dynmo-train pretrain gpt {TRAIN} --micro-batch-size 1 --data-path in", "train"),
        ("dynmo-train generate --load nowhere --prompt x", "train"),
        ("dynmo-train launch local --nproc 1 -- pretrain gpt", "train"),
    ],
)
def test_wheel_missing_extra_is_named(programs, tmp_path, command, extra):
    (tmp_path / "in.jsonl").write_text('{"text": "a document"}\n')
    (tmp_path / "in.txt").write_text("https://example.org/a\n")
    (tmp_path / "t.json").write_text('{"model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}}}')
    program, *words = command.split()
    done = run(programs / program, *words, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert f"is not installed; run: pip install 'dynmo-toolkit[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


SAMPLE = """\
dynmo-prep sample-corpus --output corpus.jsonl
dynmo-prep train-tokenizer corpus.jsonl -o tokenizer.json --vocab-size 400
dynmo-prep binarize corpus.jsonl -o corpus --tokenizer-model tokenizer.json --append-eod
"""
PRETRAIN = f"dynmo-train pretrain gpt {TRAIN} --micro-batch-size 1 --data-path corpus_text_document --save run"
TRACKED = PRETRAIN.replace("--vocab-size 9", "--vocab-size 400").replace("--save run", "--save tracked")
STREAMED = PRETRAIN.replace("--vocab-size 9", "--vocab-size 400").replace(
    "--data-path corpus_text_document --save run",
    "--hf-dataset corpus.jsonl --tokenizer-model tokenizer.json --eval-iters 0 --save streamed",
)
FLOAT8 = TRACKED.replace("--hidden-size 8", "--hidden-size 16").replace("--save tracked", "--bf16 --fp8 --save float8")
# What a user of one extra does with it alone. Compressed input and Parquet are additions to prep.
USES = {
    "prep": SAMPLE,
    "prep,gz": "gzip corpus.jsonl\ndynmo-prep shuffle corpus.jsonl.gz -o shuffled.jsonl",
    "prep,parquet": "dynmo-prep shuffle corpus.parquet -o shuffled.jsonl",
    "train": PRETRAIN.replace("--vocab-size 9", "--vocab-size 400"),
    "train,wandb": f"{TRACKED} --wandb-project a\nls tracked/wandb/latest-run/files",
    "train,mlflow": f"{TRACKED} --mlflow-experiment a --mlflow-tracking-uri file:store\nls tracked/mlflow.json store",
    "train,datasets": f"{STREAMED}\nls streamed/checkpoints",
    "train,fp8": f"{FLOAT8}\nls float8/checkpoints",
    "ckpt": "dynmo-ckpt convert run hf --to hf\ndynmo-ckpt convert hf back --to native\ndynmo-ckpt verify back",
    "hf": "dynmo-ckpt convert run hf --to hf",
    "gguf": "dynmo-ckpt convert run packed --to gguf\nls packed/model.gguf",
    # An S3 server of the tests answers.
    "remote": "dynmo-ckpt copy run s3://bucket/run\ndynmo-ckpt info s3://bucket/run",
    "gs": "dynmo-ckpt copy --help",
    "fuzz": "dynmo-train --help",
    "lm-eval": "dynmo-train evaluate lm-eval --help",
    "ray": "dynmo-prep --help",
}


@pytest.fixture(scope="module")
def used(wheel, tmp_path_factory):
    """A data set and a checkpoint that the programs of this environment made: input of each extra."""
    folder = tmp_path_factory.mktemp("used")
    for line in (*SAMPLE.splitlines(), PRETRAIN.replace("--vocab-size 9", "--vocab-size 400")):
        program, *words = line.split()
        run(Path(sys.executable).parent / program, *words, cwd=folder)
    return folder


def test_uses_has_every_extra():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    # apex is empty, dev and peers are for the tests; CI installs the others
    combined = {"all", "quickstart", "dev", "peers", "apex"}
    assert {extra for extras in USES for extra in extras.split(",")} >= extras - combined


@pytest.mark.parametrize("extras", USES)
def test_wheel_each_extra_alone_is_enough(wheel, used, tmp_path, monkeypatch, extras):
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        distributions = needed([*BASE, *(name for extra in extras.split(",") for name in requirements_of(extra))])
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"the extra {extras} is not installed in this environment: {error}")
    programs = install(wheel, tmp_path, distributions, f"[{extras}]")
    work = tmp_path / "work"
    shutil.copytree(used, work)
    if "parquet" in extras:
        import pyarrow
        import pyarrow.parquet

        rows = [json.loads(line) for line in (work / "corpus.jsonl").read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), work / "corpus.parquet")
    if extras == "prep":
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if extras == "train":
        shutil.rmtree(work / "run")
    with contextlib.ExitStack() as stack:
        if extras == "remote":
            store = stack.enter_context(object_store.object_store("s3"))
            for name, value in store.environment().items():
                monkeypatch.setenv(name, value)
        for line in USES[extras].splitlines():
            program, *words = line.split()
            run(programs / program if program.startswith("dynmo-") else program, *words, cwd=work)


def test_sdist_gives_the_same_wheel(wheel, tmp_path):
    """The source distribution has all that the build needs, and no more than the packages and the root files."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone: the files are listed by git")
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    program = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", program, tmp_path, cwd=source)
    (sdist,) = tmp_path.glob("dynmo_toolkit-*.tar.gz")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "again", sdist, cwd=tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")

    def contents(path):
        with zipfile.ZipFile(path) as archive:
            return {each.filename: each.CRC for each in archive.infolist() if ".dist-info/" not in each.filename}

    assert contents(again) == contents(wheel)


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert {importlib.import_module(name).__version__ for name in PACKAGES} == {project}
    assert citation[1] == project


def tracked_texts():
    names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name != "CHANGELOG.md" and (ROOT / name).is_file():
            yield name, (ROOT / name).read_bytes().decode("utf-8", "replace")


def test_documents_do_not_install_the_unrelated_package_dynmo():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone: the files are listed by git")
    wrong = re.compile(r"""pip install (?:\S+ )*['"]?dynmo(?![-\w])|['"]dynmo\[""")
    assert [name for name, text in tracked_texts() if wrong.search(text)] == []


def test_distribution_metadata_has_name_and_classifiers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "dynmo-toolkit"
    assert project["requires-python"] == ">=3.11,<3.14"
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    (torch,) = (each for each in project["optional-dependencies"]["train"] if each.startswith("torch"))
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is not None
    specifier = Requirement(torch).specifier
    assert specifier.contains(pinned[1])
    assert not specifier.contains("2.14.0")
    assert all(Requirement(each).name == "dynmo-toolkit" for each in project["optional-dependencies"]["all"])
