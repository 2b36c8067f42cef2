"""Scripts of ``bin/`` with the real commands on small sizes: data, training, download, generation, figures."""

from __future__ import annotations

import bz2
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BIN = Path(__file__).parents[2] / "bin"
pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]
TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "4"),
    *("--lr-decay-iters", "4", "--eval-iters", "0", "--log-interval", "1", "--no-fp16", "--split", "100,0,0"),
]
SENTENCES = "The river runs to the sea. The old mill stands next to it. Nobody has seen the miller since May.\n"


def script(place, name, *words, code=0, **environment):
    """Run a script in a folder with the commands of this environment, and return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"DYNMO_SETUP": "no", "PATH": path, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    done = subprocess.run(
        ["bash", str(BIN / name), *words],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **given},
    )
    assert done.returncode == code, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def command(place, *words):
    """One of the four commands."""
    where = Path(sys.executable).parent / words[0]
    done = subprocess.run([where, *words[1:]], cwd=place, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a byte-level GPT-2 vocabulary without merges, documents, and a data set of them."""
    folder = tmp_path_factory.mktemp("bin")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(len(others))]
    (folder / "gpt2-vocab.json").write_text(
        json.dumps({word: at for at, word in enumerate([*letters, "<|endoftext|>"])})
    )
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    with open(folder / "corpus.json", "w") as corpus:
        for number in range(30):
            corpus.write(json.dumps({"text": f"{number} " + SENTENCES * 2}) + "\n")
    command(
        folder,
        *("dynmo-prep", "binarize", "--input", "corpus.json", "--output-prefix", "my-gpt2", "--append-eod"),
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt"),
    )
    return folder


def test_bin_gpt_scripts_train_download_and_generate(place):
    script(place, "pretrain_gpt.sh", *TINY)
    run = place / "checkpoints" / "gpt2_345m"
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    small = {"MAX_OUTPUT_SEQUENCE_LENGTH": "24", "TEMPERATURE": "1.0"}
    script(place, "generate_text.sh", **small)
    drawn = lines(place / "samples.json")
    assert len(drawn) == 2
    # The same model as Megatron would publish it: fetched, unpacked and read as it is.
    command(place, "dynmo-ckpt", "convert", str(run), "legacy", "--to", "legacy")
    with zipfile.ZipFile(place / "published.zip", "w") as archive:
        for file in (place / "legacy").rglob("*"):
            archive.write(file, file.relative_to(place / "legacy"))
    total = hashlib.sha256((place / "published.zip").read_bytes()).hexdigest()
    script(place, "download_ckpt.sh", "fetched", CKPT_URL=f"file://{place}/published.zip", CKPT_SHA256=total)
    script(place, "generate_text.sh", CHECKPOINT_PATH="fetched", OUTPUT_FILE="fetched.json", **small)
    assert lines(place / "fetched.json") == drawn


def test_bin_deepspeed_guide_from_text_to_zero(place):
    words = {"<unk>": 0, "<|endoftext|>": 1, "ein": 2, "Fluss": 3, "fließt": 4}
    (place / "vocab.json").write_text(json.dumps(words))
    (place / "train.txt").write_text("ein Fluss fließt\nein Bach fließt ein Fluss\n" * 300)
    command(
        place,
        *("dynmo-prep", "binarize", "--input", "train.txt", "--plain-text", "--output-prefix", "train", "--append-eod"),
        *("--tokenizer-type", "WhitespaceVocab", "--vocab-file", "vocab.json"),
    )
    (place / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}))
    own = {"GPUS_PER_NODE": "2", "MP_SIZE": "1", "CONFIG_JSON": "ds.json", "CHECKPOINT_PATH": "zero", "LOGDIR": "tb"}
    output = script(place, "ds_pretrain_gpt2.sh", *TINY, **own)
    assert " iteration        4/       4 " in output
    configuration = json.loads((place / "zero" / "run.json").read_text())["config"]
    assert configuration["parallel"]["zero_stage"] == 2
    assert configuration["model"]["vocab_size"] == 5
    assert list((place / "tb").glob("events.out.tfevents.*"))
    losses = {line["step"]: line["lm_loss"] for line in lines(place / "zero" / "metrics.jsonl")}
    script(place, "pretrain_gpt2_distributed.sh", *TINY, "--clip-grad", "1.0", GPUS_PER_NODE="1", CHECKPOINT_PATH="one")
    alone = {line["step"]: line["lm_loss"] for line in lines(place / "one" / "metrics.jsonl")}
    assert losses == pytest.approx(alone, rel=1e-5)


def test_bin_optimus_cc_figure_11_is_in_the_metrics(place):
    own = {"GPUS_PER_NODE": "2", "NNODES": "1", "TENSOR_MP_SIZE": "1", "PIPELINE_MP_SIZE": "2", "CB_RANK": "4"}
    script(place, "ASPLOS23/fig11.sh", "335M", *TINY, **own)
    found = lines(place / "checkpoints" / "GPT-335M-Orth_AVG_Check" / "metrics.jsonl")
    assert all("compression" in line for line in found)
    assert "cosine" in json.dumps(found[-1]["compression"])


def test_bin_optimus_cc_figures_10_12_and_14_run(place):
    own = {"GPUS_PER_NODE": "2", "NNODES": "1", "TENSOR_MP_SIZE": "1", "PIPELINE_MP_SIZE": "2", "CB_RANK": "4"}
    script(place, "ASPLOS23/fig10.sh", "335M", "CB-FE", *TINY, **own)
    timed = lines(place / "checkpoints" / "GPT2-335M-CB-FE-Breakdown" / "metrics.jsonl")
    assert [line["step"] for line in timed] == [1, 2, 3, 4]
    assert all(line["step_ns"] > 0 for line in timed)
    output = script(place, "ASPLOS23/fig12.sh", "335M", "CB-LEP", *TINY, **own)
    assert "memories" in output
    profile = lines(place / "checkpoints" / "GPT-335M-CB-LEP-Memory" / "profile.jsonl")
    assert all(peak > 0 for line in profile if line["record"] == "step" for peak in line["peak_memory_bytes"])
    rates = script(place, "ASPLOS23/fig14.sh", "--rows", "64", "--repeats", "1")
    assert "| 2.5B | 128 |" in rates


def test_bin_zero_shot_merges_and_converts_a_checkpoint(place):
    own = {"GPUS_PER_NODE": "2", "NNODES": "1", "TENSOR_MP_SIZE": "2", "PIPELINE_MP_SIZE": "1"}
    own["CHECKPOINT_PATH"] = "shards"
    script(place, "ASPLOS23/tbl2_fig9_tbl4.sh", "335M", "Baseline", *TINY, **own)
    (place / "tasks").mkdir()
    present = importlib.util.find_spec("lm_eval") is not None
    row = {"ctx_a": "The river", "ctx_b": "runs", "ctx": "The river runs", "endings": list("abcd"), "label": "1"}
    (place / "tasks" / "hellaswag.jsonl").write_text(json.dumps({**row, "activity_label": "x"}) + "\n")
    evaluation = {"TASKS": "hellaswag", "TASK_DATA": "tasks"}
    output = script(place, "ASPLOS23/zero_shot.sh", "shards", "zero", code=0 if present else 2, **evaluation)
    assert (place / "zero" / "hf" / "vocab.json").read_bytes() == (place / "gpt2-vocab.json").read_bytes()
    assert ("acc" if present else "pip install 'dynmo-toolkit[lm-eval]'") in output
    assert (place / "zero" / "merged").is_dir()
    assert json.loads((place / "zero" / "hf" / "config.json").read_text())["n_embd"] == 32


def test_bin_wikipedia_from_a_dump_to_sentences(place):
    pages = "".join(
        f"<page><title>Page {number}</title><ns>0</ns><id>{number}</id><revision><id>{number}</id>"
        f"<text>{SENTENCES * 4}</text></revision></page>"
        for number in range(1, 9)
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">{pages}</mediawiki>'
    (place / "dump.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "runs", "sea", "."]
    (place / "bert-vocab.txt").write_text("\n".join(vocabulary) + "\n")
    script(place, "wikipedia.sh", "dump.xml.bz2", "wiki", "bert", WORKERS="1")
    shown = json.loads(command(place, "dynmo-prep", "inspect", "wiki/wiki_text_sentence", "--format", "json"))
    assert shown["documents"] == 8
    assert shown["sequences"] >= 8 * 12
    assert "usage:" in script(place, "wikipedia.sh", "dump.xml.bz2", code=2)


def test_bin_openwebtext_from_pages_to_a_dataset(place):
    with open(place / "pages.jsonl", "w") as pages:
        for number in range(6):
            text = " ".join(f"word{number}x{at} and the" for at in range(200)) if number else SENTENCES * 40
            for copy in range(2 if number < 2 else 1):
                pages.write(json.dumps({"text": text, "url": f"http://example.org/{number}/{copy}"}) + "\n")
        pages.write(json.dumps({"text": "too short", "url": "http://example.org/short"}) + "\n")
    script(place, "openwebtext.sh", "-", "web", PAGES=str(place / "pages.jsonl"), WORKERS="1")
    tokens = place / "web" / "openwebtext_text_document.bin"
    dates = [path.stat().st_mtime_ns for path in (tokens, place / "web" / "groups.jsonl")]
    script(place, "openwebtext.sh", "-", "web", PAGES="pages.jsonl", WORKERS="1")  # finds all steps done
    assert [path.stat().st_mtime_ns for path in (tokens, place / "web" / "groups.jsonl")] == dates
    unique = [line["url"] for line in lines_of_zst(place, "web/unique.jsonl.zst")]
    assert len(unique) == len(set(unique)) <= 6
    assert not [url for url in unique if url.endswith(("0/1", "1/1", "short"))]
    assert (place / "web" / "openwebtext_text_document.idx").exists()
    assert "set PAGES" in script(place, "openwebtext.sh", "-", "other", code=1)
    assert "set USER_AGENT" in script(place, "openwebtext.sh", str(place / "pages.jsonl"), "third", code=1)


def lines_of_zst(place, name):
    command(place, "dynmo-prep", "merge", name, "-o", "plain.jsonl", "--overwrite")
    return lines(place / "plain.jsonl")
