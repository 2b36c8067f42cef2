"""Sections of the options of training in help pages and in ``cli/OPTIONS.md``, in order."""

from __future__ import annotations

CONFIGURATION = "Configuration"
MODEL = "Model"
DATA = "Data and tokenizer"
BATCH = "Batch, length and evaluation"
OPTIMIZER = "Optimizer"
PARALLELISM = "Parallelism"
PRECISION = "Precision and memory"
TECHNIQUES = "Dynamic techniques"
COMPRESSION = "Gradient compression"
BALANCING = "Balancing"
ELASTICITY = "Elasticity and faults"
CHECKPOINTS = "Checkpoints"
LOGGING = "Logging"
DRY_RUN = "Dry run and emulation"
RETRIEVAL = "Retrieval (ict)"
TASK, FINETUNING, GENERATION = "Task", "Fine-tuning", "Generation"
INFERENCE = "Checkpoint and layout"

PANELS: tuple[str, ...] = (
    *(CONFIGURATION, MODEL, DATA, BATCH, OPTIMIZER, PARALLELISM, PRECISION, TECHNIQUES, COMPRESSION, BALANCING),
    *(ELASTICITY, CHECKPOINTS, LOGGING, DRY_RUN, RETRIEVAL),
)
TASK_PANELS: tuple[str, ...] = (TASK, FINETUNING, GENERATION, INFERENCE, *PANELS)
