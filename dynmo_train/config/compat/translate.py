"""Command lines of Megatron-LM, Megatron-DeepSpeed, torchtitan and similar programs, translated to our options.

words ──> translate ──> this package's options, notes on ignored flags, refused flags with remedies
              ^
    flags.py: every flag that is not declared under the same name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..._common.document import Problem
from .flag import CompatFlag
from .flags import FLAGS
from .megatron_model import COMBINED_FLAGS, combine

# Options with several words as their value, which are joined to one; None: all words before the next flag.
MULTI_WORD_FLAGS: Mapping[str, int | None] = {
    "--data-path": None,
    "--moe-aux-loss-coeff": None,
    "--moe-router-load-balancing-type": None,
    "--retriever-report-topk-accuracies": None,
    "--train-data-path": None,
    "--valid-data-path": None,
    "--test-data-path": None,
    "--rampup-batch-size": 3,
    "--step-batch-size-schedule": None,
    "--train-data": None,
    "--valid-data": None,
}
# Values that an option with the same name has under another name.
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "--position-embedding-type": {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary"},
    "--normalization": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
    "--tokenizer-type": {"GPTSentencePieceTokenizer": "SentencePieceTokenizer"},
}


_PRE_SOFTMAX = "--moe-router-pre-softmax"
_SEQUENCE, _TENSOR = "--sequence-parallel", "--tensor-model-parallel-size"


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
    arguments = _without_truth_values(arguments, declared, flags)
    translated: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    combined: dict[str, str] = {}
    others: dict[str, str] = {}
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
            others[flag] = " ".join(values)
            values = [RENAMED_VALUES.get(flag, {}).get(each, each) for each in values]
            is_joined = flag in MULTI_WORD_FLAGS and len(values) > 1
            translated += [flag, *([" ".join(map(_quoted, values))] if is_joined else values)]
            continue
        word = flag_name(word, flags)
        known = flags.get(word)
        if known is None:
            translated.append(arguments[at - 1])  # the parser of the command suggests similar names
            continue
        values, at = ([value], at) if equals else values_after(arguments, at, known.num_values)
        if known is COMBINED_FLAGS.get(word):
            combined[word] = " ".join(values)
            continue
        others[word] = " ".join(values)
        known = known.by_value.get(others[word], known)
        if word == "--use-distributed-optimizer" and (strategy := _sharding_strategy(arguments)):
            # In Megatron both together shard by the strategy, in any order.
            notes.append(f"{word}: {strategy} selects what is sharded")
        elif known.neutral is not None and values == [known.neutral]:
            notes.append(f"{word}: {known.neutral} changes nothing")
        elif known.kind == "becomes" and known.arguments[0] in declared:
            translated += _replacement(known, values)
        elif known.kind == "ignored" and (not known.families or family in known.families):
            notes.append(f"{word}: {known.reason}")
        else:
            problems.append(Problem(word, "unsupported", _remedy(known)))
    combination = combine(combined, others, family)
    translated += combination.arguments
    problems += combination.problems
    problems += [
        Problem(word, "unsupported", "is not supported by this command: leave out the flags that become it")
        for word in combination.arguments
        if is_flag(word) and word not in declared
    ]
    notes += [*combination.notes, *_remove_without_effect(translated, others)]
    return TranslatedCommand(tuple(translated), tuple(notes), tuple(problems))


def _without_truth_values(
    arguments: Sequence[str], declared: Mapping[str, int], flags: Mapping[str, CompatFlag]
) -> list[str]:
    """The arguments with ``--bf16`` for the Hugging Face Trainer's ``--bf16 True``, and ``--no-bf16`` for ``False``."""
    found: list[str] = []
    for word in arguments:
        flag = declared_name(found[-1], declared, flags) if found and is_flag(found[-1]) else ""
        if word not in ("True", "False") or declared.get(flag) != 0:
            found.append(word)
        elif word == "False":
            negative = f"--no-{flag[2:]}"
            found[-1:] = [negative] if negative in declared else []
    return found


def _replacement(known: CompatFlag, values: Sequence[str]) -> list[str]:
    """The words that a flag with its values becomes."""
    values = [" ".join(values)] if known.num_values is None else values
    renamed = [known.renamed_values.get(each, each) for each in values]
    further = [word for each in values for word in known.value_arguments.get(each, ())]
    return [*known.arguments, *([] if known.drop_values else renamed), *further]


def _remove_without_effect(translated: list[str], others: Mapping[str, str]) -> list[str]:
    """Remove flags that have no effect in Megatron next to others; the notes on them.

    Args:
        translated: arguments of the translated command, which this changes.
        others: flags of the command to their values.
    """
    notes = []
    if _has_sequence_parallel_alone(translated):
        translated.remove(_SEQUENCE)
        notes.append(f"{_SEQUENCE}: no effect with {_TENSOR} 1")
    if _PRE_SOFTMAX in translated and others.get("--moe-router-score-function") == "sigmoid":
        translated.remove(_PRE_SOFTMAX)
        notes.append(f"{_PRE_SOFTMAX}: no effect with --moe-router-score-function sigmoid")
    return notes


def _sharding_strategy(arguments: Sequence[str]) -> str | None:
    """The flag of fully sharded data parallelism in a command line; None without one."""
    flags = {"--data-parallel-sharding-strategy", "--use-torch-fsdp2", "--zero-stage"}
    return next((flag for word in arguments if (flag := word.partition("=")[0]) in flags), None)


def _has_sequence_parallel_alone(words: Sequence[str]) -> bool:
    """Whether sequence parallelism is set without tensor parallelism, which Megatron ignores.

    A file or recipe may set the tensor-parallel size: then the rules decide.
    """
    if _SEQUENCE not in words:
        return False
    names = [word.partition("=")[0] for word in words]
    if _TENSOR not in names:
        return not {"--config", "--recipe"} & set(names)
    at = len(names) - 1 - names[::-1].index(_TENSOR)
    value = words[at].partition("=")[2] if "=" in words[at] else "".join(words[at + 1 : at + 2])
    return value == "1"


def _remedy(known: CompatFlag) -> str:
    return f"{known.arguments[0]} is not supported: leave it out" if known.kind == "becomes" else known.reason


def flag_name(word: str, flags: Mapping[str, CompatFlag]) -> str:
    """The name of a flag in a table of flags: the same, or with dashes for underscores."""
    dashed = "--" + word[2:].replace("_", "-")
    return dashed if word not in flags and dashed in flags else word


def declared_name(word: str, declared: Mapping[str, int], flags: Mapping[str, CompatFlag]) -> str:
    """The name of a flag in this package: the same, or with dashes for underscores."""
    dashed = "--" + word[2:].replace("_", "-")
    return dashed if word not in declared and word not in flags and dashed in declared else word


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word
