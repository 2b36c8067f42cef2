"""Arguments of transformers' ``Trainer`` and of its examples (``run_clm.py``), and their options of this package.

Only those whose meaning is the same become options. Their defaults are not taken: a command line of the Trainer has a
model and data that are given in another way here. Underscores count as dashes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .flag import CompatFlag, becomes, ignored, refused

_EPOCHS = "use --train-iters, or --train-samples with the samples of all epochs; finetune has --epochs"
_HUB = "not supported: convert the checkpoint with dynmo-ckpt convert after the run, which can upload it"
_STRATEGY = "the interval decides: --save-interval, --eval-interval and --log-interval, in steps"
_PHASES = "pretrain trains; --eval-iters 0 turns the evaluation off, and --skip-train the training"
_SCHEDULES = {"constant_with_warmup": "constant", "inverse_sqrt": "inverse-square-root"}
_BETTER = "not supported: checkpoints are kept by age, --keep-checkpoints"

HUGGING_FACE_FLAGS: Mapping[str, CompatFlag] = {
    # Length, batches and schedule
    "--learning-rate": becomes("--lr", values=1),
    "--max-steps": becomes("--train-iters", values=1),
    "--num-train-epochs": refused(_EPOCHS, 1),
    "--per-device-train-batch-size": becomes("--micro-batch-size", values=1),
    "--per-device-eval-batch-size": ignored("evaluation has the batch size of training", 1),
    "--warmup-steps": becomes("--lr-warmup-iters", values=1),
    "--warmup-ratio": becomes("--lr-warmup-fraction", values=1),
    "--lr-scheduler-type": becomes("--lr-decay-style", values=1, renamed_values=_SCHEDULES),
    "--lr-scheduler-kwargs": refused("not supported: give --min-lr, --lr-decay-iters or --lr-wsd-decay-iters", 1),
    "--max-grad-norm": becomes("--clip-grad", values=1),
    "--adam-epsilon": becomes("--adam-eps", values=1),
    "--optim": becomes(
        "--optimizer",
        values=1,
        renamed_values={name: "adam" for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf")},
    ),
    "--label-smoothing-factor": refused("not supported: leave it out", 1, neutral="0"),
    "--neftune-noise-alpha": refused("not supported: leave it out", 1),
    "--group-by-length": refused(
        "samples have one length: pack documents with --reset-attention-mask", None, neutral="False"
    ),
    "--length-column-name": ignored("samples have one length", 1),
    # Model and data
    "--model-name-or-path": becomes("--use-checkpoint-args", "--finetune", "--load", values=1, reason="a local folder"),
    "--config-name": refused("give the sizes, or --load with --use-checkpoint-args", 1),
    "--tokenizer-name": becomes("--tokenizer-model", values=1, reason="a local folder"),
    "--dataset-name": becomes("--hf-dataset", values=1),
    "--dataset-config-name": becomes("--hf-dataset-name", values=1),
    "--train-file": refused("use --hf-dataset with the file, or binarize it with dynmo-prep and use --data-path", 1),
    "--validation-file": refused("use --hf-valid-dataset with the file, or --valid-data-path", 1),
    "--max-seq-length": becomes("--seq-length", values=1),
    "--max-train-samples": refused("use --train-samples, which ends the training, or a smaller dataset", 1),
    "--max-eval-samples": refused("use --eval-iters, the number of batches of an evaluation", 1),
    "--data-seed": refused("use --seed, which also orders the samples", 1),
    "--dataloader-num-workers": becomes("--num-workers", values=1),
    "--dataloader-drop-last": ignored("every batch is complete", None),
    "--dataloader-pin-memory": ignored("no effect on results", 1),
    "--dataloader-prefetch-factor": ignored("no effect on results", 1),
    "--remove-unused-columns": ignored("only the text of a document is read", 1),
    # Memory and precision
    "--gradient-checkpointing": becomes(
        "--recompute-granularity", "full", values=None, drop_values=True, by_value={"False": ignored("it is off", None)}
    ),
    "--gradient-checkpointing-kwargs": ignored("each layer is checkpointed separately", 1),
    "--fsdp": refused("use --zero-stage 3 for full_shard, --zero-stage 2 for shard_grad_op", None),
    "--fsdp-config": refused("use --zero-stage, with --hsdp for replicas of the shards", 1),
    "--tf32": ignored("torch's default", 1),
    "--fp16-full-eval": ignored("evaluation has the type of training", None),
    "--bf16-full-eval": ignored("evaluation has the type of training", None),
    "--half-precision-backend": ignored("there is one implementation", 1),
    "--use-liger-kernel": ignored("no effect on results", None),
    "--attn-implementation": ignored("scaled_dot_product_attention selects the kernel", 1),
    # Run, logs and checkpoints
    "--output-dir": becomes("--run-dir", values=1),
    "--overwrite-output-dir": refused(
        "a run is never overwritten: give --load to resume it, or another --run-dir", None, neutral="False"
    ),
    "--resume-from-checkpoint": becomes("--load", values=1),
    "--save-steps": becomes("--save-interval", values=1),
    "--save-total-limit": becomes("--keep-checkpoints", values=1),
    "--save-only-model": becomes("--no-save-optim", values=None, drop_values=True),
    "--save-safetensors": ignored("tensors are always stored in safetensors", 1),
    "--load-best-model-at-end": refused(_BETTER, None, neutral="False"),
    "--metric-for-best-model": refused(_BETTER, 1),
    "--logging-steps": becomes("--log-interval", values=1),
    "--logging-dir": becomes("--tensorboard-dir", values=1),
    "--logging-first-step": ignored("metrics.jsonl has every step", None),
    "--log-level": ignored("the log has one level", 1),
    "--report-to": ignored("--tensorboard-dir, --wandb-project and --mlflow-tracking-uri name where metrics go", None),
    "--run-name": ignored("--run-dir names the run; --wandb-exp-name names it at Weights & Biases", 1),
    "--eval-steps": becomes("--eval-interval", values=1),
    "--eval-accumulation-steps": ignored("no effect on results", 1),
    **dict.fromkeys(
        ("--eval-strategy", "--evaluation-strategy", "--save-strategy", "--logging-strategy"), ignored(_STRATEGY, 1)
    ),
    **dict.fromkeys(("--do-train", "--do-eval", "--do-predict"), ignored(_PHASES, None)),
    "--ignore-data-skip": refused(
        "not supported: use --finetune, which starts at the first sample", None, neutral="False"
    ),
    "--push-to-hub": refused(_HUB, None, neutral="False"),
    **dict.fromkeys(("--hub-model-id", "--hub-token", "--hub-strategy"), refused(_HUB, 1)),
    "--disable-tqdm": ignored("a log has lines, not bars", 1),
    "--ddp-timeout": refused("use --distributed-timeout-minutes", 1),
    "--ddp-backend": ignored("the backend depends on the device: gloo on CPU, NCCL on CUDA", 1),
    "--ddp-find-unused-parameters": ignored("every parameter has a gradient", 1),
    "--full-determinism": ignored("runs are always deterministic", None),
}
