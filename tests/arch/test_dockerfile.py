"""The Dockerfile without a build: its base, what it copies, what it installs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def instructions():
    """Pairs of instruction and words; continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(kind):
    return [rest for name, rest in instructions() if name == kind]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_dockerfile_base_is_pinned_to_a_supported_torch():
    (default,) = of("ARG")
    assert of("FROM") == ["${BASE}"]
    match = re.fullmatch(r"BASE=pytorch/pytorch:(\d+)\.(\d+)\.\d+-cuda\d+\.\d+-cudnn\d+-devel", default)
    assert match, default
    (least,) = [line for line in project()["optional-dependencies"]["train"] if line.startswith("torch")]
    assert least == "torch>=2.11,<2.14"
    assert (int(match[1]), int(match[2])) >= (2, 11)


def test_dockerfile_copied_paths_exist_and_are_not_ignored():
    copied = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [word for line in of("COPY") for word in line.split()[:-1]]
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert {source.rstrip("/") for source in sources} == copied
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= copied


def test_dockerfile_constraints_keep_torch_and_numpy_of_the_base(tmp_path):
    """With the base's own list of packages: of what it has, only torch and numpy are pinned."""
    (install,) = [line for line in of("RUN") if "pip install" in line]
    words = shlex.split(install)
    assert words[words.index("--constraint") + 1] == "/tmp/constraints.txt"
    assert ".[all]" in words
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\nprintf '%s\\n' numpy==2.3.1 torch==2.11.0+cu128 Typing-Extensions==4.12.0\n")
    python.chmod(0o755)
    script = install.split("&& python3 -m pip install")[0].replace("/tmp/", f"{tmp_path}/")
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", script], cwd=ROOT, check=True, env=environment)
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    assert (pins.pop("torch"), pins.pop("numpy")) == ("2.11.0+cu128", "2.3.1")
    assert pins == {name: pin for name, pin in tested.items() if name not in ("torch", "numpy", "typing_extensions")}


def test_dockerfile_command_exists_and_scripts_use_the_active_environment():
    (command,) = of("CMD")
    assert command == '["dynmo-train", "--help"]'
    assert "dynmo-train" in project()["scripts"]
    assert any("DYNMO_SETUP=no" in line and "/opt/dynmo/bin" in line for line in of("ENV"))
    names = {name for name, _ in instructions()}
    assert names == {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD"}


@pytest.mark.parametrize("line", of("RUN"))
def test_dockerfile_step_that_fails_stops_the_build(line):
    subprocess.run(["bash", "-n", "-c", line], check=True)
    assert ";" not in re.sub(r"'[^']*'", "", line)
