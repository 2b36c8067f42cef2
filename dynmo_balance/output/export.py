"""A plan in the format of other frameworks, or a refusal if the framework would run another pipeline.

Each export contains all that the framework needs to place the same layers on the same workers in the same order of
operations. Whatever it cannot express is refused: another placement of stages, another schedule, empty stages that it
does not build, cuts inside layers. The rules are those of the frameworks' code:

* ``megatron``: ``--pipeline-model-parallel-layout`` with stages between bars: ``E`` embedding, ``t`` a layer, ``L``
  loss and head. Stage ``s`` is always on rank ``s mod P``; the order is 1F1B, interleaved with several stages per rank.
  The embedding is built on the first stage and the head on the last, whatever the layout contains.
* ``torchtitan``: ``[parallelism]`` with the schedule by torch's name, which decides between looped and V, and
  ``module_fqns_per_model_part``. The output projection is ``lm_head`` since 2026-04-27 and ``output`` up to 0.2.2.
* ``deepspeed``: a subclass that sets the ``parts`` of a ``PipelineModule``, because there is no option for them.
  Parts are positions in a list of specifications. This list may have more than embedding and head at its ends
  (Megatron-DeepSpeed's has a cast, a norm and another cast), so positions are counted from the blocks that
  ``type:REGEX`` finds.
* ``torch-csv``: the schedule table that torch's pipeline runtime loads, a row of operations per rank.
* ``vllm``: ``VLLM_PP_LAYER_PARTITION``, the layers of each stage; no stage is empty, embedding first and head last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from .._common.errors import UsageError
from ..formats.plan import CUSTOM, V_SCHEDULES, Plan, position_of
from ..formats.profile import Header, Item
from ..schedules.registry import build_order

ENDS = ("embedding", "head")
TORCH_NAMES: Mapping[tuple[str, bool], str] = {
    ("gpipe", False): "GPipe",
    ("1f1b", False): "1F1B",
    ("1f1b", True): "Interleaved1F1B",
    ("interleaved-1f1b", True): "Interleaved1F1B",
    ("zero-bubble", False): "InterleavedZeroBubble",
    ("zero-bubble", True): "InterleavedZeroBubble",
    ("zb-v", True): "ZBVZeroBubble",
    ("dualpipe-v", True): "DualPipeV",
}
"""The schedule of torch with the same order of operations, by name and whether a worker has several stages."""
_DEEPSPEED = '''\
from deepspeed.pipe import PipelineModule


class PlannedPipelineModule(PipelineModule):
    """Stages as planned; with Megatron-DeepSpeed derive it from GPTModelPipe.

    partition_method must be type:REGEX, which finds the {count} blocks among the layer specifications.
    """

    cuts = {cuts}  # of {stages} stages, over embedding, {count} blocks and head

    def _partition_layers(self, method="type:transformer"):
        if not method.startswith("type:"):
            raise ValueError(f"partition_method must be type:REGEX, is {{method}}")
        blocks = self._find_layer_type(method.split(":", 1)[1])
        first = blocks[0]
        if blocks != list(range(first, first + {count})) or self.num_stages != {stages}:
            raise ValueError(f"planned for {count} blocks in a row on {stages} stages, not for {{blocks}}")
        end = len(self._layer_specs)
        self.parts = [0 if cut == 0 else end if cut == {whole} else first + cut - 1 for cut in self.cuts]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])'''


def stage_items(plan: Plan, header: Header) -> list[list[Item]]:
    """The items of each stage."""
    by_name = {item.name: item for item in header.items}
    return [[by_name[name] for name in stage.items] for stage in plan.stages]


def whole_layers(plan: Plan, header: Header) -> list[list[str]]:
    """The layers of each stage, in order.

    Raises:
        UsageError: a stage begins inside a layer.
    """
    result = []
    earlier: set[str] = set()
    for stage, items in enumerate(stage_items(plan, header)):
        layers = list(dict.fromkeys(item.layer for item in items))
        split = [layer for layer in layers if layer in earlier]
        if split:
            raise UsageError(
                f"stage {stage} begins inside {split[0]}, which it does not support; plan with --granularity layer"
            )
        earlier.update(layers)
        result.append(layers)
    return result


def _kinds(header: Header) -> dict[str, str]:
    return {item.layer: item.kind for item in header.items}


def layer_counts(plan: Plan, header: Header) -> list[int]:
    """The number of layers of each stage, without embedding and head."""
    kinds = _kinds(header)
    return [sum(kinds[layer] not in ENDS for layer in layers) for layers in whole_layers(plan, header)]


def _one_stack(header: Header, framework: str) -> None:
    """Refuse models that are not an embedding, layers and a head, in this order."""
    kinds = [_kinds(header)[layer] for layer in dict.fromkeys(item.layer for item in header.items)]
    inside = kinds[1:-1]
    if len(kinds) < 2 or (kinds[0], kinds[-1]) != ENDS or set(inside) & set(ENDS):
        raise UsageError(f"{framework} supports only models with one embedding, one stack of layers and one head")


def _runs(plan: Plan, framework: str, schedules: Sequence[str]) -> None:
    """Refuse plans with a schedule that the framework does not support."""
    if plan.schedule not in schedules:
        raise UsageError(f"{framework} does not support {plan.schedule}; plan with --schedule {' or '.join(schedules)}")


def _ends_first_and_last(plan: Plan, header: Header, framework: str) -> None:
    kinds, layers = _kinds(header), whole_layers(plan, header)
    first, last = [kinds[layer] for layer in layers[0]], [kinds[layer] for layer in layers[-1]]
    if "embedding" not in first or "head" not in last:
        raise UsageError(
            f"{framework} builds the embedding on the first stage and the head on the last, but they are empty in"
            " the plan; plan with --min-layers 1"
        )


def _no_empty_stage(plan: Plan, framework: str, counts: Sequence[int] | None = None) -> None:
    sizes = [len(stage.items) for stage in plan.stages] if counts is None else counts
    if 0 in sizes:
        # Embedding and head are units as well, so one unit per stage does not give each stage a layer.
        what, min_layers = ("is empty", 1) if counts is None else ("has no layer", 2)
        raise UsageError(
            f"stage {sizes.index(0)} {what}, which {framework} does not support; plan with --min-layers {min_layers}"
        )


def megatron(plan: Plan, header: Header, microbatches: int, version: str | None) -> str:
    """The layout string, with the flags that belong to it.

    Args:
        plan: the partition.
        header: of the plan's profile.
        microbatches: of one step.
        version: of the target; not used.

    Raises:
        UsageError: Megatron cannot run this plan exactly.
    """
    _runs(plan, "Megatron", ("1f1b", "interleaved-1f1b"))
    _one_stack(header, "the layout of Megatron")
    workers, virtual = len(plan.workers), plan.virtual_stages_per_worker
    if plan.schedule == "interleaved-1f1b" and virtual == 1:
        raise UsageError(
            "Megatron interleaves several stages per worker; plan with --virtual-stages 2 or --schedule 1f1b"
        )
    # Our rounds may have another length (``schedules.interleaved``), Megatron's have one microbatch per rank.
    if virtual > 1 and microbatches % workers:
        raise UsageError(
            f"Megatron interleaves {workers} microbatches at a time, but {microbatches} is not a multiple of that;"
            f" plan with a multiple of {workers}"
        )
    counts = layer_counts(plan, header)
    _ends_first_and_last(plan, header, "Megatron")
    kinds = _kinds(header)
    parts = []
    for layers, count in zip(whole_layers(plan, header), counts, strict=True):
        codes = []
        if any(kinds[layer] == "embedding" for layer in layers):
            codes.append("E")
        if count:
            codes.append(f"t*{count}")
        if any(kinds[layer] == "head" for layer in layers):
            codes.append("L")
        parts.append(",".join(codes))
    return f"--pipeline-model-parallel-size {workers} --pipeline-model-parallel-layout '{'|'.join(parts)}'"


def _head_of_torchtitan(version: str | None) -> str:
    """The name of the output projection: ``output`` up to release 0.2.2, then ``lm_head``."""
    # An unknown release is refused: torchtitan ignores a module name that the model does not have, and the stage would
    # lack its head.
    if version in (None, "main"):
        return "lm_head"
    match = re.fullmatch(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", version or "")
    if match is None:
        raise UsageError(f"--target-version {version!r}: must be a release of torchtitan such as 0.2.2, or main")
    release = tuple(int(part or 0) for part in match.groups())
    if release < (0, 2, 0):
        raise UsageError(f"torchtitan {version} has no module_fqns_per_model_part; use 0.2.0 or later")
    if release > (0, 2, 2):
        raise UsageError(f"torchtitan {version} is unknown; use main, or a release from 0.2.0 to 0.2.2")
    return "output"


def torchtitan(plan: Plan, header: Header, microbatches: int, version: str | None) -> str:
    """The section ``parallelism`` as JSON: schedule, workers, and the module names of each stage.

    Args:
        plan: the partition.
        header: of the plan's profile.
        microbatches: of one step; not used, as torchtitan takes it from its batch sizes.
        version: release of torchtitan such as 0.2.2; None is main.

    Raises:
        UsageError: torchtitan cannot run this plan exactly, or the release is unknown.
    """
    _one_stack(header, "torchtitan")
    head = _head_of_torchtitan(version)
    names = {"embedding": ["tok_embeddings"], "head": ["norm", head]}
    kinds = _kinds(header)
    layers_of = whole_layers(plan, header)
    _no_empty_stage(plan, "torchtitan")
    several = plan.virtual_stages_per_worker > 1
    section: dict[str, object] = {"pipeline_parallel_degree": len(plan.workers)}
    if plan.schedule == CUSTOM:
        section |= {"pipeline_parallel_schedule": _like(plan), "pipeline_parallel_schedule_csv": "schedule.csv"}
    elif (plan.schedule, several) not in TORCH_NAMES:
        raise UsageError(
            f"torch has no schedule {plan.schedule} with {plan.virtual_stages_per_worker} stages per worker"
        )
    else:
        section["pipeline_parallel_schedule"] = TORCH_NAMES[plan.schedule, several]
    section["module_fqns_per_model_part"] = [
        [name for layer in layers for name in names.get(kinds[layer], [layer])] for layers in layers_of
    ]
    return json.dumps(section, indent=1)


def _like(plan: Plan) -> str:
    """A schedule of torch with the same placement of stages as a plan with its own operations."""
    workers = plan.workers
    placed = [stage.worker for stage in plan.stages]
    for schedule in ("interleaved-1f1b", *V_SCHEDULES):
        placement = [workers[position_of(schedule, stage, len(workers))] for stage in range(len(placed))]
        if placed == placement and (schedule not in V_SCHEDULES or plan.virtual_stages_per_worker == 2):
            return TORCH_NAMES[schedule, True]
    raise UsageError("torchtitan places stages looped or in a V; this plan does neither")


def deepspeed(plan: Plan, header: Header, microbatches: int, version: str | None) -> str:
    """A subclass that sets the parts over a list of layer specifications.

    Args:
        plan: the partition.
        header: of the plan's profile.
        microbatches: of one step; not used, as DeepSpeed calls them gradient accumulation steps in its own config.
        version: of the target; not used.

    Raises:
        UsageError: DeepSpeed cannot run this plan exactly.
    """
    if plan.virtual_stages_per_worker > 1:
        raise UsageError("DeepSpeed has one stage per worker; plan with --virtual-stages 1")
    _runs(plan, "DeepSpeed", ("1f1b",))
    _one_stack(header, "DeepSpeed")
    cuts = [0]
    for layers in whole_layers(plan, header):
        cuts.append(cuts[-1] + len(layers))
    _no_empty_stage(plan, "DeepSpeed")
    return _DEEPSPEED.format(cuts=cuts, count=cuts[-1] - 2, stages=len(plan.stages), whole=cuts[-1])


def torch_csv(plan: Plan, header: Header, microbatches: int, version: str | None) -> str:
    """One row per rank; load it with ``_load_csv(..., format="compute_only")``.

    Args:
        plan: the partition and its schedule or operations.
        header: of the plan's profile; not used.
        microbatches: of one step; the table has an operation for each.
        version: of the target; not used.

    Raises:
        UsageError: the plan's own operations are for another number of microbatches.
    """
    # ``compute_only``: torch's runtime adds sends and receives itself, from the stages' ranks.
    if plan.operations is not None:
        found = 1 + max(int(number) for line in plan.operations for number in re.findall(r"[FBIW](\d{1,9})", line))
        if found != microbatches:
            raise UsageError(f"the plan's operations are for {found} microbatches, not {microbatches}")
        return "\n".join(",".join(line.split()) for line in plan.operations)
    order = build_order(plan.schedule, len(plan.workers), plan.virtual_stages_per_worker, microbatches)
    return "\n".join(",".join(map(str, operations)) for operations in order)


def vllm(plan: Plan, header: Header, microbatches: int, version: str | None) -> str:
    """The environment variable.

    Args:
        plan: the partition.
        header: of the plan's profile.
        microbatches, version: not used; inference has neither.

    Raises:
        UsageError: vLLM cannot run this plan exactly.
    """
    if plan.virtual_stages_per_worker > 1:
        raise UsageError("vLLM has one stage per worker; plan with --virtual-stages 1")
    _one_stack(header, "vLLM")
    counts = layer_counts(plan, header)
    _ends_first_and_last(plan, header, "vLLM")
    _no_empty_stage(plan, "vLLM", counts)
    return f"VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))}"


TARGETS: Mapping[str, Callable[[Plan, Header, int, str | None], str]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "torch-csv": torch_csv,
    "vllm": vllm,
}
