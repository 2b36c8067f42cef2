"""Legacy Megatron checkpoints: ``iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt``, also the file or a zip alone."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._common.errors import DynmoError, UsageError
from ..formats.choices import ReadOptions, WriteOptions
from ..huggingface.tokenizer import carried_files
from ..io.errors import CorruptError
from ..io.remote import RemotePath
from ..megatron.config_args import config_args
from ..megatron.read import MODEL_FILES, RANK_NAME, find_iteration, is_legacy, open_legacy
from ..megatron.read_core_ranks import open_core_ranks
from ..megatron.write import plan_legacy
from ..native.checkpoint import NativeCheckpoint
from ..native.reshard import layer_counts, num_blocks
from ..tensors.copy_plan import ExportPlan
from ..torch_save.reader import open_torch
from .assemble import from_megatron, state_decisions
from .registry import MEGATRON_OPTIONS, CheckpointFormat

# In an archive such as NVIDIA's megatron_lm_345m_v0.0.zip: the files of ranks, in a folder or not.
MEMBER = re.compile(rf"(?:.*/)?({RANK_NAME.pattern}/(?:{'|'.join(map(re.escape, MODEL_FILES))}))")
_extracted: list[tempfile.TemporaryDirectory[str]] = []


def _is_legacy(path: Path) -> bool:
    if isinstance(path, RemotePath) or not path.is_file():
        return is_legacy(path)
    with suppress(DynmoError, OSError, zipfile.BadZipFile):
        if path.suffix == ".zip":
            return bool(_members(path))
        tree = open_torch(path).tree if path.suffix == ".pt" else None
        return isinstance(tree, dict) and isinstance(tree.get("model", tree.get("model0")), dict)
    return False


def _members(path: Path) -> dict[str, str]:
    """Of an archive, the names of the ranks' files -> their paths in an iteration."""
    with zipfile.ZipFile(path) as archive:
        return {name: found[1] for name in archive.namelist() if (found := MEMBER.fullmatch(name))}


@functools.cache
def _folder_of(path: Path) -> Path:
    """The iteration of a file of one rank or of an archive of ranks; a file without an iteration gets a temporary one.

    Raises:
        CorruptError: an archive of more than one iteration.
    """
    if path.name in MODEL_FILES and RANK_NAME.fullmatch(path.absolute().parent.name):
        return path.absolute().parents[1]
    _extracted.append(tempfile.TemporaryDirectory(prefix=f"{path.name}-"))
    folder = Path(_extracted[-1].name)
    if path.suffix != ".zip":
        (folder / "mp_rank_00").mkdir()
        (folder / "mp_rank_00" / MODEL_FILES[0]).symlink_to(path.absolute())
        return folder
    members = _members(path)
    if len(set(members.values())) != len(members):
        raise CorruptError(f"{path}: has more than one iteration; extract it, and give one")
    with zipfile.ZipFile(path) as archive:
        for name, rank_file in members.items():
            (folder / rank_file).parent.mkdir(exist_ok=True)
            with archive.open(name) as source, (folder / rank_file).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    return folder


def _read(path: Path, options: ReadOptions) -> tuple[NativeCheckpoint, list[str]]:
    place = path
    if not isinstance(path, RemotePath) and path.is_file():
        if options.step is not None:
            raise UsageError(f"{path}: --step selects a step of a run directory; this is a file")
        place = _folder_of(path)
    iteration = find_iteration(place, options.step)
    found = open_core_ranks(place, options) or open_legacy(place, options, config_args(options, iteration))
    return from_megatron(found, path, iteration, options)


def write_legacy(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan a legacy Megatron directory on the topology of ``options``.

    Raises:
        UnsupportedError: sizes that the ranks do not divide, or a tensor without a map.
        UsageError: an unknown checkpoint version, or a partition that does not fit the model.
    """
    if options.checkpoint_version not in (0, 1, 2, 3):
        raise UsageError(f"--checkpoint-version {options.checkpoint_version:g}: must be 0, 1.0, 2.0 or 3.0")
    counts = stage_layer_counts(checkpoint.manifest["model"], options.pp * options.vpp, options.partition)
    files, small = plan_legacy(
        checkpoint,
        counts=counts,
        tensor_parallel_size=options.tp,
        virtual_stages_per_worker=options.vpp,
        version=float(options.checkpoint_version),
        dtype=options.dtype,
        with_optimizer=options.with_optimizer,
    )
    decisions = {
        "checkpoint_version": float(options.checkpoint_version),
        "layers_per_stage": counts,
        "tensor_parallel_size": options.tp,
        **state_decisions(checkpoint, options),
    }
    small |= carried_files(checkpoint, options.tokenizer, f"iter_{checkpoint.manifest['step']:07d}")
    return ExportPlan(files=tuple(files), small_files=small, decisions=decisions)


def stage_layer_counts(model: Mapping[str, Any], num_stages: int, partition: str | None) -> list[int]:
    """Number of layers of each stage; by default a T5 is cut between encoder and decoder, as Megatron requires.

    Args:
        model: the ``model`` of a manifest.
        num_stages: number of pipeline ranks times virtual stages of each.
        partition: the value of ``--partition``; None splits evenly.

    Raises:
        UsageError: ``partition`` is not one number for each stage, or does not add up to the layers of the model.
    """
    if partition is not None or model["family"] != "t5" or num_stages == 1:
        return layer_counts(num_blocks(model), num_stages, partition)
    # In proportion to the layers, with at least one stage for each side: no stage may have layers of both.
    encoder = min(max(1, round(num_stages * model["num_layers"] / max(1, num_blocks(model)))), num_stages - 1)
    sides = ((model["num_layers"], encoder), (model["num_decoder_layers"], num_stages - encoder))
    return [count for layers, stages in sides for count in layer_counts(layers, stages, None)]


LEGACY_MEGATRON = CheckpointFormat(
    name="legacy",
    description="legacy Megatron-LM, versions 0 to 3.0 (GPT, BERT, T5, Llama); files of each rank of Megatron-core",
    marker="latest_checkpointed_iteration.txt, mp_rank_*, model_optim_rng.pt, an archive of it",
    detect=_is_legacy,
    read=_read,
    write=write_legacy,
    topology=("tp", "pp", "vpp", "partition"),
    stores_optimizer=True,
    has_steps=True,
    options=MEGATRON_OPTIONS,
)
