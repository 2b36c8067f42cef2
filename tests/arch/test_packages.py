"""What holds between the four packages: no imports across, shared files equal, light commands stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynmo_tools", "dynmo_train", "dynmo_balance", "dynmo_ckpt")
SHARED = ("_common/__init__.py", "_common/console.py", "_common/errors.py", "_common/document.py")


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


@pytest.mark.parametrize("name", SHARED)
def test_shared_files_are_byte_identical(name):
    assert len({(ROOT / package / name).read_bytes() for package in PACKAGES}) == 1


@pytest.mark.parametrize(
    "pair",
    [
        ("dynmo_ckpt/io/crc32.py", "dynmo_train/checkpoint/crc32.py"),
        ("dynmo_tools/_common/portable.py", "dynmo_ckpt/_common/portable.py"),
        ("dynmo_tools/_common/portable.py", "dynmo_train/_common/portable.py"),
        ("dynmo_balance/formats/profile_lines.py", "dynmo_train/formats/profile_lines.py"),
    ],
)
def test_what_two_packages_need_is_byte_identical(pair):
    first, second = pair
    assert (ROOT / first).read_bytes() == (ROOT / second).read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_longer_than_600_lines(package):
    long = {
        str(path): count
        for path in (ROOT / package).rglob("*.py")
        if (count := path.read_text(encoding="utf-8").count("\n")) > 600
    }
    assert long == {}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("dynmo_tools", ("torch", "transformers", "datasketch", "scipy", "ftfy", "langdetect", "tokenizers")),
        ("dynmo_balance", ("torch", "transformers", "scipy", "matplotlib")),
        ("dynmo_train", ("torch", "transformers", "scipy")),
        ("dynmo_ckpt", ("torch", "transformers", "scipy")),
    ],
)
def test_help_loads_no_heavy_module(package, forbidden):
    program = (
        "import sys\n"
        f"import {package}.cli as cli\n"
        "sys.argv = ['x', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert stop.code in (0, None), stop.code\n"
        f"print([name for name in {forbidden!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip().splitlines()[-1] == "[]"


UNBOUNDED_PARSERS = {
    "dynmo_tools/records.py": "rows, by orjson, which bounds the depth itself",
    "dynmo_tools/splicing.py": "keys of rows, which are strings",
    "dynmo_tools/names.py": "parts that this program wrote",
    "dynmo_tools/decontamination.py": "parts that this program wrote",
    "dynmo_train/parallel/world.py": "messages between processes of a run",
    "dynmo_train/launch/meeting.py": "messages between processes of a run",
    "dynmo_balance/formats/plan.py": "what was encoded just before",
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
