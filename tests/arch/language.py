"""Words and names that the project does not use, each with the field's term.

    python -m tests.arch.language [PATH...]

prints every place in tracked text (default: all) where one of them occurs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.paths import ROOT

TEXT = (".json", ".jsonl", ".md", ".py", ".sbatch", ".sh", ".toml", ".txt", ".yaml-template")
LONGEST_TEST_NAME = 70

PHRASES = {
    r"(?<!\.)(?<!def )tell|tells|telling|told|say|says|saying|said": "report, log, print",
    r"speak|speaks|spoke|spoken|speaking": "report, log, print",
    r"(go|goes|going|went|gone) on(?! (the|a)\b)|begins? anew|afresh": "continue, resume, restart, from scratch",
    r"beside|one behind the other": "next to, concatenated; 'in the same run' for benchmarks",
    r"(so|as) (many|few)": "N, the number of",
    r"(stand|stands|stood|standing) still": "is paused",
    r"(give|gives|giving|given|gave) back|(give|gives|giving|given|gave) workers back": "release",
    r"(take|takes|taking|taken|took) up again": "resume",
    r"what (\w+ ){1,3}holds?": "contents of",
    r"(it|that) pays|pays": "breaks even, is worth moving",
    r"nothing to do|without meaning": "no effect; accepted for compatibility and ignored",
    r"course of the learning": "learning-rate schedule",
    r"none such|(?<!there )(is|are) no (?!(longer|more|less|better|worse|different)\b)\w+": "is not an X",
    r"words of": "format, syntax",
    r"LEAST:MOST": "MIN:MAX",
    r"(put|puts|putting) together|(take|takes|taking|taken|took) apart": "assembled, split",
    r"meet|meets|meeting|meetings": "rendezvous, satisfy",
    r"has missed": "regret",
    r"in force": "active",
    r"mend|mends|mended|mending": "fix",
    r"adopt|adopts|adopted|adopting": "load, apply",
    r"settle|settles|settled|settling": "synchronize, finish",
    r"deaf|calm|calms|calmed|shaken": "ignore, patience, perturb",
    r"dealt": "sharded",
}  # fmt: skip
CASE = {r"LEAST:MOST"}
# Pronouns, participles and metaphors, as words of identifiers.
NAME_WORD = re.compile(
    r"adopt|anew|asked|beside|calm|crew|deaf|dealt|held|kept|meeting|met|missed"
    r"|said|says|seen|settle|shaken|speaks|tells|told|wanted|wish|wishes"
)
# Text of others; the table itself and its test.
EXEMPT = {"dynmo_tools/tokenization/gpt2-merges.txt", "tests/arch/language.py", "tests/arch/test_language.py"}
# Words of a text are meant, or the name of a paper.
MEANT = (
    (re.compile(r"dynmo_tools/|tests/.*(prep|dynmo_tools|test_bin_scripts)"), "words of"),
    (re.compile(r"dynmo_balance/recipes/early-exit"), "CALM"),
)

_PATTERNS = [
    (re.compile(rf"\b(?:{pattern})\b", 0 if pattern in CASE else re.I), term) for pattern, term in PHRASES.items()
]


def phrases_in(line: str) -> Iterator[tuple[str, str]]:
    """Phrases of a line that are not used here, each with the term that replaces it."""
    for pattern, term in _PATTERNS:
        for found in pattern.finditer(line):
            yield found.group(), term


def defined_names(source: str) -> Iterator[tuple[int, str]]:
    """Names that a module defines: functions, classes, parameters, variables, attributes; with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def problem_of(name: str) -> str | None:
    """Why a name is not used here; None where it may be."""
    if name.startswith("test_") and len(name) > LONGEST_TEST_NAME:
        return f"{len(name)} characters; test names have at most {LONGEST_TEST_NAME}"
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    found = sorted(filter(NAME_WORD.fullmatch, words))
    return f"{found[0]!r} is not a term of the field" if found else None


def findings(name: str, text: str) -> Iterator[str]:
    """One line per phrase or name of a file that is not used here."""
    meant = {phrase for path, phrase in MEANT if path.match(name)}
    for number, line in enumerate(text.splitlines(), 1):
        for phrase, term in phrases_in(line.replace("_", " ")):
            if phrase not in meant:
                yield f"{name}:{number}: {phrase!r}: use {term}"
    if name.endswith(".py"):
        known = set()
        for number, identifier in defined_names(text):
            problem = problem_of(identifier)
            if problem and identifier not in known:
                known.add(identifier)
                yield f"{name}:{number}: name {identifier!r}: {problem}"


def all_findings(*paths: str) -> Iterator[str]:
    """Findings in tracked text below these paths, relative to the project (default: everything)."""
    command = ["git", "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        is_text = name.endswith(TEXT) or (name.startswith("bin/") and "." not in path.name)
        if is_text and name not in EXEMPT and path.is_file():
            yield from findings(name, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    found = list(all_findings(*sys.argv[1:]))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
