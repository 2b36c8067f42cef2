"""Flags of other projects that this package does not declare: each becomes other arguments, is ignored or is refused.

``FLAGS`` has those of Megatron-LM, Megatron-DeepSpeed and Optimus-CC, of the Hugging Face Trainer, and torchtitan's
(``--training.seq_len``).
Options that this package declares under the same name need no entry. ``cli/FLAGS.md`` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping

from .flag import CompatFlag, becomes, ignored, refused
from .hugging_face import HUGGING_FACE_FLAGS
from .megatron_flags import MEGATRON_FLAGS
from .megatron_model import COMBINED_FLAGS
from .torchtitan import TORCHTITAN

_OVERLAP = "no effect on results"
_ZERO = "buffer sizes follow from the model"
_CONVERT = "must be given to dynmo-ckpt: use dynmo-ckpt merge, split, reshard or convert"
_GENERATE = "must be given to text generation: use dynmo-train generate"
_LAUNCH = "must be given to the launcher: use dynmo-train launch local --nproc N, or torchrun, before the command"
_MODEL = "changes the model and is not supported: leave it out"
_SCALES = "scales are computed from each tensor, without a history"
_KERNEL = "device and dtype choose the implementation of the experts"
_FSDP = "not supported: use --zero-stage 1, 2 or 3"
_OFFLOAD = "offloading is not supported: leave it out; --zero-stage shards parameters and optimizer state"
_CONTEXT = "not supported: use --context-parallel-size"
_ANALYSIS = "data analysis is not supported: use a curriculum in --deepspeed_config"
_DISTILL = "distillation is not supported: leave it out"
_RETRO = "RETRO is not supported: leave it out"
_STAGES = "placement changes no result; the partition counts the cost of each layer"
_TENSORBOARD = "not logged; --tensorboard-dir has losses, learning rate, loss scale and gradient norm"
_TRACE = "profile.jsonl has the times of all layers: --profile-interval"
_SCHEDULE = "a resumed run has the schedule of its own options"
_FORMAT = "--load detects the format of a checkpoint, and any topology loads"
_ONE_COMPRESSOR = "PowerSGD is the only compression"
_INJECTION = "faults are not injected: leave it out"
_PERPLEXITY = "not supported: run dynmo-train evaluate wikitext for each checkpoint"

FLAGS: Mapping[str, CompatFlag] = {
    **MEGATRON_FLAGS,
    **HUGGING_FACE_FLAGS,
    **COMBINED_FLAGS,
    # Older names of Megatron
    "--model-parallel-size": becomes("--tensor-model-parallel-size", values=1),
    "--batch-size": becomes("--micro-batch-size", values=1),
    "--warmup": becomes("--lr-warmup-fraction", values=1),
    "--vocab": becomes("--vocab-file", values=1),
    "--norm-epsilon": becomes("--layernorm-epsilon", values=1),
    "--expert-parallel-size": becomes("--expert-model-parallel-size", values=1),
    "--num-virtual-stages-per-pipeline-rank": becomes(
        "--schedule", "interleaved-1f1b", "--virtual-stages-per-worker", values=1, neutral="1"
    ),
    # DynMo
    "--load-balance": becomes("--balance", "online"),
    "--pruning-type": refused(
        "only gradual pruning is supported: leave it out; --pruning-start-iter and --pruning-end-iter are its steps",
        1,
        neutral="gradual",
    ),
    # Inverse cloze task
    "--ict-head-size": becomes("--biencoder-projection-dim", values=1),
    "--ict-load": becomes("--finetune", "--load", values=1),
    "--report-topk-accuracies": becomes("--retriever-report-topk-accuracies", values=None),
    **dict.fromkeys(
        (
            "--evidence-data-path",
            "--embedding-path",
            "--block-data-path",
            "--indexer-batch-size",
            "--indexer-log-interval",
        ),
        refused("retrieval with a trained ict model is not supported: leave it out", 1),
    ),
    # Activation checkpointing
    "--checkpoint-activations": becomes("--recompute-granularity", "full"),
    "--activations-checkpoint-method": becomes("--recompute-granularity", "full", values=1, drop_values=True),
    "--recompute-activations": becomes("--recompute-granularity", "selective"),
    "--deepspeed-activation-checkpointing": becomes("--recompute-granularity", "full"),
    "--recompute-method": ignored("each layer is checkpointed separately", 1),
    "--recompute-num-layers": ignored("each layer is checkpointed separately", 1),
    "--checkpoint-num-layers": ignored("each layer is checkpointed separately", 1),
    "--activations-checkpoint-num-layers": ignored("each layer is checkpointed separately", 1),
    "--partition-activations": ignored("checkpointed activations are not partitioned: one input per layer"),
    "--distribute-saved-activations": ignored("checkpointed activations are not partitioned: one input per layer"),
    "--checkpoint-in-cpu": refused(
        "activation offloading is not supported: leave it out, or reduce --micro-batch-size"
    ),
    "--synchronize-each-layer": ignored("layers need no synchronization"),
    "--contigious-checkpointing": ignored("torch's allocator limits fragmentation"),
    "--profile-backward": ignored("profile.jsonl has the backward time of every layer: --profile-interval"),
    # DeepSpeed
    "--deepspeed": ignored("the engine is torch's; --deepspeed_config is still read"),
    "--zero-reduce-bucket-size": ignored(_ZERO, 1),
    "--zero-allgather-bucket-size": ignored(_ZERO, 1),
    "--zero-contigious-gradients": ignored(_ZERO),
    "--zero-reduce-scatter": ignored(_ZERO),
    "--no-pipeline-parallel": becomes("--pipeline-model-parallel-size", "1"),
    # Devices, kernels and overlap
    "--distributed-backend": ignored("the backend depends on the device: gloo on CPU, NCCL on CUDA", 1),
    "--local_rank": ignored("taken from the environment", 1),
    "--local-rank": ignored("taken from the environment", 1),
    "--use-mcore-models": ignored("there is one implementation"),
    "--use-legacy-models": ignored("there is one implementation"),
    "--transformer-impl": ignored("there is one implementation", 1),
    "--enable-cuda-graph": becomes("--cuda-graph"),
    "--cuda-graph-impl": refused(
        "use --cuda-graph, which captures layer by layer",
        1,
        neutral="none",
        by_value=dict.fromkeys(("local", "transformer_engine"), becomes("--cuda-graph", values=1, drop_values=True)),
    ),
    "--cuda-graph-scope": ignored("--cuda-graph captures attention and MLP blocks", None),
    "--use-flash-attn": ignored("scaled_dot_product_attention selects the kernel"),
    "--attention-backend": ignored("scaled_dot_product_attention selects the kernel", 1),
    "--attention-softmax-in-fp32": ignored("always on"),
    "--no-masked-softmax-fusion": ignored(_OVERLAP),
    "--no-bias-dropout-fusion": ignored(_OVERLAP),
    "--no-bias-swiglu-fusion": ignored(_OVERLAP),
    "--no-rope-fusion": ignored(_OVERLAP),
    "--no-gradient-accumulation-fusion": ignored(_OVERLAP),
    **dict.fromkeys(
        ("--async-tensor-model-parallel-allreduce", "--no-async-tensor-model-parallel-allreduce"), ignored(_OVERLAP)
    ),
    "--moe-use-legacy-grouped-gemm": ignored(_OVERLAP),
    "--overlap-grad-reduce": becomes("--DDP-impl", "torch"),
    "--overlap-param-gather": ignored(_OVERLAP),
    "--tp-comm-overlap": becomes("--async-tensor-parallel"),
    "--use-cpu-initialization": ignored("weights are always initialized on CPU"),
    "--no-query-key-layer-scaling": ignored("attention scores are scaled once"),
    "--apply-query-key-layer-scaling": ignored("attention scores are scaled once"),
    "--exit-signal-handler": ignored("SIGTERM always saves and exits"),
    "--no-initialization": ignored(_OVERLAP),
    "--log-timers-to-tensorboard": ignored("step times are always logged"),
    "--log-validation-ppl-to-tensorboard": ignored("validation perplexity is always logged"),
    "--tensorboard-queue-size": ignored("records are written immediately", 1),
    "--experiment_name": ignored("--run-dir names the run", 1),
    "--ckpt-format": ignored("checkpoints have the native format; dynmo-ckpt convert writes others", 1),
    "--muon-use-nesterov": becomes("--muon-nesterov"),
    "--muon-no-split-qkv": becomes("--no-muon-split-qkv"),
    "--muon-fp32-matmul-prec": ignored("Newton-Schulz iterations are computed in bfloat16", 1),
    "--muon-use-syrk": ignored(_OVERLAP),
    "--muon-scalar-optimizer": refused(
        "not supported: other parameters are updated by AdamW; remove it", 1, neutral="adam"
    ),
    "--use-distributed-optimizer": becomes("--zero-stage", "1"),
    "--num-distributed-optimizer-instances": becomes("--hsdp", values=1),
    "--keep-last": ignored("the last batch is always used"),
    # Architecture of decoders
    "--use-rotary-position-embeddings": becomes("--position-embedding-type", "rotary"),
    "--apply-layernorm-1p": ignored("the same model: norms are stored as whole weights and have no weight decay"),
    "--qk-layernorm": becomes("--qk-norm", "head"),
    # Flags of other programs in the same scripts
    **dict.fromkeys(("--model-type", "--target-pipeline-model-parallel-size"), refused(_CONVERT, 1)),
    **dict.fromkeys(("-i_g", "-p", "-i", "-o"), refused(_CONVERT, 1)),
    **dict.fromkeys(
        ("--out-seq-length", "--temperature", "--genfile", "--num-samples", "--top_p", "--top_k"),
        refused(_GENERATE, 1),
    ),
    **dict.fromkeys(("--recompute", "--greedy"), refused(_GENERATE, 0)),
    **dict.fromkeys(
        ("--task", "--valid-data"), refused("must be given to evaluation: use dynmo-train evaluate or finetune", 1)
    ),
    **dict.fromkeys(
        ("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--num_nodes", "--num_gpus"),
        refused(_LAUNCH, 1),
    ),
    # Experts
    "--moe-expert-parallel-size": becomes("--expert-model-parallel-size", values=1),
    "--moe-loss-coeff": becomes("--moe-aux-loss-coeff", values=1),
    # The weight of one expert is its probability among all of them.
    "--topk": becomes("--moe-router-topk", values=1, value_arguments={"1": ("--moe-router-pre-softmax",)}),
    "--num-experts-switch": becomes("--moe-router-topk", "1", "--moe-router-pre-softmax", "--num-experts", values=1),
    "--disable-moe-token-dropping": refused(
        "without --moe-expert-capacity-factor and --moe-train-capacity-factor no token is dropped: leave all out"
    ),
    "--disable-moe-top2-2nd-expert-sampling": ignored("experts are not sampled"),
    "--create-moe-param-group": ignored("every layer has its own optimizer state"),
    "--mlp-type": refused("residual experts are not supported: leave it out", 1, neutral="standard"),
    "--use-tutel": ignored(_KERNEL),
    "--moe-grouped-gemm": ignored(_KERNEL),
    "--moe-permute-fusion": ignored(_KERNEL),
    "--moe-token-dispatcher-type": ignored(_KERNEL, 1),
    "--moe-flex-dispatcher-backend": ignored(_KERNEL, 1),
    "--moe-shared-expert-overlap": ignored("shared experts always run while rows travel"),
    "--moe-layer-recompute": ignored("--recompute-granularity covers all layers"),
    "--moe-router-dtype": ignored("routing is always computed in float32", 1),
    "--moe-per-layer-logging": ignored("not logged by layer"),
    "--expert-tensor-parallel-size": refused(
        "use --tensor-model-parallel-size and --expert-model-parallel-size", 1, neutral="1"
    ),
    "--enable-expert-tensor-parallelism": refused("use --tensor-model-parallel-size"),
    # Architecture
    "--num-key-value-heads": becomes("--num-query-groups", values=1),
    "--rotary-position-embeddings-theta": becomes("--rotary-base", values=1),
    **dict.fromkeys(
        (
            "--apply-residual-connection-post-layernorm",
            "--embedding-weights-in-fp32",
            "--fp32-residual-connection",
            "--init-method-xavier-uniform",
        ),
        refused(_MODEL),
    ),
    "--softmax-type": refused(
        "not one of Megatron-LM's: use vanilla, learnable (--attention-sinks) or off-by-one (--softmax-off-by-one)",
        1,
        neutral="vanilla",
        by_value={
            "learnable": becomes("--attention-sinks", values=1, drop_values=True),
            "off-by-one": becomes("--softmax-off-by-one", values=1, drop_values=True),
        },
    ),
    "--spec": refused("layers from a Python module are not supported: leave it out", None, neutral="local"),
    # Forks of Megatron-LM: Pai-Megatron-Patch and Swiss AI
    "--qk-nope-head-dim": becomes("--qk-head-dim", values=1),
    "--qk-rope-head-dim": becomes("--qk-pos-emb-head-dim", values=1),
    "--num-mtp-predictor": becomes("--mtp-num-layers", values=1),
    "--use-multi-token-prediction": ignored("--num-mtp-predictor has their number"),
    "--train-mode": refused("not supported: use --sft, which trains on conversations", 1, neutral="pretrain"),
    "--dataset": refused("not supported: binarize the data with dynmo-prep, and use --data-path", 1, neutral="MMAP"),
    "--max-padding-length": ignored("samples have --seq-length tokens", 1),
    "--extra-vocab-size": refused("not supported: use --vocab-size with the number of all token ids", 1, neutral="0"),
    "--patch-tokenizer-type": refused(
        "not supported: use --tokenizer-type HuggingFaceTokenizer and --tokenizer-model with its folder", 1
    ),
    "--trigger-path": refused("not supported: SIGTERM saves a checkpoint and ends the run; leave it out", 1),
    "--qknorm-impl": ignored(_OVERLAP, 1),
    "--xielu": refused(_MODEL),
    "--goldfish-loss": refused("tokens are not left out of the loss at random: leave it out"),
    **dict.fromkeys(
        ("--goldfish-k", "--goldfish-h"), refused("tokens are not left out of the loss at random: leave it out", 1)
    ),
    "--random-ltd": refused("random layer token drop is not supported: use --mod-capacity"),
    **dict.fromkeys(("--kd", "--mos"), refused(_DISTILL)),
    **dict.fromkeys(
        (
            "--load-teacher",
            "--num-layers-teacher",
            "--num-attention-heads-teacher",
            "--hidden-size-teacher",
            "--kd-alpha-ce",
            "--kd-beta-ce",
            "--kd-temp",
        ),
        refused(_DISTILL, 1),
    ),
    "--num-experts-teacher": refused(_DISTILL, None),
    **dict.fromkeys(("--retro-add-retriever", "--retro-return-doc-ids"), refused(_RETRO)),
    **dict.fromkeys(("--retro-workdir", "--retro-cyclic-train-iters", "--retro-num-neighbors"), refused(_RETRO, 1)),
    # Precision
    **dict.fromkeys(
        ("--fp8-margin", "--fp8-interval", "--fp8-amax-history-len", "--fp8-amax-compute-algo"), ignored(_SCALES, 1)
    ),
    "--fp8-e4m3": becomes("--fp8-format", "e4m3"),
    "--fp8-hybrid": becomes("--fp8-format", "hybrid"),
    "--fp8-param-gather": ignored("parameters are gathered in bfloat16"),
    **dict.fromkeys(("--no-fp8-wgrad", "--disable-fp8-wgrad"), becomes("--fp8-recipe", "rowwise_with_gw_hp")),
    "--megatron-fsdp-grad-comm-dtype": refused(
        "gradients are reduced in float32 or bfloat16: use auto, fp32 or bf16 (--grad-reduce-in-bf16)",
        1,
        neutral="auto",
        by_value={
            "fp32": ignored("gradients are reduced in float32", 1),
            "bf16": becomes("--grad-reduce-in-bf16", values=1, drop_values=True),
        },
    ),
    "--fp16-lm-cross-entropy": ignored("the loss is always computed in float32"),
    "--disable-bf16-reduced-precision-matmul": ignored("torch's default"),
    # Schedule, batches and data
    "--override-opt_param-scheduler": ignored(_SCHEDULE),
    "--override-lr-scheduler": ignored(_SCHEDULE),
    "--no-load-lr-state": ignored(_SCHEDULE),
    "--use-checkpoint-opt_param-scheduler": becomes("--use-checkpoint-opt-param-scheduler"),
    "--use-checkpoint-lr-scheduler": becomes("--use-checkpoint-opt-param-scheduler"),
    "--head-lr-mult": refused("not supported: leave it out", 1, neutral="1.0"),
    "--dataloader-type": refused("samples are read once, in order: leave it out", 1, neutral="single"),
    "--no-mmap-bin-files": ignored("--data-impl selects how a dataset is read"),
    "--mmap-warmup": ignored("no effect on results"),
    "--no-create-attention-mask-in-dataloader": ignored("masks are made on the device"),
    "--tiktoken-pattern": ignored("no effect without the TikTokenizer, which --tokenizer-type refuses", 1),
    "--trust-remote-code": ignored("tokenizers run no code of a model"),
    **dict.fromkeys(("--data-efficiency-curriculum-learning", "--return-data-index"), refused(_ANALYSIS)),
    **dict.fromkeys(
        (
            "--train-data-exact-num-epochs",
            "--train-doc-idx-path",
            "--train-idx-path",
            "--train-sample-idx-path",
            "--train-shuffle-idx-path",
        ),
        refused(_ANALYSIS, 1),
    ),
    # Parallelism and placement
    "--enable-zbh1-pipeline": becomes("--schedule", "zero-bubble"),
    "--enable-zbh1-exact-semantics": ignored("steps are always exact"),
    "--cp-comm-type": ignored("keys and values are always gathered", None),
    "--ds-sequence-parallel-size": refused(_CONTEXT, 1, neutral="1"),
    "--force-ds-sequence-parallel": refused(_CONTEXT),
    "--ds-sequence-parallel-fpdt": refused(_CONTEXT),
    "--ds-sequence-parallel-fpdt-chunk-size": refused(_CONTEXT, 1),
    "--ds-sequence-parallel-fpdt-offloading": refused(_CONTEXT),
    "--standalone-embedding-stage": ignored(_STAGES),
    "--pipeline-model-parallel-split-rank": ignored(_STAGES, 1),
    "--data-parallel-random-init": refused("replicas have equal weights: leave it out"),
    "--data-parallel-sharding-strategy": becomes(
        "--zero-stage",
        values=1,
        renamed_values={"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"},
    ),
    "--use-megatron-fsdp": ignored("--data-parallel-sharding-strategy or --zero-stage selects what is sharded"),
    "--use-torch-fsdp2": becomes("--zero-stage", "3"),
    "--fsdp-double-buffer": ignored(_OVERLAP),
    "--fsdp-manual-registration": ignored(_OVERLAP),
    "--init-model-with-meta-device": ignored("each process initializes only its own layers"),
    "--use-nccl-ub": ignored(_OVERLAP),
    "--cpu-optimizer": refused(_OFFLOAD),
    "--cpu_torch_adam": refused(_OFFLOAD),
    "--optimizer-cpu-offload": refused(_OFFLOAD),
    "--remote-device": refused(_OFFLOAD, 1, neutral="none"),
    "--ds_fused_adam": ignored("there is one implementation"),
    "--use-pin-memory": ignored(_OVERLAP),
    "--scattered-embeddings": ignored(_OVERLAP),
    "--split-transformers": ignored(_OVERLAP),
    "--memory-centric-tiled-linear": ignored(_OVERLAP),
    "--tile-factor": ignored(_OVERLAP, 1),
    # Kernels and communication
    "--cross-entropy-loss-fusion": ignored(_OVERLAP),
    "--cross-entropy-fusion-impl": ignored(_OVERLAP, 1),
    "--disable-mem-efficient-ln": ignored(_OVERLAP),
    "--distribute-checkpointed-activations": ignored(
        "checkpointed activations are not partitioned: one input per layer"
    ),
    "--recompute-modules": ignored("selective recomputation covers all but matrix products", None),
    "--empty-unused-memory-level": ignored(_OVERLAP, 1),
    "--enable-experimental": ignored(_OVERLAP),
    "--lazy-mpu-init": ignored("processes join at the start", None),
    "--manual-gc": ignored(_OVERLAP),
    "--manual-gc-interval": ignored(_OVERLAP, 1),
    "--no-contiguous-buffers-in-local-ddp": ignored(_OVERLAP),
    "--no-persist-layer-norm": ignored(_OVERLAP),
    "--no-scatter-gather-tensors-in-pipeline": ignored(_OVERLAP),
    "--onnx-safe": ignored("models are not exported to ONNX", 1),
    "--overlap-p2p-communication": ignored(_OVERLAP),
    "--export-force-local-attention": ignored("scaled_dot_product_attention selects the kernel"),
    "--use-flash-attn-builder": ignored("scaled_dot_product_attention selects the kernel"),
    "--use-flash-attn-triton": ignored("scaled_dot_product_attention selects the kernel"),
    "--use-flash-attn-v1": ignored("scaled_dot_product_attention selects the kernel"),
    "--use-flash-attn-v2": ignored("scaled_dot_product_attention selects the kernel"),
    "--use-ring-exchange-p2p": ignored(_OVERLAP),
    # Logging, checkpoints, clusters
    **dict.fromkeys(
        (
            "--log-batch-size-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--log-num-zeros-in-grad",
            "--log-optimizer-states-to-tensorboard",
            "--log-params-norm",
            "--log-world-size-to-tensorboard",
            "--no-log-learnig-rate-to-tensorboard",
            "--no-log-loss-scale-to-tensorboard",
        ),
        ignored(_TENSORBOARD),
    ),
    "--tensorboard-log-interval": ignored("records are written every --log-interval steps", 1),
    "--timing-log-level": ignored(_TRACE, 1),
    "--timing-log-option": ignored(_TRACE, 1),
    "--no-barrier-with-level-1-timing": ignored(_TRACE),
    "--profile": ignored(_TRACE, None),
    "--profile_steps": ignored(_TRACE, 1),
    "--profile-step-start": ignored(_TRACE, 1),
    "--profile-step-end": ignored(_TRACE, 1),
    "--profile-ranks": ignored(_TRACE, None),
    "--record-memory-history": ignored("--dry-run computes the peak memory of each worker"),
    "--logging-level": ignored("the log has one level", 1),
    "--auto-detect-ckpt-format": ignored(_FORMAT),
    "--dist-ckpt-strictness": ignored("every tensor must be in the checkpoint", 1),
    "--universal-checkpoint": ignored(_FORMAT),
    "--load-tag": refused("not supported: use --load with the directory of the step", 1),
    "--reset-iteration": refused("not supported: use --finetune, which starts at step 0 with new optimizer state"),
    "--kill-switch-file": refused("not supported: send SIGTERM, which saves and exits", 1),
    "--adlr-autoresume": refused("not supported: use --exit-duration-in-mins, or --max-restarts of dynmo-train launch"),
    "--adlr-autoresume-interval": refused(
        "not supported: use --exit-duration-in-mins, or --max-restarts of dynmo-train launch", 1
    ),
    # Optimus-CC
    **dict.fromkeys(
        ("--grad_comp_type", "--inter_grad_comp_type", "--emb_grad_comp_type"),
        refused(f"{_ONE_COMPRESSOR}: leave it out", 1, neutral="PowerSGD"),
    ),
    "--comp_seed": refused("projections follow from --seed: leave it out", 1),
    "--inter_grad_comp_warm_up": refused(
        "compression between stages begins at the first step: leave it out", 1, neutral="0.0"
    ),
    "--emb_grad_comp": refused("not supported: use --emb_comm_opt, which sends the tied embedding once"),
    **dict.fromkeys(
        ("--emb_grad_comp_rank", "--emb_grad_comp_warm_up"),
        refused("not supported: use --emb_comm_opt, which sends the tied embedding once", 1),
    ),
    "--emb_use_error_feedback": refused("not supported: use --emb_comm_opt, which sends the tied embedding once"),
    "--inter_acti_comp": refused("activations are not compressed: use --inter_grad_comp"),
    **dict.fromkeys(
        ("--inter_acti_comp_rank", "--inter_acti_comp_type", "--inter_acti_comp_warm_up"),
        refused("activations are not compressed: use --inter_grad_comp", 1),
    ),
    **dict.fromkeys(
        ("--mp_acti_comp", "--mp_grad_comp"), refused("tensor-parallel ranks do not compress: leave it out")
    ),
    **dict.fromkeys(
        (
            "--mp_acti_comp_rank",
            "--mp_acti_comp_type",
            "--mp_acti_comp_warm_up",
            "--mp_grad_comp_rank",
            "--mp_grad_comp_type",
            "--mp_grad_comp_warm_up",
        ),
        refused("tensor-parallel ranks do not compress: leave it out", 1),
    ),
    # Faults
    "--check-for-spiky-loss": becomes(
        "--loss-spike-threshold",
        "10.0",
        reason="deviations above the median of the last losses; Megatron compares with the maximum of the first 100",
    ),
    "--rerun-mode": refused(
        "not supported during training: use dynmo-train replay-step, which executes a step again",
        1,
        neutral="disabled",
    ),
    "--error-injection-rate": refused(_INJECTION, 1, neutral="0"),
    "--error-injection-type": refused(_INJECTION, 1),
    "--iterations-to-skip": refused("not supported: use --skip-train-samples BEGIN:END", None),
    "--save_json_log": ignored("metrics.jsonl in the run directory has every step"),
    "--save_json_path": ignored("metrics.jsonl in the run directory has every step", 1),
    "--get_val_ppls": refused(_PERPLEXITY),
    **dict.fromkeys(
        (
            "--src_ckpt_path",
            "--val_ckpt_interval",
            "--val_ppls_save_path",
            "--val_start_iteration",
            "--val_target_iteration",
        ),
        refused(_PERPLEXITY, 1),
    ),
    # Evaluation, data preparation and inference
    **dict.fromkeys(
        ("--epochs", "--pretrained-checkpoint", "--strict-lambada"),
        refused("must be given to evaluation: use dynmo-train evaluate or finetune", None),
    ),
    **dict.fromkeys(
        ("--train-data",), refused("must be given to evaluation: use dynmo-train evaluate or finetune", None)
    ),
    "--inference": refused(_GENERATE),
    "--ds-inference": refused(_GENERATE),
    # torchtitan
    **{f"--{key}": known for key, known in TORCHTITAN.items()},
}
