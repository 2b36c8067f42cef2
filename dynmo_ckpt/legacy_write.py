"""Plans a legacy Megatron GPT checkpoint on any topology, in the row order of any checkpoint version. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .copyplan import OutputTensor
from .faults import UnsupportedError
from .io.pickles import Name
from .io.torchwrite import NewObject, NewTensor, TorchOutputFile
from .names import Rule, axis_sizes, load_map
from .native import NativeCheckpoint
from .patterns import expand, rearrange
from .reshard import SPLIT_DIMS, check_divisible
from .views import Tensor

OLDER_NAMES = (("language_model.encoder.", "language_model.transformer."), (".self_attention.", ".attention."))


def plan_legacy(
    checkpoint: NativeCheckpoint,
    *,
    counts: Sequence[int],
    tensor_parallel_size: int,
    virtual_stages_per_worker: int,
    version: float,
) -> tuple[list[TorchOutputFile], dict[str, bytes]]:
    """Plan the ranks' files, and the small file that names the iteration.

    Args:
        checkpoint: the input; pruned weights become zeros in place, optimizer state stays behind.
        counts: layers of each stage, in layer order.
        tensor_parallel_size: tensor ranks.
        virtual_stages_per_worker: chunks of each worker; its files then hold ``model0``, ``model1``, ...
        version: 0, 1.0, 2.0 or 3.0, the order of the query-key-value rows and the names of the time.

    Raises:
        UnsupportedError: sizes that do not divide, or a tensor that the map does not take.
    """
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    check_divisible(model, tensor_parallel_size)
    name_map = load_map("megatron_gpt", {0.0: "0", 1.0: "1"}.get(version, "2"))
    rules = {rule.ours: rule for rule in name_map.for_layers(model["num_layers"]) if rule.ours not in ties}
    unmapped = set(checkpoint.names("parameter", "buffer")) ^ set(rules)
    if unmapped:
        raise UnsupportedError(f"tensors that the map and the input do not share: {', '.join(sorted(unmapped)[:5])}")
    workers = len(counts) // virtual_stages_per_worker
    iteration = f"iter_{checkpoint.manifest['step']:07d}"
    files = []
    for rank in range(tensor_parallel_size):
        for worker in range(workers):
            tensors: list[OutputTensor] = []
            chunks = [
                _chunk(checkpoint, rules, counts, v * workers + worker, rank, tensor_parallel_size, version, tensors)
                for v in range(virtual_stages_per_worker)
            ]
            models = {"model": chunks[0]} if len(chunks) == 1 else {f"model{v}": c for v, c in enumerate(chunks)}
            tree = {
                "args": NewObject(Name("argparse", "Namespace"), _args(model, tensor_parallel_size, workers, version)),
                "checkpoint_version": version,
                "iteration": checkpoint.manifest["step"],
                **models,
            }
            folder = f"mp_rank_{rank:02d}" if workers == 1 else f"mp_rank_{rank:02d}_{worker:03d}"
            name = f"{iteration}/{folder}/model_optim_rng.pt"
            files.append(TorchOutputFile(name=name, tensors=tuple(tensors), tree=tree))
    return files, {"latest_checkpointed_iteration.txt": str(checkpoint.manifest["step"]).encode()}


def _chunk(
    checkpoint: NativeCheckpoint,
    rules: Mapping[str, Rule],
    counts: Sequence[int],
    stage: int,
    rank: int,
    ranks: int,
    version: float,
    tensors: list[OutputTensor],
) -> dict[str, Any]:
    """The ``model`` of one chunk; its tensors are appended to ``tensors``."""
    begin = sum(counts[:stage])
    first, last = stage == 0, stage == len(counts) - 1
    wanted = {f"layers.{begin + i}.": f"layers.{i}." for i in range(counts[stage])}
    state: dict[str, Any] = {"language_model": {}}
    for ours, rule in rules.items():
        prefix = next((prefix for prefix in wanted if ours.startswith(prefix)), None)
        is_here = prefix is not None or (ours.startswith("embedding.") and first) or (ours.startswith("head.") and last)
        if not is_here:
            continue
        name = rule.theirs if prefix is None else rule.theirs.replace(prefix, wanted[prefix], 1)
        if version < 3:
            for new, old in OLDER_NAMES:
                name = name.replace(new, old)
        _place(state, name, _tensor(checkpoint, rule, rank, ranks, tensors))
    if last and not first and "head.weight" in checkpoint.manifest["ties"]:
        copy = _tensor(checkpoint, rules["embedding.word.weight"], rank, ranks, tensors)
        state["word_embeddings_for_head"] = {"weight": copy}
    return state


def _place(state: dict[str, Any], name: str, tensor: NewTensor) -> None:
    """Put a tensor where Megatron has it: nested dictionaries down to the block list, whose keys are dotted."""
    _, part, rest = name.split(".", 2)
    inner = state["language_model"].setdefault(part, {})
    if part == "embedding":
        table, _, rest = rest.partition(".")
        inner = inner.setdefault(table, {})
    inner[rest] = tensor


def _tensor(checkpoint: NativeCheckpoint, rule: Rule, rank: int, ranks: int, tensors: list[OutputTensor]) -> NewTensor:
    """One rank's part of a tensor in the version's row order, with the storage it gets."""
    model = checkpoint.manifest["model"]
    sizes = axis_sizes(model, model["padded_vocab_size"])
    dim = next((dim for suffix, dim in SPLIT_DIMS.items() if rule.ours.endswith(suffix)), None)
    local = dict(sizes)
    if dim is not None:
        local[rule.our_axes[dim][0]] //= ranks
    at = 0 if dim is None else sum(len(group) for group in rule.our_axes[:dim])
    step = 0 if dim is None else local[rule.our_axes[dim][0]]

    def part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        whole = expand(tensor, rule.our_axes, sizes, rule.ours)
        mine = whole if dim is None else whole.narrow(at, rank * step, (rank + 1) * step)
        return rearrange(mine, rule.our_axes, rule.their_axes, local, local, rule.ours)

    content, shape = part(checkpoint.tensors[rule.ours])
    stored_mask = checkpoint.tensors.get(f"{rule.ours}.mask")
    mask = None if stored_mask is None else part(stored_mask)[0]
    number = len(tensors)
    tensors.append(OutputTensor(key=f"model_optim_rng/data/{number}", shape=shape, content=content, mask=mask))
    return NewTensor(number, content.dtype, shape)


def _args(model: Mapping[str, Any], ranks: int, workers: int, version: float) -> dict[str, Any]:
    """The arguments that Megatron's loaders compare or build the model from."""
    size = "tensor_model_parallel_size" if version >= 3 else "model_parallel_size"
    return {
        "num_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "ffn_hidden_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "kv_channels": model["hidden_size"] // model["num_attention_heads"],
        "seq_length": model["max_position_embeddings"],
        "max_position_embeddings": model["max_position_embeddings"],
        "padded_vocab_size": model["padded_vocab_size"],
        "orig_vocab_size": model["vocab_size"],
        "layernorm_epsilon": model["layernorm_epsilon"],
        "bias_gelu_fusion": model["activation"] == "gelu_tanh",
        "openai_gelu": False,
        "untie_embeddings_and_output_weights": not model["tied_embeddings"],
        "add_position_embedding": True,
        size: ranks,
        "pipeline_model_parallel_size": workers,
    }
