"""Damaged documents: each parser returns or raises an error of ours, and never anything else.

A target reads bytes. Its corpus are the fixtures of its format. A mutation flips bits, cuts, repeats and splices bytes,
and puts huge and unusual numbers in place of others. ``DYNMO_FUZZ_EXAMPLES`` sets the number of mutations per target.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dynmo_balance._common.document import complete_lines, parse_json, parse_toml
from dynmo_balance._common.errors import DynmoError
from dynmo_balance.formats.plan import read_plan
from dynmo_balance.formats.profile import LineParser, read_profile
from dynmo_balance.online.profile_follower import ProfileFollower
from tests.paths import CONTRACTS

EXAMPLES = int(os.environ.get("DYNMO_FUZZ_EXAMPLES", "150"))
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
VALUES = (b"0", b"-1", b"1", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"0.5", b"null", b'""', b"[]", b"{}", b"true")


def mutate(data: bytes, corpus: list[bytes], numbers: random.Random) -> bytes:
    """A damaged copy of a document."""
    for _ in range(numbers.choice((1, 1, 2, 4))):
        at = numbers.randrange(len(data) + 1)
        kind = numbers.randrange(7)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << numbers.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + numbers.randrange(1, 40) :]
        elif kind == 2:
            data = data[:at] + data[max(0, at - numbers.randrange(1, 200)) :]
        elif kind == 3:
            other = numbers.choice(corpus)
            data = data[:at] + other[numbers.randrange(len(other) + 1) :]
        elif kind == 4:
            data = data[:at]
        else:
            found = list(NUMBER.finditer(data))
            if found:
                match = numbers.choice(found)
                data = data[: match.start()] + numbers.choice(VALUES) + data[match.end() :]
    return data


def follow(path: Path) -> None:
    follower = ProfileFollower(path)
    follower.poll()
    follower.poll()


def parse_lines(path: Path) -> None:
    parser = LineParser()
    for line in complete_lines(path.read_bytes()):
        parser.parse(line)


def expect_value_error(parse: Callable[[str], object]) -> Callable[[Path], None]:
    """The parsers of text, whose callers turn a ``ValueError`` into an error of ours."""

    def target(path: Path) -> None:
        try:
            parse(path.read_bytes().decode("utf-8", "surrogateescape"))
        except ValueError:
            return

    return target


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "plan": (read_plan, "plan/valid/*.json"),
    "profile": (read_profile, "profile/valid/*.jsonl"),
    "profile lines": (parse_lines, "profile/valid/*.jsonl"),
    "follower": (follow, "profile/valid/*.jsonl"),
    "json": (expect_value_error(parse_json), "*/valid/*.json"),
    "toml": (expect_value_error(parse_toml), "../../../dynmo_balance/recipes/*.toml"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_parser_of_a_damaged_document_raises_only_errors_of_ours(name, tmp_path):
    target, pattern = TARGETS[name]
    corpus = [path.read_bytes() for path in sorted(CONTRACTS.glob(pattern))]
    corpus = [document for document in corpus if len(document) < 100_000]
    assert corpus
    numbers, path = random.Random(0), tmp_path / "document"
    for _ in range(EXAMPLES):
        path.write_bytes(mutate(numbers.choice(corpus), corpus, numbers))
        try:
            target(path)
        except DynmoError:
            continue
