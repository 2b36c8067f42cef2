"""Options of Megatron-LM's own parser that this package does not declare, in groups with one reason.

Each line is a group of names. ``--name/1`` has one value, ``--name/*`` all words before the next flag, and
``--name/1=X`` changes nothing with the value ``X``, which is then accepted. ``flags.py`` has the options that
scripts use most, and has precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from .flag import CompatFlag, ignored, refused

_FASTER = "no effect on results"
_UNSUPPORTED = "changes the model and is not supported: leave it out"
_CONTENT_OF_LOGS = "not logged; metrics.jsonl and profile.jsonl have the records of a run"

_IGNORED: Mapping[str, str] = {
    _FASTER: """
        --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad
        --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
        --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs
        --disable-tp-comm-split-rs --tp-comm-bootstrap-backend/1 --tp-comm-overlap-cfg/1
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad
        --ep-overlap-early-attn-memory-release --defer-embedding-wgrad-compute --wgrad-deferral-limit/1
        --overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication --flash-attention-version/1
        --use-fused-weighted-squared-relu --fused-residual-rmsnorm --use-transformer-engine-op-fuser
        --use-kitchen-attention --kitchen-attention-backend/1 --high-priority-a2a-comm-stream
        --use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp --moe-use-grouped-tensor
        --moe-single-grouped-weight --moe-single-grouped-bias --moe-shared-expert-glu-interleave-size/1
        --moe-mlp-glu-interleave-size/1 --moe-router-padding-for-quantization --moe-router-padding-for-fp8
        --moe-enable-deepep --moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs
        --moe-router-fusion --moe-flex-dispatcher-num-sms/1 --moe-deepep-num-sms/1 --moe-hybridep-num-sms/1
        --moe-hybridep-num-blocks-permute/1 --moe-hybridep-num-blocks-unpermute/1
        --moe-hybridep-num-sms-preprocessing/1 --moe-ncclep-zero-copy --no-clone-scatter-output-in-embedding
        --disable-clone-scatter-output-in-embedding --use-te-activation-func --symmetric-ar-type/1
        --mla-down-proj-fusion --mlp-chunks-for-training/1 --disable-jit-fuser --ddp-num-buckets/1
        --ddp-bucket-size/1 --ddp-pad-buckets-for-high-nccl-busbw --overlap-param-gather-with-optimizer-step
        --no-align-param-gather --no-align-grad-reduce --disable-align-grad-reduce --disable-symmetric-registration
        --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub --create-all-gather-group --no-gradient-reduce-div-fusion
        --suggested-communication-unit-size/1 --keep-fp8-transpose-cache --torch-fsdp2-no-reshard-after-forward
        --megatron-fsdp-version/1 --no-use-layer-wise-param-layout --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail --optimizer-cuda-graph
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --no-manual-gc-eval
        --disable-manual-gc-eval --train-sync-interval/1 --use-sharp --sharp-enabled-group/1
        --high-priority-stream-groups/* --pipeline-model-parallel-comm-backend/1 --nccl-communicator-config-path/1
        --disable-gloo-process-groups --microbatch-group-size-per-virtual-pipeline-stage/1
    """,
    "masters are float32, and gradients are accumulated in float32": """
        --main-grads-dtype/1 --main-params-dtype/1 --megatron-fsdp-main-params-dtype/1
        --megatron-fsdp-main-grads-dtype/1
        --ddp-reduce-scatter-with-fp32-accumulation --gtp-remat-reduce-scatter-with-fp32-accumulation
        --ddp-param-name-patterns-for-fp32-local-accumulation/*
    """,
    "gradients are always averaged over replicas": "--ddp-average-in-collective",
    "ranks are ordered tensor, context, pipeline, data; the order changes no result": "--use-tp-pp-dp-mapping",
    "runs are always deterministic": "--deterministic-mode",
    "random numbers do not depend on the engine": "--te-rng-tracker",
    "--cuda-graph captures attention and MLP blocks": """
        --cuda-graph-warmup-steps/1 --external-cuda-graph --cuda-graph-modules/*
    """,
    "no effect without text generation; see dynmo-train generate": """
        --flash-decode --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
        --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend/1
        --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type/1
        --inference-cuda-graph-scope/1 --moe-pad-experts-for-cuda-graph-inference --mlp-chunks-for-prefill/1
        --inference-rng-tracker --inference-batch-times-seqlen-threshold/1 --max-tokens-to-oom/1
        --use-legacy-static-engine --inference-max-requests/1 --inference-max-seq-length/1
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb/1
        --inference-dynamic-batching-paused-buffer-size-gb/1 --inference-dynamic-batching-mamba-memory-ratio/1
        --inference-dynamic-batching-block-size/1 --inference-dynamic-batching-max-requests/1
        --inference-dynamic-batching-max-tokens/1 --inference-dynamic-batching-num-cuda-graphs/1
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens/1
        --inference-dynamic-batching-unified-memory-level/1 --enable-chunked-prefill --num-speculative-tokens/1
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy/1
        --inference-dynamic-batching-prefix-caching-coordinator-policy/1
        --inference-dynamic-batching-prefix-caching-routing-alpha/1
        --inference-dynamic-batching-prefix-caching-mamba-gb/1
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count/1
        --inference-dynamic-batching-cuda-graph-sizing-distribution/1
        --inference-dynamic-batching-sampling-backend/1 --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode/1 --inference-dynamic-batching-logprobs-mode/1
        --inference-logging-step-interval/1 --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port/1 --mamba-inference-conv-states-dtype/1 --mamba-inference-ssm-states-dtype/1
        --inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus --inference-shards/1
        --cache-mla-latents
    """,
    _CONTENT_OF_LOGS: """
        --log-progress --disable-log-loss-scale-to-tensorboard --log-memory-interval/1 --log-device-memory-used
        --log-max-attention-logit --log-energy --log-straggler --straggler-ctrlr-port/1 --straggler-minmax-count/1
        --disable-straggler-on-startup --otel-enabled --otel-service-name/1 --otel-span-groups/1 --no-one-logger
        --one-logger-project/1 --one-logger-run-name/1 --one-logger-async --app-tag-run-name/1
        --app-tag-run-version/1 --config-logger-dir/1 --dump-param-to-param-group-map/1
        --result-rejected-tracker-filename/1 --run-workload-inspector-server
        --check-weight-hash-across-dp-replicas-interval/1 --gpu-sniff-test-interval/1
    """,
    "profile.jsonl has the times of all layers: --profile-interval": """
        --use-pytorch-profiler --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
        --pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges
    """,
    "--dry-run computes the peak memory of each worker": "--memory-snapshot-path/1",
    "a resumed run has the schedule of its own options": "--override-opt-param-scheduler",
    "SIGTERM always saves and exits": "--exit-signal-handler-for-dataloader --exit-signal-handler-for-training",
    "collectives end after 10 minutes, and a watchdog reports hangs": "--distributed-timeout-seconds-after-init/1",
    "a flight recorder is always on; dynmo-train launch reports what ranks waited for": """
        --flight-recorder-dump-path/1 --flight-recorder-trace-buffer-size/1 --no-flight-recorder-dump-on-timeout
        --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec
    """,
    "checkpoints have the native format; every process writes and reads its own layers": """
        --no-ckpt-fully-parallel-save --ckpt-fully-parallel-save --ckpt-fully-parallel-load
        --ckpt-fully-parallel-load-exchange-algo/1 --ckpt-fully-parallel-load-per-rank-objects
        --ckpt-fully-parallel-save-process-group/1 --ckpt-fully-parallel-load-process-group/1
        --ckpt-assume-constant-structure --ckpt-pg-tensors-cache-path/1 --ckpt-pg-tensors-cache-create
        --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
        --ckpt-drop-redundant-extra-state --use-dist-ckpt --dist-ckpt-format/1 --dist-ckpt-workers/1
        --async-strategy/1 --use-persistent-ckpt-worker --async-ckpt-cpu-priority/1 --async-ckpt-io-priority/1
        --async-ckpt-use-cpu-shm --verify-integrity
    """,
    "the tokenizer is named by the options of data": """
        --no-save-tokenizer-assets --disable-save-tokenizer-assets --no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args
    """,
    "an index of samples is built once and cached: --data-cache-path": """
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --num-dataset-builder-threads/1
        --mid-level-dataset-surplus/1
    """,
    "tokenizers read their own files": """
        --tokenizer-metadata/1 --tokenizer-hf-no-use-fast --use-gigatoken --allow-ambiguous-pad-tokens
        --null-tokenizer-pad-id/1 --tiktoken-num-special-tokens/1
    """,
    "nothing is compiled or sent to a service": "--disable-msc",
}
_REFUSED: Mapping[str, str] = {
    _UNSUPPORTED: """
        --qk-l2-norm --qk-clip --qk-clip-alpha/1 --qk-clip-threshold/1 --attention-output-gate
        --experimental-attention-variant/1 --dsa-indexer-n-heads/1 --dsa-indexer-head-dim/1 --dsa-indexer-topk/1
        --dsa-indexer-topk-freq/1 --dsa-indexer-skip-topk-offset/1 --dsa-indexer-loss-coeff/1
        --dsa-indexer-use-sparse-loss --dsa-kernel-backend/1=none --dsa-indexer-rope-interleaved
        --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu
        --disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon/1 --dsa-indexer-k-norm-fp32
        --linear-attention-freq/1 --linear-conv-kernel-dim/1 --linear-key-head-dim/1 --linear-value-head-dim/1
        --linear-num-key-heads/1 --linear-num-value-heads/1 --embedding-init-method-std/1 --use-mup
        --mup-width-mult/1=1.0 --mup-base-hidden-size/1 --mup-embedding-mult/1=1.0 --mup-output-mult/1=1.0
        --mup-base-head-dim/1 --mup-attn-scale-power/1=1.0 --moe-input-jitter-eps/1=0.0 --moe-apply-probs-on-input
        --moe-latent-size/1 --moe-router-quantile-balancing-ema/1=0.0 --moe-router-force-biased/1
        --moe-expert-rank-capacity-factor/1 --enable-mhc-connections --mhc-num-residual-streams/1
        --mhc-sinkhorn-iterations/1 --mhc-init-gating-factor/1 --mhc-recompute-layer-num/1 --mrope-section/*
        --gtp-remat-opt-in-modules/* --moe-use-upcycling --moe-upcycling-granularity/1
        --output-logit-dtype/1 --freeze-all-layers --export-qk-l2-norm --export-moe-apply-probs-on-input
    """,
    "not supported: each of --mtp-num-layers predictions has its own block and trains the embedding and head": """
        --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm
    """,
    "not supported: use --pipeline-model-parallel-layout, with m where the predictions are": "--mtp-standalone",
    "layers of Mamba are not supported: leave it out": """
        --hybrid-layer-pattern/1 --hybrid-override-pattern/1 --is-hybrid-model --mamba-state-dim/1
        --mamba-head-dim/1 --mamba-num-groups/1 --mamba-num-heads/1 --disable-mamba-mem-eff-path
        --mtp-hybrid-override-pattern/1 --mamba-training-ssm-states-dtype/1 --gdp-num-householder/1 --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute/1
    """,
    "layers with different shapes are not supported: leave it out": """
        --heterogeneous-layers-config-path/1 --heterogeneous-layers-config-encoded-json/1
    """,
    "not supported: use --context-parallel-size": """
        --hierarchical-context-parallel-sizes/* --max-seqlen-per-dp-cp-rank/1 --hybrid-context-parallel
    """,
    "not supported: use --tensor-model-parallel-size": """
        --tensor-parallel-num-weight-shards/1=1 --expert-tensor-parallel-num-weight-shards/1=1
    """,
    "offloading is not supported: leave it out; --zero-stage shards parameters and optimizer state": """
        --cpu-offloading-num-layers/1=0 --cpu-offloading-retain-pinned-cpu-buffers
        --fine-grained-activation-offloading --offload-modules/* --min-offloaded-tensor-size/1
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks/1 --activation-offload-fraction/1
        --fine-grained-offloading-max-inflight-offloads/1 --moe-paged-stash --moe-paged-stash-page-size/1
        --moe-paged-stash-buffer-size-factor-cuda/1 --moe-paged-stash-buffer-size-factor-cpu/1
        --optimizer-offload-fraction/1 --use-torch-optimizer-for-cpu-offload
    """,
    "not supported: use --bf16, --fp16, or --fp8 with --fp8-recipe": """
        --fp4-format/1 --fp4-recipe/1 --fp4-quantizer-factory/1 --fp4-param-gather --fp8-quantizer-factory/1
        --fp8-output-proj --te-precision-config-file/1 --reuse-grad-buf-for-mxfp8-param-ag
        --moe-dispatch-fwd-dtype/1=bf16 --moe-combine-bwd-dtype/1=bf16
    """,
    "not supported: use --hsdp with --zero-stage": """
        --outer-dp-sharding-strategy/1=no_shard --enable-full-sharding-in-hsdp
    """,
    "reinforcement learning is not supported: leave it out": """
        --perform-rl-step --rl-prompts-per-eval/1 --grpo-prompts-per-step/1 --grpo-group-size/1
        --rl-generation-lag/1 --rl-max-inflight-requests/1 --rl-submission-granularity/1
        --rl-consumption-granularity/1 --rl-durable-rollout-bank --rl-rollout-bank-dir/1
        --rl-rollout-bank-max-bytes/1 --grpo-iterations/1 --grpo-clamp-eps-lower/1 --grpo-clamp-eps-upper/1
        --grpo-kl-beta/1 --grpo-entropy-term-weight/1 --grpo-filter-groups-with-same-reward --langrl-env-config/1
        --rl-default-temperature/1 --rl-default-top-p/1 --rl-default-top-k/1
        --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode/1 --rl-persist-cuda-graphs
        --no-rl-persist-cuda-graphs --rl-partial-rollouts --no-rl-partial-rollouts
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction
        --rl-importance-sampling-truncation-coef/1 --rl-use-sequence-packing --no-rl-use-sequence-packing
        --rl-sequence-packing-max-sequences-per-bin/1 --rl-sequence-packing-algo/1 --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size/1
        --rl-inference-pipeline-model-parallel-size/1 --rl-inference-expert-model-parallel-size/1
        --rl-inference-expert-tensor-model-parallel-size/1 --rl-inference-model-unified-memory-level/1
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
        --refit-method/1 --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token
        --no-rl-skip-bos-token --rl-profile --rl-profile-dir/1 --rl-inference-parsers/*
        --batch-invariant-mode --batch-invariant-backend/1=te_native --moe-enable-routing-replay
    """,
    "images are not supported: leave it out": """
        --num-classes/1 --img-h/1 --img-w/1 --num-channels/1 --patch-dim/1 --classes-fraction/1
        --data-per-class-fraction/1 --no-data-sharding --vision-pretraining --vision-pretraining-type/1
        --vision-backbone-type/1 --swin-backbone-type/1 --mask-type/1 --mask-factor/1 --iter-per-epoch/1
        --dino-local-img-size/1 --dino-local-crops-number/1 --dino-head-hidden-size/1 --dino-bottleneck-size/1
        --dino-freeze-last-layer/1 --dino-norm-last-layer --dino-warmup-teacher-temp/1 --dino-teacher-temp/1
        --dino-warmup-teacher-temp-epochs/1
    """,
    "distillation is not supported: leave it out": """
        --logits-save-top-k/1 --logits-save-top-p/1 --logits-save-top-p-min-k/1 --logits-save-dir/1
        --logits-save-dtype/1 --logits-load-dir/1 --logits-load-decode-threads/1 --logits-load-prefetch-factor/1
        --logits-load-msc-prefetch-depth/1 --logits-load-kd-loss-alpha/1 --logits-load-ignore-errors
        --export-kd-teacher-load/1 --export-kd-teacher-model-config/1 --export-kd-teacher-ckpt-format/1
        --export-kd-cfg/1
    """,
    "traces of routing are not written: leave it out; metrics.jsonl has the tokens of each expert": """
        --moe-routing-trace-path/1 --moe-routing-trace-max-training-iters/1 --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
        --save-tokens-per-expert-interval/1
    """,
    "not supported: leave it out; dynmo-ckpt diff compares checkpoints": """
        --save-params-interval/1 --save-activations-interval/1 --save-wgrads-interval/1 --save-dgrads-interval/1
    """,
    "not supported: use --weight-decay, which leaves out biases and norms": """
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type/1
    """,
    "not supported: use --optimizer adam, sgd or muon": "--lion-beta1/1 --lion-beta2/1",
    "not supported: every sample counts; use a --global-batch-size that the data-parallel size divides": """
        --decrease-batch-size-if-needed
    """,
    "gradients are checked for NaN and infinity only: leave it out, or use --loss-spike-threshold": """
        --check-for-large-grads
    """,
    "a checkpoint is saved at SIGTERM: leave it out": "--exit-signal/1",
    "not supported: give the options of the run again, from its run.json": """
        --use-mp-args-from-checkpoint-args
    """,
    "not supported: use --save-interval and --keep-checkpoints": """
        --persistent-save-interval/1 --save-retain-interval/1 --non-persistent-save-interval/1
        --non-persistent-ckpt-type/1 --non-persistent-global-ckpt-dir/1 --non-persistent-local-ckpt-dir/1
        --non-persistent-local-ckpt-algo/1
    """,
    "copies of checkpoints on other nodes have their own options: see --help-all": """
        --replication --replication-jump/1 --replication-factor/1
    """,
    "not supported: use --load with the directory of the step": "--ckpt-step/1 --override-ckpt-iteration/1",
    "not supported: use --finetune, which starts with new optimizer state": "--load-main-params-from-ckpt",
    "must be given to dynmo-ckpt: use dynmo-ckpt convert": """
        --ckpt-convert-format/1 --ckpt-convert-save/1 --ckpt-convert-update-legacy-dist-opt-format
    """,
    "validation has the batch size of training, at every --eval-interval: leave it out": """
        --start-eval-at-iter/1=0 --eval-global-batch-size/1 --eval-micro-batch-size/1
    """,
    "not supported: use --eval-iters with one validation set": """
        --full-validation --multiple-validation-sets --validation-set-names/*
    """,
    "not supported: train each phase as a run, with --finetune and its own data": """
        --phase-transition-iterations/1
    """,
    "not supported: use --data-path with weights and paths": """
        --data-args-path/1 --per-split-data-args-path/1 --per-dataset-sequences-path/1
    """,
    "not supported: leave it out": "--sample-rate/1=1.0 --test-mode --fake-process-group --enable-msc",
    "not supported: use --reset-attention-mask, which separates documents": "--dataloader-inter-document-masking",
    "not supported: copy the dataset to a file system, and use --data-cache-path": "--object-storage-cache-path/1",
    "fill-in-the-middle is not supported: prepare the data in that form": """
        --fim-data --fim-rate/1 --fim-spm-rate/1 --fim-split-sample/1 --fim-fragment-rate/1 --fim-no-prefix/1
        --fim-prefix-token/1 --fim-middle-token/1 --fim-suffix-token/1 --fim-pad-token/1 --fim-eod-token/1
    """,
    "not supported: use --vocab-size and --make-vocab-size-divisible-by": """
        --padded-vocab-size/1 --no-pad-vocab-size --disable-pad-vocab-size
    """,
    "not supported: write the special tokens into the tokenizer's file": """
        --tokenizer-special-tokens/* --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-include-special-tokens
        --null-tokenizer-eod-id/1
    """,
    "conversations are written by dynmo-prep binarize-chat --chat-template, and trained with --sft": """
        --sft-tokenizer-prompt-format/1 --chat-template/1
    """,
    "embeddings of BERT are not written: leave it out": "--output-bert-embeddings --bert-embedder-type/1",
    "not supported: use --config with a TOML file": "--yaml-cfg/1",
    "not supported: use --max-restarts of dynmo-train launch": """
        --inprocess-restart --inprocess-max-iterations/1 --inprocess-monitor-thread-interval/1
        --inprocess-monitor-process-interval/1 --inprocess-progress-watchdog-interval/1
        --inprocess-heartbeat-interval/1 --inprocess-soft-timeout/1 --inprocess-hard-timeout/1
        --inprocess-heartbeat-timeout/1 --inprocess-barrier-timeout/1 --inprocess-completion-timeout/1
        --inprocess-last-call-wait/1 --inprocess-termination-grace-time/1 --inprocess-granularity/1
        --inprocess-active-world-size/1 --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts
        --ft-num-warmup-iters/1
    """,
    "not supported: convert checkpoints with dynmo-ckpt convert, and leave it out": """
        --export-legacy-megatron --export-te-mcore-model --export-default-te-spec --export-model-type/1=GPTModel
        --export-offline-model
    """,
    "training with quantized weights is not supported: leave it out": """
        --export-kv-cache-quant/1=none --export-real-quant-cfg/1=None --export-quant-cfg/1 --modelopt-enabled
        --qad-train-target/1 --freeze-base-for-mtp
    """,
    "not supported: use --sft, which trains on conversations": """
        --finetune-hf-dataset/1 --finetune-data-split/1 --finetune-data-files/*
    """,
    "faults are not injected: leave it out": """
        --fault-injector-ranks/1 --fault-injector-num-ranks/1 --fault-injector-fault-types/1
        --fault-injector-fault-probabilities/1 --fault-injector-fault-delay/1
        --fault-injector-delay-start-iteration/1 --fault-injector-mtti-seconds/1 --fault-injector-offset-seconds/1
        --fault-injector-seed/1
    """,
}


def _split(word: str) -> tuple[str, int | None, str | None]:
    """Name, number of values (None: all words before the next flag) and neutral value of a word of a group."""
    name, _, rest = word.partition("/")
    count, equals, neutral = rest.partition("=")
    return name, None if count == "*" else int(count or 0), neutral if equals else None


def _flags() -> dict[str, CompatFlag]:
    found: dict[str, CompatFlag] = {}
    for reason, words in _IGNORED.items():
        for name, count, _ in map(_split, words.split()):
            found[name] = ignored(reason, count)
    for reason, words in _REFUSED.items():
        for name, count, neutral in map(_split, words.split()):
            found[name] = refused(reason, count, neutral)
    return found


MEGATRON_FLAGS: Mapping[str, CompatFlag] = _flags()
