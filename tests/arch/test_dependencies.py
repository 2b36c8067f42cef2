"""The extras of the distribution and ``constraints.txt``."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

from packaging.requirements import Requirement

from tests.paths import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TESTED = ("all", "datasets", "dev", "fp8", "gguf", "mlflow", "parquet", "quickstart", "ray", "remote", "wandb")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonical(line.partition("==")[0]) for line in lines if not line.startswith("#")}


def required(extras: tuple[str, ...]) -> set[str]:
    """Names of all distributions that these extras install, as far as they are installed here."""
    left = [Requirement(f"dynmo-toolkit[{','.join(extras)}]")]
    visited: set[tuple[str, frozenset[str]]] = set()
    while left:
        requirement = left.pop()
        key = (canonical(requirement.name), frozenset(requirement.extras))
        if key in visited:
            continue
        try:
            requires = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        visited.add(key)
        for each in map(Requirement, requires):
            names = ["", *requirement.extras]
            if each.marker is None or any(each.marker.evaluate({"extra": name}) for name in names):
                left.append(each)
    return {name for name, _ in visited} - {"dynmo-toolkit"}


def test_constraints_pin_every_package_that_the_tests_use():
    assert required(TESTED) - pinned() == set()


def test_bin_test_installs_the_extras_that_constraints_are_made_of():
    assert f"\nextras={','.join(TESTED)}\n" in (ROOT / "bin" / "test").read_text()
    assert f"[{','.join(TESTED)}]" in (ROOT / "bin" / "constraints").read_text()


def test_all_leaves_out_ray_and_pyarrow():
    assert {"ray", "pyarrow"} & required(("all",)) == set()
    assert {"torch", "tokenizers", "datasketch", "transformers"} <= required(("all",))


def test_quickstart_leaves_out_what_it_does_not_use():
    unused = {"mwparserfromhell", "publicsuffixlist", "sentencepiece", "gigatoken", "isal", "pytest", "mypy", "ray"}
    assert unused & required(("quickstart",)) == set()
