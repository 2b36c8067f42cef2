"""The progress of a training run in Megatron's checkpoints: samples, learning-rate schedule, loss scale, seed.

Megatron, Megatron-DeepSpeed and Megatron-core store the same values in the same places: consumed samples and seed in
``args``, the schedule under ``opt_param_scheduler``, and the loss scale with the optimizer. In a manifest they are
``consumed_train_samples``, ``x_consumed_valid_samples``, ``x_scheduler``, ``x_progress`` and ``rng.seed``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._common.document import finite_number
from ..torch_save.pickles import OpaquePickle
from ..torch_save.writer import ConstantStorages

Number = Callable[[Any], int | float | None]
SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")
# Names of fields of Megatron's scheduler before 2022, and the names since then.
OLDER_FIELDS = {"warmup_steps": "lr_warmup_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style"}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}  # Megatron's defaults
GRAD_SCALER = {"scale": "scale", "clean_steps": "growth_tracker", "overflows_left": "hysteresis_tracker"}


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """What a run needs to resume, apart from weights and optimizer state.

    Attributes:
        consumed_train_samples: number of training samples consumed.
        consumed_valid_samples: number of evaluation samples consumed.
        seed: of the run.
        scheduler: fields of Megatron's ``OptimizerParamScheduler``, in samples; None: not recorded.
        adam: ``beta1``, ``beta2`` and ``eps``; None: not recorded.
        loss_scale: ``scale``, ``clean_steps`` and ``overflows_left`` of a dynamic loss scale; None: none.
    """

    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    seed: int = 0
    scheduler: Mapping[str, Any] | None = None
    adam: Mapping[str, float] | None = None
    loss_scale: Mapping[str, int | float] | None = None


UNKNOWN_PROGRESS = TrainingProgress()


def read_progress(
    tree: Any, args: Mapping[str, Any], step: int, number: Number, optimizer: Mapping[str, Any] | None = None
) -> TrainingProgress:
    """The progress in a checkpoint file.

    Args:
        tree: the contents of the file.
        args: Megatron's arguments; may be empty.
        step: the iteration.
        number: converts a value of the tree, a number or a tensor of one element, to a number; else None.
        optimizer: the optimizer state, where it is not in ``tree``.
    """
    tree = tree if isinstance(tree, Mapping) else {}
    state = optimizer if optimizer is not None else tree.get("optimizer")
    return TrainingProgress(
        consumed_train_samples=_consumed(tree, args, step),
        consumed_valid_samples=_count(args.get("consumed_valid_samples")),
        seed=_count(args.get("seed")),
        scheduler=_scheduler(tree, number),
        adam=_adam(args),
        loss_scale=_loss_scale(state, number) if isinstance(state, Mapping) else None,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _consumed(tree: Mapping[Any, Any], args: Mapping[str, Any], step: int) -> int:
    """Number of training samples: Megatron's, else DeepSpeed's, else the steps times a constant batch size."""
    recorded = _count(args.get("consumed_train_samples")) or _count(tree.get("global_samples"))
    # With a batch size that changes, the steps do not show the number of samples.
    changes = any(args.get(name) is not None for name in ("rampup_batch_size", "step_batch_size_schedule"))
    return recorded or (0 if changes else step * _count(args.get("global_batch_size")))


def _scheduler(tree: Mapping[Any, Any], number: Number) -> dict[str, Any] | None:
    """The fields of the scheduler under their newer names; None for a scheduler that counts iterations."""
    fields = next((tree[name] for name in SCHEDULERS if isinstance(tree.get(name), dict)), None)
    if fields is None or number(fields.get("num_steps")) is None:
        return None
    found = {OLDER_FIELDS.get(name, name): v if isinstance(v, str) else number(v) for name, v in fields.items()}
    return {name: value for name, value in found.items() if value is not None}


def _adam(args: Mapping[str, Any]) -> dict[str, float] | None:
    recorded = {name: args.get(f"adam_{name}") for name in ADAM}
    numbers = {name: finite_number(value) for name, value in recorded.items()}
    found = {name: value for name, value in numbers.items() if value is not None}
    return ADAM | found if found else None


def _loss_scale(state: Mapping[Any, Any], number: Number) -> dict[str, int | float] | None:
    scaler = state.get("grad_scaler")
    if isinstance(scaler, dict):
        found = {field: number(scaler.get(name)) for field, name in GRAD_SCALER.items()}
    else:
        found = _iteration_loss_scale(state, number)
    known = {name: value for name, value in found.items() if value is not None}
    return known if len(known) == len(GRAD_SCALER) else None


def _iteration_loss_scale(state: Mapping[Any, Any], number: Number) -> dict[str, int | float | None]:
    """The loss scale of the scalers of apex and DeepSpeed, which count iterations since the last overflow."""
    scaler = state.get("loss_scaler")
    fields = scaler.attributes if isinstance(scaler, OpaquePickle) else state
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    scale, done, last, window = (number(fields.get(name)) for name in names)
    if done is None or last is None or not window:
        return {}
    hysteresis = number(fields.get("cur_hysteresis"))
    return {
        "scale": scale,
        # The scale grows after each window without overflow, so only the steps of the current window count.
        "clean_steps": int(done - last - 1) % int(window),
        "overflows_left": 1 if hysteresis is None else hysteresis,
    }


def in_manifest(progress: TrainingProgress) -> dict[str, Any]:
    """The fields of a manifest for the progress, except ``rng``."""
    fields: dict[str, Any] = {"consumed_train_samples": progress.consumed_train_samples}
    if progress.consumed_valid_samples:
        fields["x_consumed_valid_samples"] = progress.consumed_valid_samples
    if progress.scheduler is not None:
        fields["x_scheduler"] = dict(progress.scheduler)
    if progress.adam is not None:
        fields["x_adam"] = dict(progress.adam)
    if progress.loss_scale is not None:
        fields["x_progress"] = {"loss_scale": dict(progress.loss_scale)}
    return fields


def progress_of(manifest: Mapping[str, Any]) -> TrainingProgress:
    """The progress in a manifest; invalid ``x_`` fields are ignored."""
    scheduler, recorded = manifest.get("x_scheduler"), manifest.get("x_progress")
    scale = recorded.get("loss_scale") if isinstance(recorded, dict) else None
    is_valid = isinstance(scale, dict) and all(finite_number(scale.get(name)) is not None for name in GRAD_SCALER)
    adam = manifest.get("x_adam")
    return TrainingProgress(
        consumed_train_samples=manifest["consumed_train_samples"],
        consumed_valid_samples=_count(manifest.get("x_consumed_valid_samples")),
        seed=manifest["rng"]["seed"],
        scheduler=scheduler if isinstance(scheduler, dict) else None,
        adam=adam if isinstance(adam, dict) and adam.keys() == ADAM.keys() else None,
        loss_scale=scale if is_valid else None,
    )


def megatron_args(progress: TrainingProgress) -> dict[str, Any]:
    """Megatron's arguments for the progress."""
    adam = {f"adam_{name}": value for name, value in (progress.adam or {}).items()}
    return {
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "seed": progress.seed,
        **adam,
    }


def grad_scaler(progress: TrainingProgress, constants: ConstantStorages) -> dict[str, Any] | None:
    """Megatron's state of a dynamic loss scale; None without one."""
    scale = progress.loss_scale
    if scale is None:
        return None
    stored = constants.add("scale", "F32", (1,), struct.pack("<f", scale["scale"]))
    return {name: stored if field == "scale" else int(scale[field]) for field, name in GRAD_SCALER.items()}


def adam_groups(progress: TrainingProgress, weight_decay: float) -> list[dict[str, Any]]:
    """The fields that Adam and Megatron's scheduler read, of the parameter groups with and without weight decay.

    Before the next step the scheduler overwrites the learning rate, and sets the weight decay to its value times
    ``wd_mult``. Since 2024, Megatron finds a group by its last four fields.

    Args:
        progress: of the run; without a scheduler the learning rate is 0, without ``adam`` Megatron's defaults apply.
        weight_decay: of the first group, per step and relative to the learning rate.
    """
    adam = dict(ADAM) | dict(progress.adam or {})
    common = {
        "lr": float((progress.scheduler or {}).get("max_lr", 0.0)),
        "betas": (adam["beta1"], adam["beta2"]),
        "eps": adam["eps"],
    }
    found = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return [{**common, "weight_decay": weight_decay * wd, "wd_mult": wd, **found} for wd in (1.0, 0.0)]
