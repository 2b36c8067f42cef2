"""The filter of CONTRIBUTING.md, from an installed outside package: command, recipe, workers, resume, errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.extensions.outside_package import contributing_section, environment, install, install_section, section_files

PREP = [sys.executable, "-c", "from dynmo_tools.cli import main; main()"]
TEXTS = ["a plain text", "the casino is a casino", "write to me@site.org", "one casino only"]
RECIPE = """
[pipeline]
prefix = "corpus"

[[step]]
run = "drop-keywords"
keyword = ["casino"]

[[step]]
run = "shuffle"
"""


@pytest.fixture
def prep(tmp_path):
    """Run dynmo-prep in ``tmp_path`` with the packages installed in ``packages``: exit code, stdout, stderr."""

    def run(*arguments, packages=tmp_path / "packages"):
        done = subprocess.run(
            [*PREP, *map(str, arguments)],
            cwd=tmp_path,
            env=environment(packages),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def corpus(tmp_path):
    """A corpus of four documents, with the package of CONTRIBUTING.md installed."""
    install_section("A filter", tmp_path / "packages")
    rows = [json.dumps({"text": text, "number": number}) for number, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outside_filter_has_command_options_and_help(prep, corpus):
    code, out, err = prep("--help")
    assert (code, err) == (0, "")
    assert "drop-keywords Drop documents that contain a keyword" in " ".join(out.split())
    code, out, _ = prep("drop-keywords", "--help")
    assert code == 0
    for option in ("--keyword", "--min-count", "--save-dropped", "--json-key", "--workers", "--executor"):
        assert option in out


@pytest.mark.complete
def test_commands_of_the_section_run_as_written(prep, corpus):
    section = contributing_section("A filter")
    (command,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    program, *arguments = shlex.split(command)
    code, _, err = prep(*arguments)
    assert (program, code) == ("dynmo-prep", 0), err
    (step,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    (corpus / "recipe.toml").write_text(step)
    code, _, err = prep("pipeline", "recipe.toml", "--input", "corpus.jsonl")
    assert code == 0, err


@pytest.mark.complete
def test_outside_filter_runs_in_workers_with_counts_and_dropped_rows(prep, corpus):
    options = ("--keyword", "casino", "--min-count", 2, "--save-dropped", "dropped.jsonl", "--format", "json")
    code, out, err = prep(
        "drop-keywords", "corpus.jsonl", "-o", "kept.jsonl", *options, "--workers", 2, "--task-bytes", 40
    )
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["documents_in"], summary["documents_out"], summary["changed"]) == (4, 3, 1)
    assert summary["dropped"] == {"keyword": 1}
    assert [row["text"] for row in rows_of(corpus / "kept.jsonl")] == [TEXTS[0], "write to EMAIL", TEXTS[3]]
    assert [row["number"] for row in rows_of(corpus / "dropped.jsonl")] == [1]
    manifest = json.loads((corpus / "kept.jsonl.work" / "manifest.json").read_text())
    assert manifest["settings"]["keyword"] == ["casino"]
    assert len(manifest["tasks"]) > 1
    assert "drop-keywords: done" in prep("status", "kept.jsonl.work")[1]


@pytest.mark.complete
def test_outside_filter_resumes_from_its_task_markers(prep, corpus):
    arguments = ("drop-keywords", "corpus.jsonl", "-o", "kept.jsonl", "--keyword", "casino", "--task-bytes", 40)
    assert prep(*arguments, "--phase", "map", "--task-index", 0, "--task-count", 2)[0] == 0
    code, _, err = prep(*arguments)
    assert (code, "resumed: " in err) == (0, True), err
    assert [row["number"] for row in rows_of(corpus / "kept.jsonl")] == [0, 2]


def test_run_is_not_resumed_with_another_version_of_the_package(prep, corpus):
    arguments = ("drop-keywords", "corpus.jsonl", "-o", "kept.jsonl", "--keyword", "casino", "--task-bytes", 40)
    assert prep(*arguments, "--phase", "map", "--task-index", 0, "--task-count", 2)[0] == 0
    files = section_files("A filter")
    files["pyproject.toml"] = files["pyproject.toml"].replace('"1.0"', '"2.0"')
    newer = install(corpus / "newer", files)
    code, _, err = prep(*arguments, packages=newer)
    assert (code, "other settings or inputs" in err) == (2, True), err


@pytest.mark.complete
def test_outside_filter_is_a_step_of_recipes(prep, corpus):
    (corpus / "recipe.toml").write_text(RECIPE)
    arguments = ("pipeline", "recipe.toml", "--input", "corpus.jsonl", "--work-dir", "data", "--format", "json")
    code, out, err = prep(*arguments, "--set", "drop-keywords.min-count=2")
    assert code == 0, err
    first, second = json.loads(out)["steps"]
    assert (first["step"], first["dropped"], second["documents_in"]) == ("drop-keywords", {"keyword": 1}, 3)
    code, out, _ = prep(*arguments, "--set", "drop-keywords.min-count=2")
    assert [step["reused"] for step in json.loads(out)["steps"]] == [True, True]
    code, _, err = prep(*arguments, "--set", "drop-keywords.colour=red")
    assert (code, "unknown key 'colour'" in err) == (2, True), err


def broken(folder, module, name="drop-keywords"):
    """Install a package whose filter module is ``module``."""
    points = f'[project.entry-points."dynmo_tools.filters"]\n{name} = "broken_filter:Broken"\n'
    project = '[project]\nname = "broken-package"\nversion = "0.3"\n'
    return install(folder / "broken", {"pyproject.toml": f"{project}\n{points}", "broken_filter.py": module})


CLASS = """
from dataclasses import dataclass
from dynmo_tools.filters.base import DocumentFilter, FilterResult, FilterSettings, setting

@dataclass(frozen=True, kw_only=True)
class Settings(FilterSettings):
    \"\"\"Break.\"\"\"
    FIELD

class Broken(DocumentFilter):
    settings_type = Settings

    def apply(self, text, document):
        return FilterResult(text=text.missing())
"""


@pytest.mark.complete
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("Other = 1", "AttributeError"),
        ("class Broken: pass", "not a subclass of dynmo_tools.filters.base.DocumentFilter"),
        (CLASS.replace("FIELD", "size: int = 3"), "must be made by setting"),
        (CLASS.replace("FIELD", "workers: int = setting(1, help='x')"), "is an option of every step"),
    ],
)
def test_broken_filter_names_its_package_and_leaves_other_commands(prep, corpus, module, reason):
    packages = broken(corpus, module)
    code, out, err = prep("drop-keywords", "corpus.jsonl", "-o", "kept.jsonl", "--keyword", "a", packages=packages)
    assert (code, out, "Traceback" in err) == (2, "", False), err
    assert "filter 'drop-keywords' of the package broken-package 0.3 cannot be loaded" in err
    assert reason in err
    assert "Unavailable: filter 'drop-keywords' of the package broken-package 0.3" in " ".join(
        prep("drop-keywords", "--help", packages=packages)[1].split()
    )
    assert prep("merge", "corpus.jsonl", "-o", "merged.jsonl", packages=packages)[0] == 0
    (corpus / "recipe.toml").write_text(RECIPE)
    code, _, err = prep("pipeline", "recipe.toml", "--input", "corpus.jsonl", packages=packages)
    assert (code, "broken-package 0.3 cannot be loaded" in err) == (2, True), err


@pytest.mark.complete
def test_filter_that_raises_names_package_and_document(prep, corpus):
    packages = broken(corpus, CLASS.replace("FIELD", ""))
    code, _, err = prep("drop-keywords", "corpus.jsonl", "-o", "kept.jsonl", packages=packages)
    assert (code, "Traceback" in err) == (1, False), err
    assert "corpus.jsonl" in err
    assert "filter 'drop-keywords' of the package broken-package 0.3 raised AttributeError" in err


@pytest.mark.complete
@pytest.mark.parametrize("name", ["clean", "status"])
def test_filter_whose_name_is_taken_is_ignored_with_a_warning(prep, corpus, name):
    packages = broken(corpus, CLASS.replace("FIELD", ""), name=name)
    code, out, err = prep(name, "--help", packages=packages)
    assert (code, "Break." in out) == (0, False)
    assert f"warning: filter '{name}' of the package broken-package 0.3 is ignored" in err
