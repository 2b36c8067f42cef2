"""Parts of batch scripts: quoted arguments, and sizes that environment variables override."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..._common.document import is_count
from ..._common.errors import UsageError

# Environment variables of the published cluster examples, and the flags that they set.
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
    """Split ``--flag=value`` into two words, for flags that variables can set."""
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        words += [flag, value] if equals and flag in SIZE_VARIABLES.values() else [word]
    return words


def shell_words(arguments: Sequence[str]) -> list[str]:
    """Quote a command for bash; size variables of the environment override its sizes.

    Args:
        arguments: arguments of ``dynmo-train``, such as ``pretrain gpt --num-layers 24``. A missing size is added by
            the script if its variable is set.
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
    """The command with sizes from ``environment``, as :func:`shell_words` does at run time of a script."""
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


def bash_array(name: str, words: Sequence[str]) -> str:
    """A bash array of quoted words, one flag with its value per line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith(("-", "${")) and lines[-1].startswith("-") and " " not in lines[-1]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"


# Busy threads of a GPU process: Python, backward pass, collectives library and checkpoint writer. Schedulers
# allocate one CPU per task by default, which all processes of the node would share.
GPU_PROCESS_CPUS = 4


def _dashed(word: str) -> str:
    """A flag with dashes: DeepSpeed's scripts write ``--num_threads``."""
    return word.replace("_", "-") if word.startswith("--") else word


def task_cpus(nproc: int, gpus: bool | int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The default number of CPUs per node; 8 GPU processes request 32.

    Args:
        nproc: processes per node.
        gpus: whether they have GPUs.
        arguments: arguments of the command; ``--num-threads`` is the number of threads per process.
        environment: ``OMP_NUM_THREADS`` is the number of threads without ``--num-threads``.
    """
    pairs = [word.partition("=") for word in arguments]
    words = [part for flag, _, value in pairs for part in (_dashed(flag), value) if part]
    threads = dict(pairwise(words)).get("--num-threads") or environment.get("OMP_NUM_THREADS", "1")
    num_threads = int(threads) if is_count(threads) and int(threads) else 1
    return nproc * max(num_threads, GPU_PROCESS_CPUS if gpus else 1)


def parse_exports(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` words.

    Raises:
        UsageError: a word has another form.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(f"--export {pair!r}: must be NAME=VALUE")
        found[name] = value
    return found


def export_lines(variables: Mapping[str, str]) -> str:
    """Bash lines that export the variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def check_word(option: str, value: str) -> str:
    """Return ``value`` if scheduler and shell read it as a single word.

    Raises:
        UsageError: ``value`` has whitespace, which would start another option, or a special character of the shell.
    """
    if not value or re.search(r"[\s\"'`$\\;&|<>()]", value):
        raise UsageError(f"{option} {value!r}: must not have blanks, quotes or special characters of the shell")
    return value
