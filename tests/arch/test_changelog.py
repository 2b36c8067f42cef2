"""The changelog: dated, of the packaged version, by program, and each change once."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = re.compile(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", re.M)
PROGRAMS = {"dynmo-train", "dynmo-plan", "dynmo-prep", "dynmo-ckpt"}


def test_changelog_newest_version_is_the_packaged_one_and_dated():
    headings = re.findall(r"^## .*$", TEXT, re.M)
    versions = VERSION.findall(TEXT)
    assert len(versions) == len(headings), f"not `## VERSION (YYYY-MM-DD)`: {headings}"
    assert versions[0][0] == tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    dates = [date.fromisoformat(day) for _, day in versions]
    assert dates == sorted(dates, reverse=True)


def test_changelog_has_a_section_for_each_program_and_the_formats():
    sections = set(re.findall(r"^### (.*)$", TEXT, re.M))
    assert sections >= PROGRAMS | {"File formats"}


def test_changelog_lists_each_change_once_under_its_program():
    starts: dict[str, str] = {}
    section = ""
    for line in TEXT.splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        if not section or not line.startswith("- "):
            continue
        # Two lines that open with the same 60 characters are two drafts of one change.
        assert starts.setdefault(line[:60], line) is line, f"twice: {line[:60]}"
        named = re.match(r"- `(dynmo-\w+)", line)
        if named and section in PROGRAMS:
            assert named.group(1) == section, f"under {section}: {line[:80]}"
