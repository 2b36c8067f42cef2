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

# One letter of each phrase is in brackets, as in `grep [f]oo`: the table does not match itself.
PHRASES = {
    r"(?<!\.)(?<!def )t[e]ll|t[e]lls|t[e]lling|t[o]ld|s[a]y|s[a]ys|s[a]ying|s[a]id": "report, log, print",
    r"sp[e]ak|sp[e]aks|sp[o]ke|sp[o]ken|sp[e]aking": "report, log, print",
    r"(g[o]|g[o]es|g[o]ing|w[e]nt|g[o]ne) on(?! (the|a)\b)|an[e]w|afr[e]sh": "continue, resume, restart, from scratch",
    r"bes[i]de|one beh[i]nd the other": "next to, concatenated; 'in the same run' for benchmarks",
    r"(s[o]|a[s]) (many|few)": "N, the number of",
    r"(st[a]nd|st[a]nds|st[o]od|st[a]nding) still": "is paused",
    r"(g[i]ve|g[i]ves|g[i]ving|g[i]ven|g[a]ve) (workers )?back": "release",
    r"(t[a]ke|t[a]kes|t[a]king|t[a]ken|t[o]ok) up again": "resume",
    r"wh[a]t (\w+ ){1,3}holds?": "contents of",
    r"p[a]ys": "breaks even, is worth moving",
    r"n[o]thing to do|with[o]ut meaning": "no effect; accepted for compatibility and ignored",
    r"c[o]urse of the learning": "learning-rate schedule",
    r"n[o]ne such|(?<!there )(is|are) n[o] (?!(longer|more|less|better|worse|different)\b)\w+": "is not an X",
    r"w[o]rds of": "format, syntax",
    r"(?-i:L[E]AST:MOST)": "MIN:MAX",
    r"(p[u]t|p[u]ts|p[u]tting) together|(t[a]ke|t[a]kes|t[a]king|t[a]ken|t[o]ok) apart": "assembled, split",
    r"m[e]et|m[e]ets|m[e]eting|m[e]etings": "rendezvous, satisfy",
    r"has m[i]ssed": "regret",
    r"in f[o]rce": "active",
    r"m[e]nd|m[e]nds|m[e]nded|m[e]nding": "fix",
    r"ad[o]pt|ad[o]pts|ad[o]pted|ad[o]pting": "load, apply",
    r"s[e]ttle|s[e]ttles|s[e]ttled|s[e]ttling": "synchronize, finish",
    r"d[e]af|c[a]lm|c[a]lms|c[a]lmed|sh[a]ken": "ignore, patience, perturb",
    r"d[e]alt": "sharded",
}  # fmt: skip
# Pronouns, participles and metaphors, as parts of identifiers.
NAME_WORD = re.compile(
    r"ad[o]pt|an[e]w|ask[e]d|bes[i]de|c[a]lm|cr[e]w|d[e]af|d[e]alt|h[e]ld|k[e]pt|m[e]eting|m[e]t|m[i]ssed"
    r"|s[a]id|s[a]ys|s[e]en|s[e]ttle|sh[a]ken|sp[e]aks|t[e]lls|t[o]ld|w[a]nted|w[i]sh|w[i]shes"
)
# Text of others.
EXEMPT = {"dynmo_tools/tokenization/gpt2-merges.txt"}
# The phrase is meant literally, or is the name of a paper.
MEANT = (
    (re.compile(r"dynmo_tools/|tests/.*(prep|dynmo_tools|test_bin_scripts)"), "words" + " of"),
    (re.compile(r"dynmo_balance/recipes/early-exit"), "CA" + "LM"),
)

_PATTERNS = [(re.compile(rf"\b(?:{pattern})\b", re.I), term) for pattern, term in PHRASES.items()]
# One search of a whole text: nearly every file has no phrase at all.
_ANY_PATTERN = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.I)


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
    lines = text.splitlines() if _ANY_PATTERN.search(text.replace("_", " ")) else []
    for number, line in enumerate(lines, 1):
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
