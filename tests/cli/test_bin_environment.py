"""``bin/environment.sh``: interpreters that it accepts, extras that it installs, environments of the old name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.complete

SCRIPT = Path(__file__).parents[2] / "bin" / "environment.sh"
# An interpreter of another version: it prints its version, creates an empty environment, and records the calls of pip.
STAND_IN = """#!/bin/sh
case "$1" in
  --version) echo "Python $VERSION" ;;
  -c) exec "$REAL" -c "import sys; sys.version_info = tuple(map(int, '$VERSION'.split('.'))); exec(sys.argv[1])" "$2" ;;
  -m) if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; else echo "$@" >> "$NOTES"; fi ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    """Source the script with an interpreter of a version: exit code, errors, calls of pip."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(version, extras=""):
        notes = tmp_path / "notes"
        notes.write_text("")
        own = {"PYTHON": str(python), "VERSION": version, "REAL": sys.executable, "NOTES": str(notes)}
        environment = {**os.environ, **own, "DYNMO_VENV": str(tmp_path / "venv")}
        environment.pop("DYNMO_SETUP", None)
        done = subprocess.run(
            ["bash", "-eu", "-c", f"source {SCRIPT} {extras}"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr, notes.read_text().splitlines()

    return run


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_environment_unsupported_python_is_refused_before_pip(set_up, version):
    code, err, pip = set_up(version)
    assert code == 2
    assert f"needs Python 3.11 to 3.13; set PYTHON to one (found: Python {version})" in err
    assert pip == []


@pytest.mark.parametrize("version", ["3.11.0", "3.12.1", "3.13.9"])
def test_environment_supported_python_installs_the_project(set_up, version):
    code, err, pip = set_up(version)
    assert (code, len(pip)) == (0, 2), err
    assert "setuptools" in pip[0]
    assert "--no-build-isolation" in pip[1]
    assert "--editable" in pip[1]


def test_environment_distribution_of_the_old_name_is_uninstalled(set_up, tmp_path):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "dynmo-0.1.0.dist-info").mkdir(parents=True)
    code, err, pip = set_up("3.11.7")
    assert code == 0, err
    assert "pip uninstall --yes dynmo" in pip[0]
    assert "--editable" in pip[-1]


def test_environment_distribution_of_the_new_name_is_not_removed(set_up, tmp_path):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "dynmo_toolkit-0.1.0.dist-info").mkdir(parents=True)
    assert not [line for line in set_up("3.11.7")[2] if "uninstall" in line]


def extras_of(calls):
    """The extras that each editable installation among the calls of pip asks for."""
    return [re.search(r"--editable \S*\[(.*?)\]", line)[1] for line in calls if "--editable" in line]


def test_environment_with_some_extras_installs_the_missing_ones(set_up, tmp_path):
    assert extras_of(set_up("3.11.7", "quickstart")[2]) == ["quickstart"]
    assert set_up("3.11.7", "quickstart")[2] == []
    assert extras_of(set_up("3.11.7", "all,dev,quickstart")[2]) == ["all,dev"]
    assert set_up("3.11.7", "dev")[2] == []
    assert (tmp_path / "venv" / ".dynmo-installed").read_text().split() == ["quickstart", "all", "dev"]


def test_environment_updates_every_extra_after_a_change_of_the_pins(set_up, tmp_path):
    set_up("3.11.7", "quickstart")
    os.utime(tmp_path / "venv" / ".dynmo-installed", (0, 0))
    assert extras_of(set_up("3.11.7", "ray")[2]) == ["quickstart,ray"]
