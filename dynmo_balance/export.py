"""A plan in the words of other frameworks.

* ``megatron``: the value of ``--pipeline-model-parallel-layout``: stages between bars, ``E`` embedding, ``t`` a layer,
  ``L`` the loss with the head; with virtual stages in the order of the stages.
* ``torchtitan``: ``module_fqns_per_model_part``, a list of module names for each stage.
* ``deepspeed``: the ``parts`` of a ``PipelineModule``. DeepSpeed has no option for them, so a subclass sets them.
* ``torch-csv``: the schedule table that torch's pipeline runtime loads, a row of operations for each rank.
* ``vllm``: the value of ``VLLM_PP_LAYER_PARTITION``, layers of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from .errors import UsageError
from .formats.plan import Plan
from .formats.profile import Header, Item
from .schedules import order_of

ENDS = ("embedding", "head")


def stage_items(plan: Plan, header: Header) -> list[list[Item]]:
    """The items of each stage."""
    by_name = {item.name: item for item in header.items}
    return [[by_name[name] for name in stage.items] for stage in plan.stages]


def whole_layers(plan: Plan, header: Header) -> list[list[str]]:
    """The layers of each stage, in order; raises ``UsageError`` where a stage begins inside a layer."""
    result = []
    seen: set[str] = set()
    for stage, items in enumerate(stage_items(plan, header)):
        layers = list(dict.fromkeys(item.layer for item in items))
        split = [layer for layer in layers if layer in seen]
        if split:
            raise UsageError(
                f"stage {stage} begins inside {split[0]}, which this framework cannot do; plan with --granularity layer"
            )
        seen.update(layers)
        result.append(layers)
    return result


def _kinds(header: Header) -> dict[str, str]:
    return {item.layer: item.kind for item in header.items}


def layer_counts(plan: Plan, header: Header) -> list[int]:
    """How many layers, embedding and head not counted, each stage has."""
    kinds = _kinds(header)
    return [sum(kinds[layer] not in ENDS for layer in layers) for layers in whole_layers(plan, header)]


def _one_stack(header: Header, framework: str) -> None:
    if sum(item.kind == "embedding" for item in header.items) > 1:
        raise UsageError(f"{framework} takes plans of models with one stack of layers; this one has several embeddings")


def megatron(plan: Plan, header: Header, microbatches: int) -> str:
    """The layout string, and the flags that belong to it."""
    _one_stack(header, "the layout of Megatron")
    kinds = _kinds(header)
    parts = []
    for layers, count in zip(whole_layers(plan, header), layer_counts(plan, header), strict=True):
        words = []
        if any(kinds[layer] == "embedding" for layer in layers):
            words.append("E")
        if count:
            words.append(f"t*{count}")
        if any(kinds[layer] == "head" for layer in layers):
            words.append("L")
        parts.append(",".join(words))
    return f"--pipeline-model-parallel-size {len(plan.workers)} --pipeline-model-parallel-layout '{'|'.join(parts)}'"


def torchtitan(plan: Plan, header: Header, microbatches: int) -> str:
    """The module names of each stage, as JSON."""
    _one_stack(header, "torchtitan")
    names = {"embedding": ["tok_embeddings"], "head": ["norm", "lm_head"]}
    kinds = _kinds(header)
    parts = [
        [name for layer in layers for name in names.get(kinds[layer], [layer])] for layers in whole_layers(plan, header)
    ]
    return json.dumps({"module_fqns_per_model_part": parts}, indent=1)


def deepspeed(plan: Plan, header: Header, microbatches: int) -> str:
    """The parts over a list of layer specifications, and the subclass that sets them."""
    if plan.virtual_stages_per_worker > 1:
        raise UsageError("DeepSpeed has one stage on each worker; plan with --virtual-stages 1")
    parts = [0]
    for layers in whole_layers(plan, header):
        parts.append(parts[-1] + len(layers))
    return "\n".join(
        [
            "from deepspeed.pipe import PipelineModule",
            "",
            "",
            "class PlannedPipelineModule(PipelineModule):",
            f"    parts = {parts}",
            "",
            "    def _partition_layers(self, method):",
            "        stage = self._topo.get_coord(self.global_rank).pipe",
            "        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])",
        ]
    )


def torch_csv(plan: Plan, header: Header, microbatches: int) -> str:
    """A row for each rank; load with ``_load_csv(..., format="compute_only")``."""
    if plan.operations is not None:
        return "\n".join(",".join(line.split()) for line in plan.operations)
    order = order_of(plan.schedule, len(plan.workers), plan.virtual_stages_per_worker, microbatches)
    return "\n".join(",".join(map(str, operations)) for operations in order)


def vllm(plan: Plan, header: Header, microbatches: int) -> str:
    """The environment variable."""
    if plan.virtual_stages_per_worker > 1:
        raise UsageError("vLLM has one stage on each worker; plan with --virtual-stages 1")
    _one_stack(header, "vLLM")
    return f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layer_counts(plan, header)))}"


TARGETS: Mapping[str, Callable[[Plan, Header, int], str]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "torch-csv": torch_csv,
    "vllm": vllm,
}
