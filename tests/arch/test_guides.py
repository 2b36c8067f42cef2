"""Guides of dynmo_train: each is linked from the tour and has the same sections; links of documents resolve."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "dynmo_train"
TOUR = (PACKAGE / "README.md").read_text(encoding="utf-8")
GUIDES = [
    PACKAGE / path
    for path in (
        "data/README.md",
        "models/README.md",
        "parallel/README.md",
        "pipeline/README.md",
        "optim/README.md",
        "dynamics/README.md",
        "trainer/rebalance/README.md",
        "optim/compression/README.md",
        "trainer/checkpoint/README.md",
        "trainer/monitoring/README.md",
        "evaluation/README.md",
    )
]
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")


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


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_of_documents_resolve(path):
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("target", ["missing.md", "README.md#missing-heading", "#missing-heading"])
def test_broken_links_are_found(target):
    path = PACKAGE / "data" / "README.md"
    assert broken_links(path, f"see [a guide]({target})") == [target]
    assert broken_links(path, "see [a guide](../README.md#guides), `[not](a.link)`") == []


def test_tour_has_at_most_200_lines():
    assert len(TOUR.splitlines()) <= 200


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_guide_is_linked_from_the_tour_and_is_complete(path):
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    assert f"]({path.relative_to(PACKAGE)})" in TOUR
    assert {"Main options", "Limits", "Code"} <= {*headings, *(["Code"] if "| module | contents |" in text else [])}
    assert any(heading.startswith("Example: ") for heading in headings)
    assert re.search(r"```bash\n(?:.*\n)+?```\n\n(?:.+\n+)*?```text\n", text), "an example needs its output"
