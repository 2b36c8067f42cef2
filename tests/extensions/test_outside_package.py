"""The helper that installs the packages of CONTRIBUTING.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.extensions.outside_package import contributing_section, environment, install

pytestmark = pytest.mark.complete

CHAPTER = "Extending DynMo from your own package"
PYPROJECT = """\
[project]
name = "my-package"
version = "1.0"

[project.entry-points."some.group"]
mine = "my_module:VALUE"
"""


def test_chapter_has_a_section_for_each_extension_point():
    lines = contributing_section(CHAPTER).splitlines()
    headings = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert headings == ["A dynamic technique", "A model family", "A balancer", "A filter", "A checkpoint format"]


def test_installed_package_entry_point_is_found_and_loads(tmp_path):
    install(tmp_path, {"pyproject.toml": PYPROJECT, "my_module.py": "VALUE = 7\n"})
    program = "from importlib.metadata import entry_points as e; print([p.load() for p in e(group='some.group')])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[7]\n"
