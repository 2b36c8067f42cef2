"""READMEs of packages are tours, whose guides have the same sections; links of documents resolve."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tables import table

PACKAGES = ("dynmo_train", "dynmo_balance", "dynmo_tools", "dynmo_ckpt")
MAX_TOUR_LINES = 200
# Guides of another form: a table of launchers with what was tested.
OTHER_FORM = ("dynmo_train/launch/README.md",)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")


def guides(package: str) -> list[Path]:
    """The READMEs in the folders of a package."""
    return [path for path in documents() if path.name == "README.md" and (ROOT / package) in path.parent.parents]


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def without_code(text: str) -> str:
    """A document without blocks and inline code, where brackets do not make links."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a document, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        plain = LINK.sub(lambda match: match.group(0)[1:].partition("]")[0], heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a document whose file or heading does not exist."""
    broken = []
    for target in LINK.findall(without_code(text)):
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = path.parent / name if name else path
        missing_heading = anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8"))
        if not file.exists() or missing_heading:
            broken.append(target)
    return broken


@table("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_of_documents_resolve(path):
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("target", ["missing.md", "README.md#missing-heading", "#missing-heading"])
def test_broken_links_are_found(target):
    path = ROOT / "dynmo_train" / "data" / "README.md"
    assert broken_links(path, f"see [a guide]({target})") == [target]
    assert broken_links(path, "see [a guide](../README.md#guides), `[not](a.link)`") == []


def tour_faults(text: str) -> list[str]:
    """What the README of a package lacks as a tour."""
    sections = re.split(r"^## ", text, flags=re.M)
    found = [f"{len(text.splitlines())} lines"] if len(text.splitlines()) > MAX_TOUR_LINES else []
    if len(sections) < 2 or not sections[1].startswith("Code map\n"):
        found.append("the first section must be the code map")
    elif not re.search(r"^\| folder \| contents \| (start|begin) (at|with) \|$", sections[1], re.M):
        found.append("the code map needs a table of folders, contents and where to start")
    elif "->" not in sections[1] and "\n   | " not in sections[1]:
        found.append("the code map needs the path of the main data")
    return found


def guide_faults(text: str) -> list[str]:
    """What a guide lacks: sections, and an example with its output."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    sections = {*headings, *(["Code"] if "| module | contents |" in text else [])}
    found = [f"no section {name}" for name in ("Main options", "Limits", "Code") if name not in sections]
    if not any(heading.startswith("Example: ") for heading in headings):
        found.append("no section Example")
    if not re.search(r"```bash\n(?:.*\n)+?```\n\n(?:.+\n+)*?```text\n", text):
        found.append("an example needs its output")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_readme_of_package_is_a_tour(package):
    assert tour_faults((ROOT / package / "README.md").read_text(encoding="utf-8")) == []


@table(
    ("package", "path"),
    [(package, path) for package in PACKAGES for path in guides(package)],
    ids=lambda value: value if isinstance(value, str) else value.parent.name,
)
def test_guide_is_linked_from_the_tour_and_is_complete(package, path):
    tour = (ROOT / package / "README.md").read_text(encoding="utf-8")
    assert f"]({path.relative_to(ROOT / package)})" in tour
    if str(path.relative_to(ROOT)) not in OTHER_FORM:
        assert guide_faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_guides(package):
    assert len(guides(package)) >= 4


MAP = "# Tour\n\n## Code map\n\n| folder | contents | start at |\n|---|---|---|\n\na -> b\n"


@pytest.mark.parametrize(
    "text",
    [
        MAP + "line\n" * 200,
        MAP.replace("## Code map", "## Commands\n\n## Code map"),
        MAP.replace("| folder | contents | start at |", "| folder | contents |"),
        MAP.replace("->", "to"),
        "# Tour\n",
    ],
)
def test_readme_of_another_form_is_found(text):
    assert tour_faults(MAP) == []
    assert len(tour_faults(text)) == 1


@pytest.mark.parametrize("cut", ["## Main options", "## Limits", "| module | contents |", "## Example: a", "```text"])
def test_guide_without_a_section_is_found(cut):
    example = "## Example: a\n\n```bash\nls\n```\n\n```text\nx\n```\n\n"
    text = example + "## Main options\n\n## Limits\n\n| module | contents |\n"
    assert guide_faults(text) == []
    assert len(guide_faults(text.replace(cut, ""))) == 1
