"""What holds between the four packages: no imports across, shared files equal."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_another(package):
    others = set(PACKAGES) - {package}
    crossing = {
        str(path.relative_to(ROOT)): sorted(others & imported_modules(path))
        for path in (ROOT / package).rglob("*.py")
        if others & imported_modules(path)
    }
    assert crossing == {}


def test_generated_files_are_up_to_date():
    command = [sys.executable, str(ROOT / "bin" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_generator_names_a_file_that_was_edited(tmp_path):
    """On a copy: an edited copy and an edited schema are both out of date."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(re.compile(r"bin/(generate\.py|shared/)|dynmo_\w+/").match, listed.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    errors = tmp_path / "dynmo_ckpt/_common/errors.py"
    errors.write_text(errors.read_text(encoding="utf-8") + "EXIT_OTHER = 9\n", encoding="utf-8")
    schema = tmp_path / "dynmo_train/formats/run.schema.json"
    schema.write_text(schema.read_text(encoding="utf-8").replace('"minimum": 1', '"minimum": 2'), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "bin/generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "out of date: dynmo_ckpt/_common/errors.py",
        "out of date: dynmo_train/formats/run_fields.py",
    ]
    assert done.returncode == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_longer_than_600_lines(package):
    long = {
        str(path): count
        for path in (ROOT / package).rglob("*.py")
        if (count := path.read_text(encoding="utf-8").count("\n")) > 600
    }
    assert long == {}


UNBOUNDED_PARSERS = {
    "dynmo_tools/io/jsonl.py": "rows, by orjson, which bounds the depth itself",
    "dynmo_tools/io/json_edit.py": "keys of rows, which are strings",
    "dynmo_tools/dedup/doc_ids.py": "parts that this program wrote",
    "dynmo_tools/decontaminate/steps.py": "parts that this program wrote",
    "dynmo_train/parallel/process_groups.py": "messages between processes of a run",
    "dynmo_balance/formats/plan.py": "what was encoded just before",
    "dynmo_train/formats/step_digests.py": "what was encoded just before",
    "dynmo_train/formats/run.py": "what was encoded just before",
    "dynmo_ckpt/formats/checkpoint.py": "what was encoded just before",
}


def test_documents_are_parsed_by_the_bounded_reader():
    calls = re.compile(r"\b(?:json|orjson|tomllib|yaml)\.(?:safe_)?loads?\(")
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "document.py" and calls.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(UNBOUNDED_PARSERS)
