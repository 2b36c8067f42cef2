"""An outside package, from a section of CONTRIBUTING.md: its files, its entry points, an environment that imports it.

A section shows each file of the package as a fenced block whose info string ends in the file's name
(```` ```toml pyproject.toml ````, ```` ```python my_module.py ````). ``install`` writes what an installer would write:
the modules and a ``.dist-info`` folder with the entry points. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+) ([\w./-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def contributing_section(heading: str) -> str:
    """The text of CONTRIBUTING.md under ``heading``, up to the next heading of the same or a higher level."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = [match.span() for match in re.finditer(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)]
    headings = [m for m in _HEADING.finditer(text) if not any(begin < m.start() < end for begin, end in code)]
    found = next(match for match in headings if match[2] == heading)
    after = [m for m in headings if m.start() > found.start() and len(m[1]) <= len(found[1])]
    return text[found.end() : after[0].start() if after else len(text)]


def section_files(heading: str) -> dict[str, str]:
    """The files that a section of CONTRIBUTING.md shows: name -> text."""
    files = {name: text for _, name, text in _BLOCK.findall(contributing_section(heading))}
    if "pyproject.toml" not in files:
        raise ValueError(f"the section {heading!r} of CONTRIBUTING.md shows no pyproject.toml")
    return files


def install(target: Path, files: dict[str, str]) -> Path:
    """Write a package as ``pip install --target`` would, entry points included; returns ``target``."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    name, version = project["name"], project["version"]
    for file, text in files.items():
        if file != "pyproject.toml":
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (target / file).write_text(text, encoding="utf-8")
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = project.get("entry-points", {}).items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def install_section(heading: str, target: Path) -> Path:
    """Install the package that a section of CONTRIBUTING.md shows."""
    return install(target, section_files(heading))


def environment(target: Path, **more: str) -> dict[str, str]:
    """The environment of a process that imports the packages installed at ``target``, this project first."""
    paths = [str(ROOT), str(target), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}
