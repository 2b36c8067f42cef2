"""Counts of a training step: operations, reads of the device, update, gradient memory; and the time of its input.

    python tests/benchmarks/train_counts.py operations [--torchtitan DIRECTORY] [--nanogpt DIRECTORY]
    python tests/benchmarks/train_counts.py reads
    python tests/benchmarks/train_counts.py update
    python tests/benchmarks/train_counts.py memory
    python tests/benchmarks/train_counts.py input [--repeats 3]
    python tests/benchmarks/train_counts.py stream [--repeats 3]

Counts do not depend on the load of the machine, nor on its kind. ``operations``: what torch dispatches in a step of a
Llama and of a GPT, per layer (the difference of a model of four layers and one of two, halved) and for the rest of the
step; with views, and without them (what starts a kernel). ``--torchtitan`` is a directory with the package
``torchtitan`` (0.3.0) and what it imports; ``--nanogpt`` one with nanoGPT's ``model.py``. Both have the attention of
``scaled_dot_product_attention``. ``reads``: reads of the device in a step. ``update``: operations of norm, clipping and
optimizer by data-parallel replicas. ``memory``: gradient elements of a rank by ZeRO stage. ``input``: seconds until the
batch of a step of 2,048 BERT samples is there. ``stream``: processor time of ``--hf-dataset``.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from plain_engine import constant, engine_batch, engine_of, gpt_of

from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.parallel.process_groups import World, init_world
from tests.distributed.workers import run_workers

WIDTH, INNER, HEADS, GROUPS, VOCABULARY, SAMPLES, TOKENS = 256, 768, 8, 2, 512, 2, 64
RATE, DECAY, CLIP = 6e-4, 0.1, 1.0
READS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal", "is_nonzero"}
PHASES = ("forward", "backward", "update", "rest")


def log(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Operations(TorchDispatchMode):
    """Counts dispatched operations by phase: all, and those that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "rest"
        self.all: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all[self.phase] += 1
        self.kernels[self.phase] += not func.is_view
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose operations count for a phase."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            outer, self.phase = self.phase, phase
            try:
                return function(*arguments, **keywords)
            finally:
                self.phase = outer

        return run


@contextmanager
def counted_phases(counts: Operations, owners: Iterable[tuple[Any, str, str]]) -> Iterator[None]:
    """Replace methods by those that count for a phase: (class, method, phase)."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
    for owner, name, phase in owners:
        setattr(owner, name, counts.within(phase, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def llama_of(layers: int) -> Llama:
    """A Llama with grouped queries."""
    return Llama(
        LlamaShape(
            num_layers=layers,
            hidden_size=WIDTH,
            ffn_hidden_size=INNER,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=WIDTH // HEADS,
            max_position_embeddings=TOKENS,
            vocab_size=VOCABULARY,
            padded_vocab_size=VOCABULARY,
        )
    )


@functools.cache
def world() -> World:
    """One process."""
    return init_world("cpu")


def ours(family: Any) -> Operations:
    """The third step of the engine."""
    from dynmo_train.optim.item_store import ItemStore
    from dynmo_train.pipeline.pipeline_stage import ItemStage
    from dynmo_train.trainer.engine import Engine

    engine = engine_of(family, world(), microbatches=1, boundary=(SAMPLES, TOKENS, WIDTH), rate=constant(RATE))
    for number in (1, 2):
        engine.train_step(engine_batch(tokens(), number, 1), sampled=False)
    counts = Operations()
    owners = [
        (ItemStage, "forward_one_chunk", "forward"),
        (ItemStage, "backward_one_chunk", "backward"),
        (Engine, "prepare_gradients", "update"),
        (ItemStore, "step", "update"),
    ]
    with counted_phases(counts, owners), counts:
        engine.train_step(engine_batch(tokens(), 3, 1), sampled=False)
    return counts


def plain_loop(network: torch.nn.Module, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operations:
    """The third step of the usual loop: one microbatch, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    ids, labels = tokens()

    def step(counts: Operations) -> None:
        loss = counts.within("forward", loss_of)(ids, labels)
        loss.item()
        counts.within("backward", loss.backward)()
        counts.within("update", torch.nn.utils.clip_grad_norm_)(network.parameters(), CLIP)
        counts.within("update", optimizer.step)()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step(Operations())
    counts = Operations()
    with counts:
        step(counts)
    return counts


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As torchtitan's loss: in float32."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def torchtitan(layers: int) -> Operations:
    """torchtitan's Llama 3 with fused query, key and value; its kernels for experts need a GPU and are left out."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    # Its language models have attention by FlexAttention or varlen only, which CPUs run without their kernels.
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    rope = llama3.ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=TOKENS, theta=500000, scaling="llama")
    config = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=WIDTH,
            n_heads=HEADS,
            n_kv_heads=GROUPS,
            hidden_dim=INNER,
            rope=rope,
            attn_backend="sdpa",
        ),
    )
    network = config.build()
    network.init_states()
    return plain_loop(network, lambda ids, labels: cross_entropy(network(ids), labels))


def transformers_llama(layers: int) -> Operations:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=TOKENS,
        use_cache=False,
        tie_word_embeddings=False,
    )
    network = LlamaForCausalLM(config)
    return plain_loop(network, lambda ids, labels: cross_entropy(network(ids).logits, labels))


def nanogpt(layers: int) -> Operations:
    import model as peer

    config = peer.GPTConfig(
        block_size=TOKENS, vocab_size=VOCABULARY, n_layer=layers, n_head=HEADS, n_embd=WIDTH, dropout=0.0, bias=True
    )
    network = peer.GPT(config)
    return plain_loop(network, lambda ids, labels: network(ids, labels)[1])


def our_gpt(layers: int) -> Operations:
    return ours(gpt_of(layers=layers, width=WIDTH, heads=HEADS, tokens=TOKENS, vocabulary=VOCABULARY))


def operations(options: argparse.Namespace) -> None:
    programs: dict[str, Callable[[int], Operations]] = {
        "Llama, ours": lambda layers: ours(llama_of(layers)),
        "Llama, torchtitan": torchtitan,
        "Llama, transformers": transformers_llama,
        "GPT, ours": our_gpt,
        "GPT, nanoGPT": nanogpt,
    }
    for flag, name in (("torchtitan", "Llama, torchtitan"), ("nanogpt", "GPT, nanoGPT")):
        if directory := getattr(options, flag):
            sys.path.insert(0, directory)
        else:
            del programs[name]
            sys.stderr.write(f"{flag} is left out: --{flag} names no directory\n")
    log("| operations, and without views | forward of a layer | backward of a layer | layer | step of 4 layers |")
    log("|---|---|---|---|---|")
    for name, program in programs.items():
        small, large = program(2), program(4)
        cells = []
        for phases in (("forward",), ("backward",), ("forward", "backward", "update")):
            both = [
                sum((getattr(large, kind)[phase] - getattr(small, kind)[phase]) / 2 for phase in phases)
                for kind in ("all", "kernels")
            ]
            cells.append("{:g}, {:g}".format(*both))
        cells.append(f"{large.all.total():,}, {large.kernels.total():,}")
        log(f"| {name} | {' | '.join(cells)} |")


def reads(_: argparse.Namespace) -> None:
    """Reads of the device in a step: copies to the host by the engine, and operations whose results the host reads."""
    from dynmo_train.trainer import engine as engine_module

    copies = Counter[str]()
    proper = engine_module.HostCopy

    class Counted(proper):  # type: ignore[misc, valid-type]
        def read(self) -> torch.Tensor:
            copies["reads"] += 1
            return super().read()

    engine_module.HostCopy = Counted
    log("| family | copies to the host that a step waits for | operations that read a tensor on the host |")
    log("|---|---|---|")
    for name, family in (
        ("llama", llama_of(4)),
        ("gpt", gpt_of(layers=4, width=WIDTH, heads=HEADS, tokens=TOKENS, vocabulary=VOCABULARY)),
    ):
        copies.clear()
        counts = ours(family)
        log(f"| {name} | {copies['reads'] / 3:g} | {sum(counts.names[each] for each in READS)} |")


def update(_: argparse.Namespace) -> None:
    """Operations of norm, clipping and AdamW; the model of the tests."""
    from dynmo_train.parallel.dims import ParallelDims
    from tests.distributed.layouts import Layout
    from tests.distributed.test_zero_memory import BASE, update_operations

    log("| replicas | ZeRO stage | operations of norm, clipping and update |")
    log("|---|---|---|")
    for stage in (0, 2, 3):
        for replicas in (1, 2, 4):
            settings = {"zero_stage": stage, "zero_sync_microbatches": True} if stage else {}
            if replicas == 1 and stage:
                continue
            scenario = BASE
            layout = Layout(dims=ParallelDims(data=replicas), scenario=scenario, settings=settings)
            log(f"| {replicas} | {stage} | {max(run_workers(update_operations, replicas, layout))} |")


def memory(_: argparse.Namespace) -> None:
    """Most gradient elements of a rank after any backward of a step, over the parameters of its items."""
    from dynmo_train.parallel.dims import ParallelDims
    from tests.distributed.layouts import Layout
    from tests.distributed.test_zero_memory import BASE, peaks

    log("| replicas | ZeRO stage, `--zero-gradient-sync` | whole gradients | shards of gradients | floor |")
    log("|---|---|---|---|---|")
    for replicas in (2, 4):
        for stage, each in ((1, False), (2, False), (2, True), (3, True)):
            settings = {"zero_stage": stage, "zero_sync_microbatches": each}
            layout = Layout(dims=ParallelDims(data=replicas), scenario=BASE, settings=settings)
            ranks = run_workers(peaks, replicas, layout)
            whole, sharded = (max(rank[key] for rank in ranks) for key in ("whole", "sharded"))
            floor = 1 / replicas if each else 1
            sync = "microbatch" if each else "step"
            log(f"| {replicas} | {stage}, {sync} | {whole:.3f} | {sharded:.3f} | {floor:.3f} |")


BERT_SAMPLES = 2048


def sentences(folder: Path) -> None:
    """A WordPiece tokenizer, and three copies of the sample corpus as sentences."""
    corpus, copies, tokenizer = folder / "corpus.jsonl", folder / "copies.jsonl", folder / "wordpiece.json"

    def prepare(*words: str | Path) -> None:
        command = [sys.executable, "-m", "dynmo_tools", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])

    prepare("sample-corpus", "--output", corpus)
    copies.write_bytes(corpus.read_bytes() * 3)
    prepare("train-tokenizer", corpus, "-o", tokenizer, "--model", "wordpiece-lower", "--vocab-size", "1024")
    prepare("binarize", copies, "-o", folder / "bert", "--tokenizer", tokenizer, "--split-sentences")


def bert_data(folder: Path, replicas: int) -> Any:
    """The data of a BERT run."""
    from dynmo_train.config import DefaultContext, config_of
    from dynmo_train.data.batches import open_run_data

    options = {
        "family": "bert",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 512,
        "micro_batch_size": 8,
        "global_batch_size": BERT_SAMPLES,
        "train_iters": 20,
        "lr": 1e-3,
        "split": "100,0,0",
        "eval_iters": 0,
        "pipeline_model_parallel_size": 1,
        "data_path": str(folder / "bert_text_sentence"),
        "tokenizer_model": str(folder / "wordpiece.json"),
        "vocab_size": 1024,
    }
    return open_run_data(config_of(DefaultContext(world_size=replicas), **options))


def input_time(options: argparse.Namespace) -> None:
    """Seconds that a step waits for its batch; with workers the steps take a second in between."""
    from dynmo_train.data.loader import BatchLoader

    log(f"| replicas that share {BERT_SAMPLES:,} samples of 512 tokens | workers | s until the batch is there |")
    log("|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        sentences(Path(name))
        for replicas, workers, step_s in ((1, 0, 0.0), (8, 0, 0.0), (8, 2, 1.0)):
            data = bert_data(Path(name), replicas)
            batches = BatchLoader(
                lambda consumed, step, data=data: data.train_shard(consumed, step, 0),
                lambda _: BERT_SAMPLES,
                20,
                num_workers=workers,
                pin_memory=False,
            )
            times = []
            for number in range(options.repeats + 1):
                begin = time.perf_counter()
                batches.batch(number * BERT_SAMPLES, number + 1)
                times.append(time.perf_counter() - begin)
                time.sleep(step_s)
            batches.close()
            log(f"| {replicas} | {workers} | {', '.join(f'{each:.3f}' for each in times[1:])} |")


def stream_time(options: argparse.Namespace) -> None:
    """Processor time of streamed text, read and tokenized in one process; and of finding a sample again."""
    from dynmo_train.data.hf_stream import Packer, StreamPosition, StreamSpec
    from dynmo_train.data.tokenizer import load_tokenizer

    log("| streamed text | processor s |")
    log("|---|---|")
    with tempfile.TemporaryDirectory() as name:
        sentences(Path(name))
        tokenizer = load_tokenizer(Path(name) / "wordpiece.json")
        spec = StreamSpec(
            flag="--hf-dataset",
            dataset=str(Path(name) / "copies.jsonl"),
            name=None,
            split="train",
            revision=None,
            field="text",
            shuffle_buffer=0,
            seed=(1, 0),
        )

        def seconds(start: StreamPosition, skipped: int, count: int) -> tuple[float, StreamPosition]:
            packer = Packer(spec, tokenizer.to_ids, 1024, start)
            begin = time.process_time()
            packer.skip(skipped)
            packer.rows(count)
            return time.process_time() - begin, packer.position()

        rounds: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            took, at = seconds(StreamPosition(), 0, 2000)
            for what, each in (
                ("2,000 samples of 1,024 tokens", took),
                ("8 samples after them, from the position in a checkpoint", seconds(at, 0, 8)[0]),
                ("8 samples after them, without a position", seconds(StreamPosition(), 2000, 8)[0]),
            ):
                rounds.setdefault(what, []).append(each)
        for what, times in rounds.items():
            log(f"| {what} | {', '.join(f'{each:.2f}' for each in times)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = {
        "operations": operations,
        "reads": reads,
        "update": update,
        "memory": memory,
        "input": input_time,
        "stream": stream_time,
    }
    parser.add_argument("subject", choices=subjects)
    parser.add_argument("--torchtitan", default="", help="directory with the package torchtitan")
    parser.add_argument("--nanogpt", default="", help="directory with nanoGPT's model.py")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    subjects[options.subject](options)


if __name__ == "__main__":
    main()
