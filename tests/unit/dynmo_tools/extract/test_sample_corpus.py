from __future__ import annotations

import json

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.extract.sample_corpus import comments, docstrings, sample, sections, topics, write_sample

MODULE = '''"""The module.

    Indented.
"""
import os
raise SystemExit("never run")

class Thing:
    """A thing."""

    async def act(self):
        """Act."""

# A comment of three lines. It reads
# like a sentence, and so it
# belongs to the text.
# one
'''


def test_docstrings_are_read_without_importing_the_module():
    assert docstrings(MODULE) == ["The module.\n\nIndented.", "A thing.", "Act."]


def test_comments_of_three_lines_are_documents():
    assert comments("x = 1\n# A note. It has\n# three lines,\n# all prose.\ny = 2\n# x = 3\n# y = 4\n# z\n") == [
        "A note. It has\nthree lines,\nall prose."
    ]


def test_topics_reads_the_dictionary_literal():
    assert topics("# generated\ntopics = {'assert': 'The  statement\\n', 'b': 'two'}\n") == {
        "assert": "The  statement",
        "b": "two",
    }


def test_sections_keep_all_parts_in_order():
    parts = [str(n) * 30 for n in range(10)]
    joined = sections(parts, limit=100)
    assert "\n\n".join(joined) == "\n\n".join(parts)
    assert all(len(text) <= 100 for text in joined)


def library(tmp_path):
    (tmp_path / "good.py").write_text(MODULE * 1)
    (tmp_path / "broken.py").write_text('"""Not Python.""" def (')
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""')
    (tmp_path / "LICENSE.txt").write_text("Permission is granted to everybody, for everything.\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text(MODULE)
    return tmp_path


def test_unreadable_modules_and_site_packages_are_skipped(tmp_path):
    sources = {document["source"] for document in sample(library(tmp_path), 0, 0)}
    assert sources == {"good.py", "LICENSE.txt"}


def test_sample_is_ordered_by_seed_and_limited_by_bytes(tmp_path):
    root = library(tmp_path)
    for n in range(20):
        (root / f"m{n}.py").write_text(f'"""Module number {n}, with a sentence that is long enough."""\n')
    orders = [[d["id"] for d in sample(root, 0, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert sum(len(d["text"].encode()) for d in sample(root, 300, 0)) <= 300


def test_sample_of_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no documentation found"):
        list(sample(tmp_path, 0, 0))


def test_write_sample_writes_json_lines(tmp_path):
    report = write_sample(library(tmp_path), tmp_path / "out" / "corpus.jsonl", max_bytes=0, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()]
    assert report["documents"] == len(rows) == 2
    assert all(set(row) == {"id", "source", "text"} for row in rows)
