"""Options of the run directory, checkpoints and the dry run."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..._common.document import MAX_RANKS
from .. import panels
from ..options import option

ReportFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run directory, checkpoints and dry run."""

    PANEL: ClassVar[str] = panels.CHECKPOINTS

    deepspeed_config: str | None = option(
        "DeepSpeed JSON file: batch, precision, ZeRO, optimizer, clipping, curriculum.",
        default=None,
        refers_to="place",
        common=True,
        panel=panels.CONFIGURATION,
    )
    dry_run: bool = option(
        "Print parameters, FLOPs and memory per rank; do not train.", default=False, common=True, panel=panels.DRY_RUN
    )
    dry_run_device: str = option(
        "Device of --dry-run: h200, h100, a100, cpu, or a TOML file.", default="h200", common=True, panel=panels.DRY_RUN
    )
    dry_run_processes: int | None = option(
        "World size of --dry-run; none: tensor x context x pipeline.",
        default=None,
        minimum=1,
        maximum=MAX_RANKS,
        common=True,
        panel=panels.DRY_RUN,
    )
    dry_run_format: ReportFormat = option("Output format of --dry-run.", default="text", panel=panels.DRY_RUN)
    run_dir: str | None = option(
        "Run directory; none: --save, else runs/UTC-model.", default=None, refers_to="place", common=True
    )
    save: str | None = option("Alias of --run-dir.", default=None, refers_to="place")
    load: str | None = option(
        "Checkpoint or run to load: native, Megatron, DeepSpeed or Hugging Face.",
        default=None,
        refers_to="place",
        common=True,
    )
    use_checkpoint_args: bool = option(
        "Take model options that are not given from the checkpoint of --load.", default=False
    )
    exit_on_missing_checkpoint: bool | None = option(
        "Exit if --load has no checkpoint; none: unless it is --save.", default=None
    )
    cache_dir: str | None = option(
        "Folder of converted checkpoints; none: $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo.",
        default=None,
        refers_to="place",
    )
    tensorboard_dir: str | None = option(
        "Folder of TensorBoard event files; none: not written.",
        default=None,
        refers_to="place",
        common=True,
        panel=panels.LOGGING,
    )
    log_rotate_mb: float = option(
        "MB at which profile, metrics and events are rotated; 0: never.",
        default=128.0,
        minimum=0,
        panel=panels.LOGGING,
    )
    profile_parts: int = option(
        "Rotated parts of the profile to keep; older ones are deleted.", default=8, minimum=1, panel=panels.LOGGING
    )
    metrics_parts: int | None = option(
        "Rotated parts of metrics and of events to keep; none: all.", default=None, minimum=1, panel=panels.LOGGING
    )
    verbose: bool = option(
        "Print every option at each start; run.json has them, too.", default=False, panel=panels.LOGGING
    )
    finetune: bool = option("Load only the weights from --load and start at step 0.", default=False, common=True)
    no_load_optim: bool = option("Do not load the optimizer state from --load.", default=False)
    allow_changed_options: bool = option(
        "Resume with other data, seed or techniques than the checkpoint's.", default=False
    )
    no_load_rng: bool = option(
        "Accepted for compatibility and ignored; checkpoints have no generator state.", default=False
    )
    no_save_optim: bool = option("Do not save the optimizer state.", default=False)
    no_save_rng: bool = option(
        "Accepted for compatibility and ignored; checkpoints have no generator state.", default=False
    )
    async_save: bool = option(
        "Write checkpoints asynchronously from a copy in host memory.", default=False, common=True
    )
    save_interval: int | None = option(
        "Steps between checkpoints; none: only at the end.", default=None, minimum=1, common=True
    )
    peer_checkpoint_interval: int | None = option(
        "Steps between state copies to another rank's memory; none: no copies.", default=None, minimum=1
    )
    keep_checkpoints: int | None = option(
        "Number of checkpoints to keep; none: all.", default=None, minimum=1, common=True
    )
