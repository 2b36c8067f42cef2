"""Plans Adam's state as torchtitan's loader requests it, by name of the parameter. Pure.

torchtitan loads with ``dcp.load``, which fails on a name that the checkpoint lacks and ignores further ones. Most of
its models with grouped queries have one parameter for queries, keys and values (``wqkv``), others have three; both
forms are written. The learning-rate schedule is in torchtitan's configuration; its files have the position alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._common.document import finite_number
from ..formats.checkpoint_rules import HALF_MOMENTS
from ..io.errors import UnsupportedError, short_names
from ..maps.name_map import Layout, MappedTensor
from ..megatron.training_progress import progress_of
from ..megatron.write_optimizer import mapped_moments, without_buffers
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import OutputTensor
from ..tensors.views import concatenate
from ..torch_save.distributed import Entries, chunks_of

QUERIES = re.compile(r"(layers\.\d{1,9}\.attention\.qkv_linear)\.wq\.(weight|bias)")
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")
REMEDY = "use --no-optimizer"


def state_entries(checkpoint: NativeCheckpoint, layout: Layout) -> tuple[Entries, dict[str, Any]]:
    """The tensors and the objects of the optimizer state and of the progress, by name.

    Args:
        checkpoint: the input, with the parameters of torchtitan's model alone.
        layout: of the model under torchtitan's names.

    Raises:
        UnsupportedError: the state of another optimizer, or a part of it that torchtitan needs and the input lacks.
    """
    manifest, layout = checkpoint.manifest, without_buffers(layout)
    moments = mapped_moments(checkpoint, layout, rank=0, ranks=1)
    natives: dict[str, list[str]] = {}
    for link in layout.links:
        # torchtitan has one parameter for a tied head, under the name of the embedding.
        if link.native not in manifest["ties"]:
            natives.setdefault(link.foreign, []).append(link.native)
    steps = _by_parameter(checkpoint, natives, manifest["optimizer"]["steps"], "step")
    groups = manifest["optimizer"]["groups"]
    rates = {name: group["weight_decay"] for group in groups for name in group["parameters"]}
    decays = _by_parameter(checkpoint, natives, rates, "weight decay")
    entries: Entries = {}
    for kind in HALF_MOMENTS:
        own = {name: moments[kind][name] for name in natives}
        for item in (*own.values(), *_fused(own)):
            key = f"optimizer.state.{item.name}.{kind}"
            entries[key] = chunks_of(OutputTensor(key=key, shape=item.shape, content=item.content))
    named = {name: name for name in natives} | {fused: name for name in natives for fused in _fused_names(name)}
    shared, objects = _shared_settings(checkpoint), dict[str, Any]()
    for name, original in named.items():
        key = f"optimizer.state.{name}.step"
        entries[key] = [((), OutputTensor(key=key, shape=(), content=_scalar(steps[original])))]
        settings = {**shared, "weight_decay": decays[original]}
        objects |= {f"optimizer.param_groups.{name}.{setting}": value for setting, value in settings.items()}
    recorded = _recorded(manifest)
    step = manifest["step"]
    objects |= {"train_state.step": step, "train_state.ntokens_seen": _count(recorded.get("ntokens_seen"), 0)}
    return entries, objects | {"lr_scheduler.last_epoch": _count(recorded.get("last_epoch"), step)}


def _by_parameter(
    checkpoint: NativeCheckpoint, natives: Mapping[str, Sequence[str]], values: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """The value that all of DynMo's parameters of one of torchtitan's have."""
    missing = [name for group in natives.values() for name in group if name not in values]
    if missing:
        raise UnsupportedError(f"{checkpoint.directory}: records no {what} of {short_names(missing)}; {REMEDY}")
    for name, group in natives.items():
        if len({values[each] for each in group}) > 1:
            raise UnsupportedError(
                f"{checkpoint.directory}: {short_names(group)} differ in their {what}, and are one parameter in "
                f"torchtitan ({name}); {REMEDY}"
            )
    return {name: values[group[0]] for name, group in natives.items()}


def _fused_names(name: str) -> list[str]:
    """The name of the fused parameter of queries, keys and values, given that of the queries."""
    match = QUERIES.fullmatch(name)
    return [f"{match[1]}.wqkv.{match[2]}"] if match else []


def _fused(moments: Mapping[str, MappedTensor]) -> list[MappedTensor]:
    """The moments of fused parameters: of each group its queries, its key and its value."""
    result = []
    for name, queries in moments.items():
        for fused in _fused_names(name):
            parts = [moments[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")]
            shape = (sum(part.shape[0] for part in parts), *queries.shape[1:])
            # Dimensions: groups, heads of a group, one or two for the rows of a head, and the hidden size of a matrix.
            head = queries.content.shape[2 : len(queries.content.shape) + 1 - len(shape)]
            contents = [part.content for part in parts]
            # The rows of a value have the two dimensions in another order where those of queries are reordered.
            contents = [
                each if each.shape[2 : 2 + len(head)] == head else each.flatten(2).unflatten(2, head)
                for each in contents
            ]
            result.append(
                MappedTensor(name=fused, source_name=queries.source_name, content=concatenate(contents, 1), shape=shape)
            )
    return result


def _scalar(number: int) -> Any:
    import numpy as np

    from ..tensors.computed import constant_tensor

    # torch's AdamW has the step as float32.
    return constant_tensor("step", np.asarray([number], np.float32))


def _recorded(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    recorded = manifest.get("x_torchtitan")
    return recorded if isinstance(recorded, dict) else {}


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _shared_settings(checkpoint: NativeCheckpoint) -> dict[str, Any]:
    """The values of a parameter group that all parameters have; ``weight_decay`` only keeps its place."""
    recorded, progress = _recorded(checkpoint.manifest), progress_of(checkpoint.manifest)
    if progress.adam is None:
        raise UnsupportedError(f"{checkpoint.directory}: records no betas and epsilon (x_adam); {REMEDY}")
    scheduled = learning_rate(progress.scheduler or {})
    rate = finite_number(recorded.get("lr"))
    if rate is None:
        rate = scheduled
    if rate is None:
        raise UnsupportedError(
            f"{checkpoint.directory}: records no learning rate of the next update (x_torchtitan.lr, or a schedule in "
            f"x_scheduler that is linear, cosine, constant or inverse-square-root); {REMEDY}"
        )
    peak = finite_number(recorded.get("initial_lr"))
    if peak is None:
        peak = finite_number((progress.scheduler or {}).get("max_lr"))
    implementation = recorded.get("implementation")
    if implementation not in IMPLEMENTATIONS:
        implementation = "fused"  # torchtitan's default
    return {
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
        "lr": rate,
        "betas": (progress.adam["beta1"], progress.adam["beta2"]),
        "eps": progress.adam["eps"],
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "decoupled_weight_decay": True,
        "initial_lr": rate if peak is None else peak,
    }


def learning_rate(scheduler: Mapping[str, Any]) -> float | None:
    """The learning rate of the next update, as Megatron's ``OptimizerParamScheduler`` computes it.

    torchtitan takes the rate of one update from the checkpoint, and of later ones from its own schedule.

    Args:
        scheduler: its fields, in samples; a warm-up begins at 0.

    Returns:
        The rate; None where a field is missing, or of another style.
    """
    numbers = {name: finite_number(scheduler.get(name)) for name in SCHEDULE}
    peak, floor, warmup, end, at = (numbers[name] for name in SCHEDULE)
    if peak is None or floor is None or warmup is None or end is None or at is None:
        return None
    style = scheduler.get("lr_decay_style")
    if style not in ("constant", "linear", "cosine", "inverse-square-root"):
        return None
    if warmup > 0 and at <= warmup:
        return peak * at / warmup
    if style == "constant":
        return peak
    if at > end:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(at, 1)))
    ratio = (at - warmup) / ((end - warmup) or 1)
    return floor + (1 - ratio if style == "linear" else (math.cos(math.pi * ratio) + 1) / 2) * (peak - floor)


SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps")
