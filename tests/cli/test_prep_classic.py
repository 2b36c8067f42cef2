"""The OpenWebText dataset with the command lines of Megatron's README; only the program names differ."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dynmo_train.cli.published_scripts import find

pytestmark = [pytest.mark.complete, pytest.mark.timeout(900)]

WORDS = "river mill stone water garden winter letter window bridge market captain island forest village"
SCRIPT = """
python blacklist_urls.py urls clean_urls.txt
python merge_jsons.py --json_path pages --output_file merged.json
python add_id.py --input-file merged.json --output-file named.json --id-prefix web
python cleanup_dataset.py named.json cleaned.json
python cleanup_fix_dataset.py --input-files cleaned.json --tasks remove_512 --output-path fixed.json
python find_duplicates.py --inputs fixed.json url --output possible.json
python group_duplicate_url.py possible.json similar.json 0.7
python remove_group_duplicates.py similar.json fixed.json unique.json
shuf unique.json -o train_data.json
python filter_ngrams.py --tasks lambada --lambada-path lambada.json --dedup-dataset train_data.json text --output out
"""


def ours(line):
    """A line of theirs with our program's name."""
    words = shlex.split(line)
    words = words[1:] if words[0] == "python" else words
    return [*find(words[0]).equivalent.split(), *words[1:]]


def dynmo(place, *words, code=0):
    done = subprocess.run(
        [Path(sys.executable).parent / words[0], *words[1:]],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, f"{words}: {done.stderr}"
    return done.stdout + done.stderr


def text(number):
    """English of more than 128 words, another one for each number."""
    names = WORDS.split()
    return " ".join(
        f"The {names[(number * 5 + at) % 14]} number {number * 40 + at} is next to the {names[(at * 3) % 14]}."
        for at in range(40)
    )


@pytest.fixture
def place(tmp_path):
    (tmp_path / "urls").mkdir()
    (tmp_path / "urls" / "one.txt").write_text("http://example.org/0\nhttp://www.facebook.com/1\n")
    (tmp_path / "pages").mkdir()
    for number in range(6):
        page = {"text": text(number % 5), "url": f"http://example.org/{number}"}  # the last repeats the first
        (tmp_path / "pages" / f"{number}.json").write_text(json.dumps(page) + "\n")
    (tmp_path / "lambada.json").write_text(json.dumps({"text": "nothing that is in any of these pages at all"}) + "\n")
    (tmp_path / "prepare.sh").write_text(SCRIPT)
    return tmp_path


def test_commands_of_the_megatron_readme_run_and_are_explained(place):
    for line in SCRIPT.split("\n")[1:-1]:
        dynmo(place, *ours(line))
    assert (place / "clean_urls.txt").read_text() == "http://example.org/0\n"
    rows = [json.loads(line) for line in (place / "out").read_text().splitlines()]
    assert len(rows) == 5
    assert {page["adlr_id"].partition("-")[0] for page in rows} == {"web"}
    explained = json.loads(dynmo(place, "dynmo-train", "explain-flags", "prepare.sh", "--format", "json"))
    assert [command["command"] for command in explained] == [
        " ".join(ours(line)[:2]) for line in SCRIPT.split("\n")[1:-1]
    ]
    assert {flag["kind"] for command in explained for flag in command["flags"]} == {"same"}
    assert [(flag["flag"], flag["meaning"]) for flag in explained[3]["flags"]] == [
        ("named.json", "the input"),
        ("cleaned.json", "--output"),
    ]


def test_missing_output_flag_overwrites_no_file(place):
    (place / "second.json").write_text("{}\n")
    assert "--output" in dynmo(place, "dynmo-prep", "clean", "pages/0.json", "second.json", code=2)
    assert (place / "second.json").read_text() == "{}\n"


def test_invalid_positional_arguments_are_explained_as_unknown(place):
    (place / "wrong.sh").write_text("python cleanup_dataset.py a b c\npython cleanup_dataset.py a b --output c\n")
    explained = json.loads(dynmo(place, "dynmo-train", "explain-flags", "wrong.sh", "--format", "json", code=3))
    assert [flag["kind"] for flag in explained[0]["flags"]] == ["same", "same", "unknown"]
    assert [flag["kind"] for flag in explained[1]["flags"]] == ["unknown", "unknown", "same"]
