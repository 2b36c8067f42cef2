"""What a user would write without this project: short, good loops over the same libraries, measured as peers.

Each runs as a process of its own, like our commands: ``python -m tests.benchmarks.suite.peers NAME ARGUMENTS``.
"""

from __future__ import annotations

import json
import multiprocessing
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def texts_of(path: str) -> list[str]:
    return [json.loads(line)["text"] for line in Path(path).read_text(encoding="utf-8").splitlines()]


def binarize(corpus: str, tokenizer_file: str, prefix: str) -> None:
    """Tokens of all documents by ``tokenizers`` on all cores, appended to a ``.bin`` as uint16, and an index."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    lengths = []
    with open(f"{prefix}.bin", "wb") as data:
        texts = texts_of(corpus)
        for start in range(0, len(texts), 1000):
            for found in tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False):
                ids = [*found.ids, 0]
                lengths.append(len(ids))
                data.write(np.asarray(ids, dtype=np.uint16).tobytes())
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<Q", len(lengths)))
        index.write(np.asarray(lengths, dtype=np.int32).tobytes())


def _signature(text: str) -> Any:
    from datasketch import MinHash

    shingles = {text[at : at + 5].encode() for at in range(max(1, len(text) - 4))}
    hashes = MinHash(num_perm=100)
    hashes.update_batch(list(shingles))
    return hashes


def dedup(corpus: str, output: str) -> None:
    """MinHash signatures by ``datasketch`` in two processes, LSH, and the first document of each group stays."""
    from datasketch import MinHashLSH

    texts = texts_of(corpus)
    index = MinHashLSH(num_perm=100, params=(10, 10))
    remaining = []
    with multiprocessing.Pool(2) as pool:
        for number, hashes in enumerate(pool.imap(_signature, texts, chunksize=32)):
            if not any(index_of_pair.jaccard(hashes) >= 0.9 for index_of_pair in _candidates(index, hashes)):
                index.insert(number, hashes)
                SIGNATURES[number] = hashes
                remaining.append(number)
    Path(output).write_text("".join(json.dumps({"text": texts[number]}) + "\n" for number in remaining))


SIGNATURES: dict[int, Any] = {}


def _candidates(index: Any, hashes: Any) -> list[Any]:
    return [SIGNATURES[number] for number in index.query(hashes)]


def _cleaned(text: str) -> str | None:
    import ftfy
    import langdetect

    langdetect.DetectorFactory.seed = 0
    fixed = ftfy.fix_text(text)
    return fixed if len(fixed.split()) >= 128 and langdetect.detect(fixed) == "en" else None


def clean(corpus: str, output: str) -> None:
    """``ftfy`` and ``langdetect`` over all documents in two processes."""
    with multiprocessing.Pool(2) as pool:
        found = pool.map(_cleaned, texts_of(corpus), chunksize=16)
    Path(output).write_text("".join(json.dumps({"text": text}) + "\n" for text in found if text is not None))


def chain(layers: int, seed: int = 0) -> list[int]:
    """Times of layers in ns, between 1 and 5 ms."""
    return np.random.default_rng(seed).integers(10**6, 5 * 10**6, layers).tolist()


def _print_ms(call: Any, calls: int = 5) -> None:
    """Prints the time of the fastest of ``calls`` in ms."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    sys.stdout.write(json.dumps({"ms": 1e3 * min(times)}) + "\n")


def plan_program(layers: str, stages: str) -> None:
    """The textbook dynamic program over (stages, layers), its inner minimum vectorized with numpy."""
    prefix = np.concatenate([[0], np.cumsum(chain(int(layers)))])

    def solve() -> int:
        best = prefix.copy()
        for _ in range(int(stages) - 1):
            rows = [np.maximum(best[:end], prefix[end] - prefix[:end]).min() for end in range(1, len(prefix))]
            best = np.array([0, *rows])
        return int(best[-1])

    _print_ms(solve)


def plan_deepspeed(layers: str, stages: str) -> None:
    """DeepSpeed's own partitioner, installed by the user."""
    from deepspeed.runtime.utils import partition_balanced

    weights = chain(int(layers))
    _print_ms(lambda: partition_balanced(weights, int(stages)), calls=1)  # takes seconds


def plan_ours(layers: str, stages: str) -> None:
    """The exact balancer: the whole solve with its certificate."""
    from dynmo_balance.partition.exact import solve
    from tests.unit.dynmo_balance.problems import make_chain, make_problem

    work = chain(int(layers))
    problem = make_problem(make_chain(work, sizes=[1] * len(work), activation=[1] * len(work)), int(stages))
    _print_ms(lambda: solve(problem))


def bottleneck(family: str, which: str) -> None:
    """Bottleneck over the exact one, mean over 20 models of a technique, for a partition that does not follow it."""
    from dynmo_balance.partition.exact import solve
    from tests.benchmarks import plan_peers

    found = []
    for problem, header in plan_peers.instances(family, 20, 0):
        least = solve(problem).bottleneck_ns
        if which == "exact":
            value = least
        else:
            cutters = {**plan_peers.own_code(), **plan_peers.RULES}
            value = plan_peers.partition_bottleneck_ns(problem, header, cutters[which])
        found.append(value / least)
    sys.stdout.write(json.dumps({"relative": float(np.mean(found))}) + "\n")


def convert(source: str, target: str) -> None:
    """A legacy Megatron GPT of several ranks to one file of safetensors, by ``torch.load`` and ``torch.cat``."""
    import torch
    from safetensors.torch import save_file

    by_stage: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(Path(source).glob("*/mp_rank_*/*.pt")):
        _, _, tensor_rank, *stage = path.parent.name.split("_")
        state = torch.load(path, weights_only=False)["model"]["language_model"]
        by_stage.setdefault(int(stage[0]) if stage else 0, []).insert(int(tensor_rank), state)
    found: dict[str, Any] = {}
    first = 0
    for _, ranks in sorted(by_stage.items()):
        layers = [rank.get("encoder", rank.get("transformer")) for rank in ranks]
        count = 0
        for name in layers[0]:
            parts = [layer[name] for layer in layers]
            words = name.split(".")
            column = any(word in name for word in ("query_key_value", "dense_h_to_4h"))
            row = name.endswith(("self_attention.dense.weight", "attention.dense.weight", "dense_4h_to_h.weight"))
            tensor = torch.cat(parts, 0 if column else 1) if column or row else parts[0]
            if words[0] == "layers":
                count = max(count, int(words[1]) + 1)
                words[1] = str(int(words[1]) + first)
            found[".".join(words)] = (tensor.t() if tensor.dim() == 2 else tensor).contiguous()
        if "embedding" in ranks[0]:
            parts = [rank["embedding"]["word_embeddings"]["weight"] for rank in ranks]
            found["wte.weight"] = torch.cat(parts)
        first += count
    Path(target).mkdir()
    save_file(found, Path(target) / "model.safetensors")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
