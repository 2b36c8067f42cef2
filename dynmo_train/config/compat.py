"""Command lines of Megatron-LM, Megatron-DeepSpeed and their kin: every flag is taken with its meaning, or refused.

A flag that this package declares under its own name needs no entry here. The table below says of every other one what
it becomes, why it needs nothing, or what to write instead. Of its values: ``None`` are as many as come before the next
flag, -1 is one that is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .._common.document import Problem

Kind = Literal["becomes", "nothing", "refused"]
# Options whose value is several words; they become one.
SEVERAL: Mapping[str, int | None] = {
    "--data-path": None,
    "--retriever-report-topk-accuracies": None,
    "--train-data-path": None,
    "--valid-data-path": None,
    "--test-data-path": None,
    "--rampup-batch-size": 3,
    "--train-data": None,
    "--valid-data": None,
}


@dataclass(frozen=True)
class Known:
    """What a flag of another program means here.

    Attributes:
        kind: it ``becomes`` other words, needs ``nothing``, or is ``refused``.
        words: the words that it becomes (its own values follow), or the sentence that is told.
        values: words that follow it.
        families: of models for which this holds; for others it is refused. Empty: all.
    """

    kind: Kind
    words: tuple[str, ...]
    values: int | None = 0
    families: tuple[str, ...] = ()


def _becomes(*words: str, values: int = 0) -> Known:
    return Known("becomes", words, values)


def _nothing(why: str, values: int | None = 0, *families: str) -> Known:
    return Known("nothing", (why,), values, families)


def _refused(instead: str, values: int | None = 0) -> Known:
    return Known("refused", (instead,), values)


_LLAMA = "a llama has it: pretrain llama"
_OVERLAP = "no effect on results: leave out"
_ZERO = "sizes of buffers follow from the model"
_CONVERT = "belongs to dynmo-ckpt: use dynmo-ckpt merge, split, reshard or convert"
_GENERATE = "belongs to generation: use dynmo-train generate"
_LAUNCH = "belongs to the launcher: use dynmo-train launch local --nproc N, or torchrun, before the command"

FLAGS: Mapping[str, Known] = {
    # Older names of Megatron
    "--model-parallel-size": _becomes("--tensor-model-parallel-size", values=1),
    "--batch-size": _becomes("--micro-batch-size", values=1),
    "--warmup": _becomes("--lr-warmup-fraction", values=1),
    "--vocab": _becomes("--vocab-file", values=1),
    "--norm-epsilon": _becomes("--layernorm-epsilon", values=1),
    "--expert-parallel-size": _becomes("--expert-model-parallel-size", values=1),
    "--num-virtual-stages-per-pipeline-rank": _becomes(
        "--schedule", "interleaved-1f1b", "--virtual-stages-per-worker", values=1
    ),
    # The inverse cloze task
    "--ict-head-size": _becomes("--biencoder-projection-dim", values=1),
    "--ict-load": _becomes("--finetune", "--load", values=1),
    "--report-topk-accuracies": Known("becomes", ("--retriever-report-topk-accuracies",), None),
    **dict.fromkeys(
        (
            "--evidence-data-path",
            "--embedding-path",
            "--block-data-path",
            "--indexer-batch-size",
            "--indexer-log-interval",
        ),
        _refused("belongs to retrieval with a trained ict, which this program has not: leave it out", 1),
    ),
    # Activation checkpointing
    "--checkpoint-activations": _becomes("--recompute-granularity", "full"),
    "--activations-checkpoint-method": Known("becomes", ("--recompute-granularity", "full"), -1),
    "--recompute-activations": _becomes("--recompute-granularity", "selective"),
    "--deepspeed-activation-checkpointing": _becomes("--recompute-granularity", "full"),
    "--recompute-method": _nothing("each layer is checkpointed by itself", 1),
    "--recompute-num-layers": _nothing("each layer is checkpointed by itself", 1),
    "--checkpoint-num-layers": _nothing("each layer is checkpointed by itself", 1),
    "--activations-checkpoint-num-layers": _nothing("each layer is checkpointed by itself", 1),
    "--partition-activations": _nothing("checkpointed activations are kept whole; they hold one input a layer"),
    "--distribute-saved-activations": _nothing("checkpointed activations are kept whole; they hold one input a layer"),
    "--checkpoint-in-cpu": _refused("activations stay on the device: leave it out, or take smaller microbatches"),
    "--synchronize-each-layer": _nothing("layers need no synchronization"),
    "--contigious-checkpointing": _nothing("torch's allocator keeps memory from falling to pieces"),
    "--profile-backward": _nothing("every layer's backward is in profile.jsonl: --profile-interval"),
    # DeepSpeed
    "--deepspeed": _nothing("the engine is torch's; --deepspeed_config is read for what it says"),
    "--zero-reduce-bucket-size": _nothing(_ZERO, 1),
    "--zero-allgather-bucket-size": _nothing(_ZERO, 1),
    "--zero-contigious-gradients": _nothing(_ZERO),
    "--zero-reduce-scatter": _nothing(_ZERO),
    "--no-pipeline-parallel": _becomes("--pipeline-model-parallel-size", "1"),
    # Devices, kernels and overlap
    "--distributed-backend": _nothing("the backend follows the device: gloo on CPU, NCCL on CUDA", 1),
    "--local_rank": _nothing("the environment says it", 1),
    "--local-rank": _nothing("the environment says it", 1),
    "--use-mcore-models": _nothing("there is one implementation"),
    "--use-legacy-models": _nothing("there is one implementation"),
    "--transformer-impl": _nothing("there is one implementation", 1),
    "--use-flash-attn": _nothing("scaled-dot-product attention takes the device's fastest kernel"),
    "--attention-backend": _nothing("scaled-dot-product attention takes the device's fastest kernel", 1),
    "--attention-softmax-in-fp32": _nothing("the attention kernels do so"),
    "--no-masked-softmax-fusion": _nothing(_OVERLAP),
    "--no-bias-gelu-fusion": _nothing(_OVERLAP),
    "--no-bias-dropout-fusion": _nothing(_OVERLAP),
    "--no-bias-swiglu-fusion": _nothing(_OVERLAP),
    "--no-rope-fusion": _nothing(_OVERLAP),
    "--no-gradient-accumulation-fusion": _nothing(_OVERLAP),
    "--no-async-tensor-model-parallel-allreduce": _nothing(_OVERLAP),
    "--overlap-grad-reduce": _becomes("--DDP-impl", "torch"),
    "--overlap-param-gather": _nothing(_OVERLAP),
    "--tp-comm-overlap": _nothing(_OVERLAP),
    "--use-cpu-initialization": _nothing("weights are drawn on the CPU, the same on any layout"),
    "--num-workers": _nothing("samples are read as they are needed, from mapped files", 1),
    "--no-query-key-layer-scaling": _nothing("scores are scaled once"),
    "--apply-query-key-layer-scaling": _nothing("scores are scaled once, in the attention kernel"),
    "--exit-signal-handler": _nothing("SIGTERM always saves and leaves"),
    "--no-initialization": _nothing(_OVERLAP),
    "--log-timers-to-tensorboard": _nothing("step times are logged always"),
    "--log-validation-ppl-to-tensorboard": _nothing("the validation perplexity is logged always"),
    "--tensorboard-queue-size": _nothing("records are written at once", 1),
    "--experiment_name": _nothing("a run is named by its --run-dir", 1),
    "--ckpt-format": _nothing("checkpoints are in the native format; dynmo-ckpt convert makes others", 1),
    "--use-checkpoint-args": _refused("give the options of the run again: they are in its run.json"),
    "--use-distributed-optimizer": _becomes("--zero-stage", "1"),
    "--keep-last": _nothing("no sample of a task is left out"),
    # Llama's shape
    "--swiglu": _nothing(_LLAMA, 0, "llama"),
    "--disable-bias-linear": _nothing(_LLAMA, 0, "llama"),
    "--no-position-embedding": _nothing(_LLAMA, 0, "llama"),
    "--use-rotary-position-embeddings": _nothing(_LLAMA, 0, "llama"),
    "--group-query-attention": _nothing("--num-query-groups says it", 0, "llama"),
    "--normalization": _nothing(_LLAMA, 1, "llama"),
    "--rotary-percent": _nothing("a llama turns whole heads", 1, "llama"),
    # Flags of other programs that stand in the same scripts
    **dict.fromkeys(("--model-type", "--target-pipeline-model-parallel-size"), _refused(_CONVERT, 1)),
    **dict.fromkeys(("-i_g", "-p", "-i", "-o"), _refused(_CONVERT, 1)),
    **dict.fromkeys(
        ("--out-seq-length", "--temperature", "--genfile", "--num-samples", "--top_p", "--top_k"),
        _refused(_GENERATE, 1),
    ),
    **dict.fromkeys(("--recompute", "--greedy"), _refused(_GENERATE, 0)),
    **dict.fromkeys(
        ("--task", "--valid-data"), _refused("belongs to evaluation: use dynmo-train evaluate or finetune", 1)
    ),
    **dict.fromkeys(
        ("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--num_nodes", "--num_gpus"),
        _refused(_LAUNCH, 1),
    ),
}


@dataclass(frozen=True)
class Translation:
    """A command line in this package's words: ``arguments``, what was taken without effect, and what is refused."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=())


def is_flag(word: str) -> bool:
    """Whether a word is a flag, and not a value such as ``-1e-3``."""
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _split_words(arguments: Sequence[str], at: int, count: int | None) -> tuple[list[str], int]:
    """The values from ``at`` on, and where the next word stands; ``count`` of them, or all before the next flag."""
    end = at
    while end < len(arguments) and (count is None or end - at < count) and not is_flag(arguments[end]):
        end += 1
    return list(arguments[at:end]), end


def translate(
    arguments: Sequence[str], family: str, declared: Mapping[str, int], flags: Mapping[str, Known] = FLAGS
) -> Translation:
    """A command line of another program in the words of this one.

    Args:
        arguments: words behind ``pretrain FAMILY``.
        family: the model's.
        declared: flags of this package, and how many words follow each.
        flags: what becomes of flags that are not declared.
    """
    made: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    at = 0
    while at < len(arguments):
        word, equals, value = arguments[at].partition("=")
        at += 1
        if not is_flag(word):
            made.append(arguments[at - 1])
            continue
        flag = own_name(word, declared, flags)
        if flag in declared:
            count = SEVERAL.get(flag, declared[flag])
            values, at = ([value], at) if equals else _split_words(arguments, at, count)
            made += [flag, *([" ".join(map(_quoted, values))] if flag in SEVERAL and len(values) > 1 else values)]
            continue
        known = flags.get(word)
        if known is None:
            made.append(arguments[at - 1])  # the command line's parser says what is near it
            continue
        count = 1 if known.values == -1 else known.values
        values, at = ([value], at) if equals else _split_words(arguments, at, count)
        if known.kind == "becomes" and known.words[0] in declared:
            values = [" ".join(values)] if known.values is None else values
            made += [*known.words, *(values if known.values != -1 else [])]
        elif known.kind == "nothing" and (not known.families or family in known.families):
            notes.append(f"{word}: {known.words[0]}")
        else:
            problems.append(Problem(word, "unsupported", _remedy(known)))
    return Translation(tuple(made), tuple(notes), tuple(problems))


def _remedy(known: Known) -> str:
    return f"this version has no {known.words[0]}: leave it out" if known.kind == "becomes" else known.words[0]


def own_name(word: str, declared: Mapping[str, int], flags: Mapping[str, Known]) -> str:
    """A flag's name here: itself, or with dashes for underscores."""
    dashed = "--" + word[2:].replace("_", "-")
    return dashed if word not in declared and word not in flags and dashed in declared else word


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word
