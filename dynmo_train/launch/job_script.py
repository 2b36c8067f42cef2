"""Words of a shell script: everything that a person gave is quoted, and named sizes can be set from the environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from .._common.errors import UsageError

# The variables by which the published cluster examples set sizes at submission, and the flags that they stand for.
SIZE_VARIABLES = {
    "NUM_LAYERS": "--num-layers",
    "HIDDEN_SIZE": "--hidden-size",
    "NUM_ATTENTION_HEADS": "--num-attention-heads",
    "SEQ_LENGTH": "--seq-length",
    "MAX_POSITION_EMBEDDINGS": "--max-position-embeddings",
    "MICRO_BATCH_SIZE": "--micro-batch-size",
    "GLOBAL_BATCH_SIZE": "--global-batch-size",
    "TENSOR_PARALLEL": "--tensor-model-parallel-size",
    "PIPELINE_PARALLEL": "--pipeline-model-parallel-size",
}
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split_flags(arguments: Sequence[str]) -> list[str]:
    """``--flag=value`` as two words, for the flags that variables can set."""
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        words += [flag, value] if equals and flag in SIZE_VARIABLES.values() else [word]
    return words


def shell_words(arguments: Sequence[str]) -> list[str]:
    """The command as quoted words of bash in which size variables of the environment go before what is written.

    Args:
        arguments: of ``dynmo-train``, such as ``pretrain gpt --num-layers 24``. A size that they leave out is added
            where its variable is set.
    """
    words, quoted, at = split_flags(arguments), [], 0
    variables = {flag: name for name, flag in SIZE_VARIABLES.items()} if words[:1] == ["pretrain"] else {}
    while at < len(words):
        word = words[at]
        quoted.append(shlex.quote(word))
        name = variables.pop(word, None)
        if name and at + 1 < len(words) and _PLAIN.fullmatch(words[at + 1]):
            at += 1
            quoted.append(f'"${{{name}:-{words[at]}}}"')
        at += 1
    return [*quoted, *(f'${{{name}:+{flag} "${name}"}}' for flag, name in variables.items())]


def with_environment(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The command with the sizes that the environment sets now: the same rule, for what is no shell script."""
    words = split_flags(arguments)
    if words[:1] != ["pretrain"]:
        return tuple(words)
    for name, flag in SIZE_VARIABLES.items():
        value = environment.get(name)
        if not value:
            continue
        if flag in words and words.index(flag) + 1 < len(words):
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return tuple(words)


def array(name: str, words: Sequence[str]) -> str:
    """A bash array of words that are quoted already, one flag with its value a line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith(("-", "${")) and lines[-1].startswith("-") and " " not in lines[-1]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"


# A process with a GPU keeps this many cores busy: Python, the backward pass, the library of collectives, and the writer
# of checkpoints. Where nobody asks for CPUs a scheduler gives a task one, which all processes of the node share.
GPU_PROCESS_CPUS = 4


def _dashed(word: str) -> str:
    """A flag as it is declared: DeepSpeed's scripts write ``--num_threads``."""
    return word.replace("_", "-") if word.startswith("--") else word


def task_cpus(nproc: int, gpus: bool | int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The CPUs that a node's task asks for where nobody says: 8 processes with a GPU each take 32.

    Args:
        nproc: processes of a node.
        gpus: whether they have GPUs.
        arguments: of the command; ``--num-threads`` says how many threads a process computes with on CPU.
        environment: ``OMP_NUM_THREADS`` says it where the command does not.
    """
    pairs = [word.partition("=") for word in arguments]
    words = [part for flag, _, value in pairs for part in (_dashed(flag), value) if part]
    threads = dict(pairwise(words)).get("--num-threads") or environment.get("OMP_NUM_THREADS", "1")
    own = int(threads) if threads.isdecimal() and int(threads) else 1
    return nproc * max(own, GPU_PROCESS_CPUS if gpus else 1)


def parse_exports(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` words as a mapping; raises ``UsageError`` for anything else."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(f"--export takes NAME=VALUE, is {pair!r}")
        found[name] = value
    return found


def exports(variables: Mapping[str, str]) -> str:
    """Lines that export variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def one_word(option: str, value: str) -> str:
    """The value, if it is one word for a scheduler and for the shell alike.

    Raises:
        UsageError: it holds a blank, by which it would become other options, or a character of the shell.
    """
    if not value or re.search(r"[\s\"'`$\\;&|<>()]", value):
        raise UsageError(f"{option} cannot be {value!r}: no blanks, quotes or characters of the shell")
    return value
