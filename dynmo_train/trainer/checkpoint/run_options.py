"""What a run was made of: the options that its checkpoints record, and that a resumed run must have again.

A resumed run continues at a position in the data and with the state of its techniques. With another seed or other data
the position means other samples; without the options of its techniques, frozen layers would train again with moments of
zero. Such a resume is refused; ``--allow-changed-options`` permits it. Other options of the training may change, which
is printed. Options of placement, speed and logs are not recorded.

The schedule of a technique may follow from another option: ``--pruning-end-iter`` from ``--train-iters``. A resumed run
with more steps keeps the schedule of its first start, unless the option of the schedule is given::

    options of the run ─▶ recorded_options ─▶ x_options of the manifest
                                                  │
    options of the resumed run ─▶ keep_schedules ─┴─▶ compare_options ─▶ refused, printed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from ..._common.console import print_message
from ...config import Config, option_specs
from ...config.extensions import installed_options, package_techniques
from ...config.options import OptionSpec
from ...config.parse import parse_blend
from ...formats.checkpoint import Checkpoint, CheckpointError
from ...formats.indexed import prefix_of
from ..fingerprint import identity_of

KEY = "x_options"
# Options of the data that select neither samples nor their order.
_OTHER_DATA = frozenset(
    {
        *("valid_data_path", "test_data_path", "hf_valid_dataset", "hf_valid_split", "data_impl", "data_cache_path"),
        *("num_workers", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "calculate_per_token_loss"),
    }
)
_DATA_OF_ICT = frozenset({"titles_data_path", "query_in_block_prob", "use_one_sent_docs"})
# Tables of techniques: a run has one of them if an option of its table differs from the default.
_TECHNIQUES = frozenset({"pruning", "freezing", "depth", "exits", "attention", "compression"})
# Options of these tables that change speed, logs or evaluation only.
_OTHER_OF_TECHNIQUES = frozenset(
    {
        *("sparse_threshold", "sparse_table", "freeze_cache_activations", "early_exit_threshold", "early_exit_measure"),
        *("early_exit_key_values", "check_orth_error_acti", "check_comp_speed", "check_comp_ratio"),
        # The model in the manifest has the rank, and is compared first.
        *("lora_rank", "lora_alpha", "lora_target_modules", "lora_save_adapters"),
    }
)
# Tables whose options a resumed run may change, and options of other tables. The schedule has warnings of its own.
_PRINTED = frozenset({"precision", "optimizer"})
_PRINTED_OPTIONS = frozenset({"seq_length", "attention_dropout", "hidden_dropout", "calculate_per_token_loss"})
_OF_SCHEDULE = ("lr", "min_lr", "decoupled", "weight_decay", "start_weight", "end_weight", "use_checkpoint")


@dataclass(frozen=True)
class OptionChanges:
    """Options that differ between a checkpoint and the run that resumes from it, as text.

    Attributes:
        refused: those that the run must have again.
        printed: those that it may change.
    """

    refused: tuple[str, ...]
    printed: tuple[str, ...]


def _group_of(spec: OptionSpec) -> str | None:
    """``data``, the technique of an option, ``other`` for those that may change; None where it is not recorded."""
    name, concern = spec.name, spec.concern
    if not spec.is_flag or spec.declaration.refers_to == "place" or name in _OTHER_OF_TECHNIQUES:
        return None
    if name == "seed" or name in _DATA_OF_ICT or (concern == "data" and name not in _OTHER_DATA):
        return "data"
    if name.startswith("curriculum_"):
        return "curriculum"
    if concern in _TECHNIQUES or concern in package_techniques() or concern in installed_options():
        return concern
    is_other = concern in _PRINTED and not name.startswith(_OF_SCHEDULE)
    return "other" if is_other or name in _PRINTED_OPTIONS else None


def _identity(spec: OptionSpec, value: Any) -> str:
    """The value of an option as text; of data and files sizes and digests, so that they may have another path."""
    if value is None:
        return "none"
    kind = spec.declaration.refers_to
    if kind == "data":
        blend = parse_blend(spec.flag, value)
        return ", ".join(f"{weight:g} x {_dataset(prefix)}" for weight, prefix in blend)
    if kind == "file":
        return identity_of(Path(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dataset(prefix: str) -> str:
    stem = prefix_of(prefix)
    return " ".join(f".{name} {identity_of(Path(f'{stem}.{name}'))}" for name in ("bin", "idx"))


def _recorded(config: Config) -> Iterator[tuple[OptionSpec, str, Any]]:
    """The options that are recorded, with their group and value."""
    for spec in option_specs().values():
        group = _group_of(spec)
        if group is not None:
            yield spec, group, getattr(config.concern(spec.concern), spec.name)


def recorded_options(config: Config) -> dict[str, str]:
    """Option name to value, as text, of what a run is made of; without those that have their default.

    Of a technique that the run has, options that follow from others are recorded, too.

    Args:
        config: configuration of the run.
    """
    values = [(spec, group, _identity(spec, value)) for spec, group, value in _recorded(config)]
    differing = [
        (spec.name, group, text)
        for spec, group, text in values
        if config.sources[spec.name] != "derived" and text != _default(spec)
    ]
    groups = {group for _, group, _ in differing} - {"data", "other"}
    derived = [(spec.name, text) for spec, group, text in values if group in groups and _is_derived(config, spec)]
    return {**{name: text for name, _, text in differing}, **dict(derived)}


def _is_derived(config: Config, spec: OptionSpec) -> bool:
    """Whether the value of an option follows from another one; those without such a rule are never derived."""
    return config.sources[spec.name] == "derived" and spec.declaration.derive is not None


def keep_schedules(config: Config, manifest: Mapping[str, Any], *, prints: bool) -> Config:
    """The configuration with the schedules of techniques of the checkpoint that it resumes from.

    Args:
        config: configuration of the run; an option of a schedule that was given stays.
        manifest: manifest of the checkpoint.
        prints: whether to print the values of the checkpoint that differ.
    """
    stored: Mapping[str, str] = manifest.get(KEY, {})
    stored_values: list[str] = []
    for spec, group, value in list(_recorded(config)):
        text = stored.get(spec.name)
        if group in ("data", "other") or text is None or not _is_derived(config, spec):
            continue
        if not isinstance(value, int) or not text.isascii() or not text.isdigit():
            continue
        if int(text) != value:
            stored_values.append(f"{spec.flag} {text}, not {value}")
        changed = replace(config.concern(spec.concern), **{spec.name: int(text)})
        config = replace(config, **{spec.concern: changed}, sources={**config.sources, spec.name: "checkpoint"})
    if stored_values and prints:
        remedy = "to change them, give these options and --allow-changed-options"
        print_message(f"schedules of the checkpoint: {'; '.join(stored_values)}; {remedy}")
    return config


def compare_options(manifest: Mapping[str, Any], config: Config) -> OptionChanges:
    """The options of a run that differ from those of the checkpoint that it resumes from.

    Args:
        manifest: manifest of the checkpoint.
        config: configuration of the run.
    """
    stored: Mapping[str, str] = manifest.get(KEY, {})
    rows = [(spec, group, value, stored.get(spec.name, _default(spec))) for spec, group, value in _recorded(config)]
    if KEY not in manifest:
        # Earlier versions recorded seed and split of the data, other programs neither.
        known = {name: str(value) for name, value in (manifest.get("data") or {}).items() if name in ("seed", "split")}
        rows = [(spec, group, value, known[spec.name]) for spec, group, value, _ in rows if spec.name in known]
    # A technique that the checkpoint's run did not have may be added.
    had = {"data"} | {group for spec, group, _, _ in rows if spec.name in stored}
    refused: list[str] = []
    printed: list[str] = []
    for spec, group, value, there in rows:
        here = _identity(spec, value)
        # The default of an option that follows from others is not known.
        if there is None or there == here:
            continue
        text = f"{spec.flag} is {there} there, {here} here"
        if spec.declaration.refers_to != "value":
            text = f"{spec.flag} {value} is not that of the checkpoint" if value else f"{spec.flag} is not given here"
        (refused if group != "other" and group in had else printed).append(text)
    return OptionChanges(tuple(refused), tuple(printed))


def _default(spec: OptionSpec) -> str | None:
    return None if spec.default is MISSING else _identity(spec, spec.default)


def check_same_options(checkpoint: Checkpoint, config: Config) -> None:
    """Check that a run that resumes from a checkpoint has what it was made of; print what else has changed.

    Args:
        checkpoint: checkpoint that the run resumes from, with its step and optimizer state.
        config: configuration of the run.

    Raises:
        CheckpointError: another seed, other data, or the options of a technique differ.
    """
    changes = compare_options(checkpoint.manifest, config)
    if changes.refused and not config.run.allow_changed_options:
        raise CheckpointError(
            f"{checkpoint.directory} is of a run with other options: {'; '.join(changes.refused)}; give those of the"
            " checkpoint, --allow-changed-options to resume with those of this run, or --finetune to start a run from"
            " its weights"
        )
    if changes.refused or changes.printed:
        print_message(f"options that differ from the checkpoint's: {'; '.join([*changes.refused, *changes.printed])}")
