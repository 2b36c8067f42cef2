"""The sidecar of a dataset: written by binarize, used by verify, inspect, merge and convert."""

from __future__ import annotations

import hashlib
import json

import pytest

from dynmo_tools._common.errors import UsageError
from dynmo_tools.config.settings import BinarizeSettings, IndexForm, TokenizerType
from dynmo_tools.filters.fix import FixSettings, FixTask
from dynmo_tools.formats.dataset import read_sidecar, sidecar_path
from dynmo_tools.formats.indexed import bin_path, describe, idx_path, verify
from dynmo_tools.runner.job import Execution, run_job
from dynmo_tools.runner.registry import default_work, steps
from dynmo_tools.runner.task_manifest import Job, Limits
from dynmo_tools.tokenization.indexed_ops import convert_dataset, merge_datasets


def run(step, source, output, settings, task_bytes=1 << 26):
    job = Job(
        step=step,
        inputs=(source,),
        output=output,
        work=default_work(output),
        settings=settings,
        limits=Limits(task_bytes=task_bytes),
    )
    return run_job(job, steps()[step].phases_of(), Execution())


@pytest.fixture
def made(tmp_path):
    """Write a dataset with a vocabulary of some words; returns its prefix."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"one two  {n}"}) + "\n" for n in range(40)))

    def make(name, words, *, eod=True, source="in.jsonl", task_bytes=1 << 26):
        (tmp_path / f"{name}-words.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
        settings = BinarizeSettings(
            tokenizer_type=TokenizerType.WHITESPACE, vocab_file=tmp_path / f"{name}-words.json", append_eod=eod
        )
        run("binarize", tmp_path / source, tmp_path / name, settings, task_bytes)
        return tmp_path / f"{name}_text_document"

    return make


WORDS = ["<unk>", "<|endoftext|>", "one", "two"]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_sidecar_states_tokenizer_inputs_recipe_and_digests(made, tmp_path):
    run("fix", tmp_path / "in.jsonl", tmp_path / "fixed.jsonl", FixSettings(tasks=(FixTask.GENERAL,)))
    prefix = made("a", WORDS, source="fixed.jsonl")
    sidecar = read_sidecar(prefix)
    pairs = [[n, word] for n, word in enumerate(WORDS)]
    digest = hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()
    assert sidecar["tokenizer"] == {
        "type": "WhitespaceVocab",
        "vocab_size": 4,
        "vocab_sha256": digest,
        "files": [
            {
                "name": "a-words.json",
                "bytes": (tmp_path / "a-words.json").stat().st_size,
                "sha256": sha256(tmp_path / "a-words.json"),
            }
        ],
    }
    assert sidecar["eod_id"] == 1
    fixed = tmp_path / "fixed.jsonl"
    assert sidecar["inputs"] == [
        {"path": str(fixed), "pieces": [{"bytes": fixed.stat().st_size, "sha256": sha256(fixed)}]}
    ]
    assert [step["step"] for step in sidecar["recipe"]["steps"]] == ["fix", "binarize"]
    assert sidecar["recipe"]["steps"][0]["settings"]["tasks"] == ["general_cleaning"]
    assert sidecar["bin"]["pieces"] == [{"bytes": bin_path(prefix).stat().st_size, "sha256": sha256(bin_path(prefix))}]
    assert sidecar["idx"] == {"bytes": idx_path(prefix).stat().st_size, "sha256": sha256(idx_path(prefix))}


def test_pieces_of_many_tasks_cover_input_and_bin(made):
    prefix = made("a", WORDS, task_bytes=100)
    sidecar = read_sidecar(prefix)
    for pieces, payload in (
        (sidecar["inputs"][0]["pieces"], (prefix.parent / "in.jsonl").read_bytes()),
        (sidecar["bin"]["pieces"], bin_path(prefix).read_bytes()),
    ):
        assert len(pieces) > 5
        for piece in pieces:
            part, payload = payload[: piece["bytes"]], payload[piece["bytes"] :]
            assert hashlib.sha256(part).hexdigest() == piece["sha256"]
        assert payload == b""


@pytest.mark.parametrize("place", ["bin", "idx", "both"])
def test_verify_finds_flipped_bytes_that_structure_allows(made, place):
    prefix = made("a", WORDS)
    assert verify(prefix)["has_sidecar"]
    changes = {"bin": (bin_path(prefix), [0, 1]), "idx": (idx_path(prefix), [-16, -8])}
    for name in changes if place == "both" else [place]:
        path, offsets = changes[name]
        payload = bytearray(path.read_bytes())
        if name == "bin":  # two ids of the vocabulary change places
            payload[offsets[0]], payload[offsets[0] + 2] = payload[offsets[0] + 2], payload[offsets[0]]
            payload[0] ^= 1
        else:  # the boundary of the last but one document moves by one sequence
            payload[offsets[0]] -= 1
        path.write_bytes(payload)
    with pytest.raises(UsageError, match="checksum"):
        verify(prefix)
    sidecar_path(prefix).unlink()
    assert not verify(prefix)["has_sidecar"]


def test_verify_compares_the_vocabulary_of_a_tokenizer(made):
    prefix = made("a", WORDS)
    verify(prefix, {word: n for n, word in enumerate(WORDS)})
    with pytest.raises(UsageError, match="differs from that of the dataset"):
        verify(prefix, {word: n for n, word in enumerate(["<unk>", "<|endoftext|>", "two", "one"])})


def test_verify_bounds_tokens_by_the_stated_vocabulary(made):
    prefix = made("a", WORDS)
    payload = b"\x09" + bin_path(prefix).read_bytes()[1:]
    bin_path(prefix).write_bytes(payload)
    with pytest.raises(UsageError, match=r"bin.tokens\[0\]: is 9; must be from 0 to 3"):
        verify(prefix)


def test_inspect_shows_what_the_sidecar_states(made):
    view = describe(made("a", WORDS))
    shown = {name: view[name] for name in ("has_sidecar", "tokenizer", "vocab_size", "eod_id", "inputs")}
    assert shown == {"has_sidecar": True, "tokenizer": "WhitespaceVocab", "vocab_size": 4, "eod_id": 1, "inputs": 1}


def test_merge_refuses_two_vocabularies(made, tmp_path):
    prefixes = [made("a", WORDS), made("b", [*WORDS, "three"])]
    with pytest.raises(UsageError, match="has the vocabulary of a WhitespaceVocab"):
        merge_datasets(prefixes, tmp_path / "all")
    assert not idx_path(tmp_path / "all").exists()
    assert not sidecar_path(tmp_path / "all").exists()


def test_merged_and_converted_datasets_have_valid_sidecars(made, tmp_path):
    prefixes = [made("a", WORDS), made("b", WORDS, eod=False)]
    merge_datasets(prefixes, tmp_path / "all")
    merged = read_sidecar(tmp_path / "all")
    assert verify(tmp_path / "all")["has_sidecar"]
    assert merged["eod_id"] is None  # of one input, documents have no end token
    assert merged["tokenizer"]["vocab_size"] == 4
    assert [part["path"] for part in merged["inputs"]] == [str(bin_path(prefix)) for prefix in prefixes]
    convert_dataset(tmp_path / "all", tmp_path / "wide", IndexForm.CACHED, None)
    assert verify(tmp_path / "wide")["vocab_size"] == 4
    steps = read_sidecar(tmp_path / "wide")["recipe"]["steps"]
    assert [step["step"] for step in steps] == ["merge-indexed", "convert-indexed"]


def test_merge_carries_the_checksum_of_a_damaged_input(made, tmp_path):
    prefix = made("a", WORDS)
    payload = bytearray(bin_path(prefix).read_bytes())
    payload[0] ^= 1
    bin_path(prefix).write_bytes(payload)
    merge_datasets([prefix, made("b", WORDS)], tmp_path / "all")
    with pytest.raises(UsageError, match="checksum"):
        verify(tmp_path / "all")


def test_datasets_without_sidecars_merge_without_one(made, tmp_path):
    prefixes = [made("a", WORDS), made("b", [*WORDS, "three"])]
    sidecar_path(prefixes[1]).unlink()
    merge_datasets(prefixes, tmp_path / "all")
    assert read_sidecar(tmp_path / "all")["tokenizer"] is None
    assert verify(tmp_path / "all")["has_sidecar"]
    sidecar_path(prefixes[0]).unlink()
    merge_datasets(prefixes, tmp_path / "all", overwrite=True)
    assert read_sidecar(tmp_path / "all") is None  # the older one does not stay
    assert not verify(tmp_path / "all")["has_sidecar"]


def test_sidecar_of_another_bin_is_refused(made, tmp_path):
    prefix = made("a", WORDS)
    document = json.loads(sidecar_path(prefix).read_text())
    document["bin"]["pieces"][0]["bytes"] += 1
    sidecar_path(prefix).write_text(json.dumps(document))
    with pytest.raises(UsageError, match="remove the sidecar if it is outdated"):
        merge_datasets([prefix], tmp_path / "all")
    with pytest.raises(UsageError, match="the sidecar states"):
        verify(prefix)
