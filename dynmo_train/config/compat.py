"""Command lines of Megatron-LM, Megatron-DeepSpeed and similar programs, translated to the options of this package.

Options that this package declares under the same name need no entry. ``FLAGS`` has an entry for every other flag: it
becomes other arguments, is ignored, or is refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .._common.document import Problem

Kind = Literal["becomes", "ignored", "refused"]
# Options with several words as their value, which are joined to one; None: all words before the next flag.
MULTI_WORD_FLAGS: Mapping[str, int | None] = {
    "--data-path": None,
    "--retriever-report-topk-accuracies": None,
    "--train-data-path": None,
    "--valid-data-path": None,
    "--test-data-path": None,
    "--rampup-batch-size": 3,
    "--train-data": None,
    "--valid-data": None,
}


@dataclass(frozen=True, kw_only=True)
class CompatFlag:
    """A flag of another program.

    Attributes:
        kind: whether the flag ``becomes`` other arguments, is ``ignored`` or ``refused``.
        arguments: what the flag becomes; its values follow.
        reason: why the flag is ignored, or what to write instead.
        num_values: number of values; None: all words before the next flag.
        drop_values: whether ``arguments`` already contain the value.
        families: model families that accept the flag; empty: all.
    """

    kind: Kind
    arguments: tuple[str, ...] = ()
    reason: str = ""
    num_values: int | None = 0
    drop_values: bool = False
    families: tuple[str, ...] = ()


def becomes(*arguments: str, values: int | None = 0, drop_values: bool = False) -> CompatFlag:
    """A flag with a counterpart in this package.

    Args:
        *arguments: what the flag becomes; its values follow.
        values: number of values; None: all words before the next flag.
        drop_values: whether ``arguments`` already contain the value.
    """
    return CompatFlag(kind="becomes", arguments=arguments, num_values=values, drop_values=drop_values)


def ignored(reason: str, values: int | None = 0, *families: str) -> CompatFlag:
    """A flag that is accepted for compatibility and ignored.

    Args:
        reason: why it is ignored.
        values: number of values; None: all words before the next flag.
        *families: model families that accept the flag; none: all.
    """
    return CompatFlag(kind="ignored", reason=reason, num_values=values, families=families)


def refused(remedy: str, values: int | None = 0) -> CompatFlag:
    """A flag that is an error.

    Args:
        remedy: what to write instead.
        values: number of values; None: all words before the next flag.
    """
    return CompatFlag(kind="refused", reason=remedy, num_values=values)


_LLAMA = "always on for llama: use pretrain llama"
_OVERLAP = "no effect on results"
_ZERO = "buffer sizes follow from the model"
_CONVERT = "must be given to dynmo-ckpt: use dynmo-ckpt merge, split, reshard or convert"
_GENERATE = "must be given to text generation: use dynmo-train generate"
_LAUNCH = "must be given to the launcher: use dynmo-train launch local --nproc N, or torchrun, before the command"

FLAGS: Mapping[str, CompatFlag] = {
    # Older names of Megatron
    "--model-parallel-size": becomes("--tensor-model-parallel-size", values=1),
    "--batch-size": becomes("--micro-batch-size", values=1),
    "--warmup": becomes("--lr-warmup-fraction", values=1),
    "--vocab": becomes("--vocab-file", values=1),
    "--norm-epsilon": becomes("--layernorm-epsilon", values=1),
    "--expert-parallel-size": becomes("--expert-model-parallel-size", values=1),
    "--num-virtual-stages-per-pipeline-rank": becomes(
        "--schedule", "interleaved-1f1b", "--virtual-stages-per-worker", values=1
    ),
    # Inverse cloze task
    "--ict-head-size": becomes("--biencoder-projection-dim", values=1),
    "--ict-load": becomes("--finetune", "--load", values=1),
    "--report-topk-accuracies": becomes("--retriever-report-topk-accuracies", values=None),
    **dict.fromkeys(
        (
            "--evidence-data-path",
            "--embedding-path",
            "--block-data-path",
            "--indexer-batch-size",
            "--indexer-log-interval",
        ),
        refused("retrieval with a trained ict model is not supported: leave it out", 1),
    ),
    # Activation checkpointing
    "--checkpoint-activations": becomes("--recompute-granularity", "full"),
    "--activations-checkpoint-method": becomes("--recompute-granularity", "full", values=1, drop_values=True),
    "--recompute-activations": becomes("--recompute-granularity", "selective"),
    "--deepspeed-activation-checkpointing": becomes("--recompute-granularity", "full"),
    "--recompute-method": ignored("each layer is checkpointed separately", 1),
    "--recompute-num-layers": ignored("each layer is checkpointed separately", 1),
    "--checkpoint-num-layers": ignored("each layer is checkpointed separately", 1),
    "--activations-checkpoint-num-layers": ignored("each layer is checkpointed separately", 1),
    "--partition-activations": ignored("checkpointed activations are not partitioned: one input per layer"),
    "--distribute-saved-activations": ignored("checkpointed activations are not partitioned: one input per layer"),
    "--checkpoint-in-cpu": refused(
        "activation offloading is not supported: leave it out, or reduce --micro-batch-size"
    ),
    "--synchronize-each-layer": ignored("layers need no synchronization"),
    "--contigious-checkpointing": ignored("torch's allocator limits fragmentation"),
    "--profile-backward": ignored("profile.jsonl has the backward time of every layer: --profile-interval"),
    # DeepSpeed
    "--deepspeed": ignored("the engine is torch's; --deepspeed_config is still read"),
    "--zero-reduce-bucket-size": ignored(_ZERO, 1),
    "--zero-allgather-bucket-size": ignored(_ZERO, 1),
    "--zero-contigious-gradients": ignored(_ZERO),
    "--zero-reduce-scatter": ignored(_ZERO),
    "--no-pipeline-parallel": becomes("--pipeline-model-parallel-size", "1"),
    # Devices, kernels and overlap
    "--distributed-backend": ignored("the backend depends on the device: gloo on CPU, NCCL on CUDA", 1),
    "--local_rank": ignored("taken from the environment", 1),
    "--local-rank": ignored("taken from the environment", 1),
    "--use-mcore-models": ignored("there is one implementation"),
    "--use-legacy-models": ignored("there is one implementation"),
    "--transformer-impl": ignored("there is one implementation", 1),
    "--use-flash-attn": ignored("scaled_dot_product_attention selects the kernel"),
    "--attention-backend": ignored("scaled_dot_product_attention selects the kernel", 1),
    "--attention-softmax-in-fp32": ignored("always on"),
    "--no-masked-softmax-fusion": ignored(_OVERLAP),
    "--no-bias-gelu-fusion": ignored(_OVERLAP),
    "--no-bias-dropout-fusion": ignored(_OVERLAP),
    "--no-bias-swiglu-fusion": ignored(_OVERLAP),
    "--no-rope-fusion": ignored(_OVERLAP),
    "--no-gradient-accumulation-fusion": ignored(_OVERLAP),
    "--no-async-tensor-model-parallel-allreduce": ignored(_OVERLAP),
    "--overlap-grad-reduce": becomes("--DDP-impl", "torch"),
    "--overlap-param-gather": ignored(_OVERLAP),
    "--tp-comm-overlap": ignored(_OVERLAP),
    "--use-cpu-initialization": ignored("weights are always initialized on CPU"),
    "--no-query-key-layer-scaling": ignored("attention scores are scaled once"),
    "--apply-query-key-layer-scaling": ignored("attention scores are scaled once"),
    "--exit-signal-handler": ignored("SIGTERM always saves and exits"),
    "--no-initialization": ignored(_OVERLAP),
    "--log-timers-to-tensorboard": ignored("step times are always logged"),
    "--log-validation-ppl-to-tensorboard": ignored("validation perplexity is always logged"),
    "--tensorboard-queue-size": ignored("records are written immediately", 1),
    "--experiment_name": ignored("--run-dir names the run", 1),
    "--ckpt-format": ignored("checkpoints have the native format; dynmo-ckpt convert writes others", 1),
    "--use-checkpoint-args": refused("not supported: give the options of the run again, from its run.json"),
    "--use-distributed-optimizer": becomes("--zero-stage", "1"),
    "--keep-last": ignored("the last batch is always used"),
    # Architecture of llama
    "--swiglu": ignored(_LLAMA, 0, "llama"),
    "--disable-bias-linear": ignored(_LLAMA, 0, "llama"),
    "--no-position-embedding": ignored(_LLAMA, 0, "llama"),
    "--use-rotary-position-embeddings": ignored(_LLAMA, 0, "llama"),
    "--group-query-attention": ignored("implied by --num-query-groups", 0, "llama"),
    "--normalization": ignored(_LLAMA, 1, "llama"),
    "--rotary-percent": ignored("rotary embeddings always cover whole heads", 1, "llama"),
    # Flags of other programs in the same scripts
    **dict.fromkeys(("--model-type", "--target-pipeline-model-parallel-size"), refused(_CONVERT, 1)),
    **dict.fromkeys(("-i_g", "-p", "-i", "-o"), refused(_CONVERT, 1)),
    **dict.fromkeys(
        ("--out-seq-length", "--temperature", "--genfile", "--num-samples", "--top_p", "--top_k"),
        refused(_GENERATE, 1),
    ),
    **dict.fromkeys(("--recompute", "--greedy"), refused(_GENERATE, 0)),
    **dict.fromkeys(
        ("--task", "--valid-data"), refused("must be given to evaluation: use dynmo-train evaluate or finetune", 1)
    ),
    **dict.fromkeys(
        ("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--num_nodes", "--num_gpus"),
        refused(_LAUNCH, 1),
    ),
}


@dataclass(frozen=True)
class TranslatedCommand:
    """A command line in the options of this package, notes on ignored flags, and refused flags."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=())


def is_flag(word: str) -> bool:
    """Whether a word is a flag, not a value such as ``-1e-3``."""
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def values_after(arguments: Sequence[str], at: int, count: int | None) -> tuple[list[str], int]:
    """The values of a flag, and the position after them.

    Args:
        arguments: command line as a list.
        at: position after the flag.
        count: maximum number of values; None: all words before the next flag.
    """
    end = at
    while end < len(arguments) and (count is None or end - at < count) and not is_flag(arguments[end]):
        end += 1
    return list(arguments[at:end]), end


def translate(
    arguments: Sequence[str], family: str, declared: Mapping[str, int], flags: Mapping[str, CompatFlag] = FLAGS
) -> TranslatedCommand:
    """Translate a command line of another program.

    Args:
        arguments: words after ``pretrain FAMILY``.
        family: model family.
        declared: flag of this package to its number of values.
        flags: flags that are not declared.
    """
    translated: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    at = 0
    while at < len(arguments):
        word, equals, value = arguments[at].partition("=")
        at += 1
        if not is_flag(word):
            translated.append(arguments[at - 1])
            continue
        flag = declared_name(word, declared, flags)
        if flag in declared:
            count = MULTI_WORD_FLAGS.get(flag, declared[flag])
            values, at = ([value], at) if equals else values_after(arguments, at, count)
            is_joined = flag in MULTI_WORD_FLAGS and len(values) > 1
            translated += [flag, *([" ".join(map(_quoted, values))] if is_joined else values)]
            continue
        known = flags.get(word)
        if known is None:
            translated.append(arguments[at - 1])  # the parser of the command suggests similar names
            continue
        values, at = ([value], at) if equals else values_after(arguments, at, known.num_values)
        if known.kind == "becomes" and known.arguments[0] in declared:
            values = [" ".join(values)] if known.num_values is None else values
            translated += [*known.arguments, *([] if known.drop_values else values)]
        elif known.kind == "ignored" and (not known.families or family in known.families):
            notes.append(f"{word}: {known.reason}")
        else:
            problems.append(Problem(word, "unsupported", _remedy(known)))
    return TranslatedCommand(tuple(translated), tuple(notes), tuple(problems))


def _remedy(known: CompatFlag) -> str:
    return f"{known.arguments[0]} is not supported: leave it out" if known.kind == "becomes" else known.reason


def declared_name(word: str, declared: Mapping[str, int], flags: Mapping[str, CompatFlag]) -> str:
    """The name of a flag in this package: the same, or with dashes for underscores."""
    dashed = "--" + word[2:].replace("_", "-")
    return dashed if word not in declared and word not in flags and dashed in declared else word


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word
