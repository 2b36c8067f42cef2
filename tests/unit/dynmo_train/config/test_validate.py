"""Each rule over several options has a case that violates it."""

from __future__ import annotations

import pytest

from dynmo_train._common.document import DocumentError
from dynmo_train.config import DefaultContext, check, config_of, validate
from dynmo_train.config.validate import RULES
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL


def problems(world_size=1, **values):
    config = config_of(DefaultContext(world_size=world_size), **SMALL | values)
    return validate(config, world_size)


REPLICAS = {"world_size": 2, "pipeline_model_parallel_size": 1, "global_batch_size": 8}
SHARED_EXPERTS = {"expert_model_parallel_size": 2, "num_experts": 4, **REPLICAS}
CUT_TOKENS = {"sequence_parallel": True, "tensor_model_parallel_size": 2, "world_size": 2}
ICT = {"family": "ict"}
CONTEXT = {"context_parallel_size": 2, "world_size": 2}
EXPERTS = {"num_experts": 4}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
UNTIED = {"untie_embeddings_and_output_weights": True}
CASES = {
    "latent groups": (
        {"family": "llama", "multi_latent_attention": True, "num_query_groups": 1},
        "--num-query-groups",
    ),
    "latent soft caps": (
        {"family": "llama", "multi_latent_attention": True, "attn_logit_softcapping": 50.0, "attention_dropout": 0.0},
        "--attn-logit-softcapping",
    ),
    "further predictions of learned positions": ({"mtp_num_layers": 1}, "--mtp-num-layers"),
    "copies of shards": ({"peer_checkpoint_interval": 5, "zero_stage": 1, **REPLICAS}, "--peer-checkpoint-interval"),
    "copies of memories": (
        {"peer_checkpoint_interval": 5, "grad_comp": True, **REPLICAS},
        "--peer-checkpoint-interval",
    ),
    "copies of experts": ({"peer_checkpoint_interval": 5, **SHARED_EXPERTS}, "--peer-checkpoint-interval"),
    "heads": ({"num_attention_heads": 5}, "--hidden-size"),
    "positions": ({"max_position_embeddings": 31}, "--seq-length"),
    "another family's": ({"family": "bert", "num_query_groups": 2}, "--num-query-groups"),
    "groups": ({"family": "llama", "num_query_groups": 3}, "--num-query-groups"),
    "odd heads": ({"family": "llama", "kv_channels": 9}, "--kv-channels"),
    "rotary": ({"family": "bert", "position_embedding_type": "rotary"}, "--position-embedding-type"),
    "base without rotary": ({"rotary_base": 500.0}, "--rotary-base"),
    "too few experts": ({"num_experts": 2, "moe_router_topk": 3}, "--moe-router-topk"),
    "distances": (
        {"family": "t5", "position_embedding_type": "relative", "relative_attention_max_distance": 16},
        "--relative-attention-max-distance",
    ),
    "decoder": ({"family": "t5", "decoder_seq_length": 40, "max_position_embeddings": 32}, "--decoder-seq-length"),
    "batch": ({"global_batch_size": 3}, "--global-batch-size"),
    "ramp form": ({"train_iters": None, "train_samples": 99, "rampup_batch_size": "1 2"}, "--rampup-batch-size"),
    "ramp of odd sizes": (
        {"train_iters": None, "train_samples": 99, "global_batch_size": 4, "rampup_batch_size": "1 1 9"},
        "--rampup-batch-size",
    ),
    "ramp by steps": ({"global_batch_size": 4, "rampup_batch_size": "2 2 9"}, "--rampup-batch-size"),
    "form of steps": ({"step_batch_size_schedule": "0:2 x:4"}, "--step-batch-size-schedule"),
    "steps of odd sizes": (
        {**REPLICAS, "global_batch_size": 4, "step_batch_size_schedule": "0:3 64:4"},
        "--step-batch-size-schedule",
    ),
    "steps up to another size": (
        {"global_batch_size": 6, "step_batch_size_schedule": "0:2 64:4"},
        "--global-batch-size",
    ),
    "steps and a ramp": (
        {
            **{"train_iters": None, "train_samples": 99, "global_batch_size": 4},
            **{"rampup_batch_size": "2 2 9", "step_batch_size_schedule": "0:2 64:4"},
        },
        "--step-batch-size-schedule",
    ),
    "steps and accumulation": (
        {"gradient_accumulation_steps": 2, "step_batch_size_schedule": "0:2 64:4"},
        "--step-batch-size-schedule",
    ),
    "steps of another number of microbatches": (
        {"step_batch_size_schedule": "0:2 64:4", "schedule": "custom", "balance": "offline", "plan": "p"},
        "--schedule",
    ),
    "both lengths": ({"train_samples": 99}, "--train-iters"),
    "decay in samples": ({"lr_decay_samples": 9}, "--lr-decay-samples"),
    "lengths that ranks cannot share": ({**CUT_TOKENS, "curriculum_shortest": 9}, "--curriculum-shortest"),
    "steps that ranks cannot share": (
        {**CUT_TOKENS, "curriculum_shortest": 8, "curriculum_multiple": 3},
        "--curriculum-multiple",
    ),
    "long curriculum": ({"curriculum_shortest": 33}, "--curriculum-shortest"),
    "cut heads": ({"tensor_model_parallel_size": 3, "world_size": 3, "ffn_hidden_size": 96}, "--num-attention-heads"),
    "cut width": ({"tensor_model_parallel_size": 2, "world_size": 2, "ffn_hidden_size": 97}, "--ffn-hidden-size"),
    "graph on cpu": ({"cuda_graph": True, "device": "cpu"}, "--cuda-graph"),
    "graph compiled": ({"cuda_graph": True, "torch_compile": True}, "--cuda-graph"),
    "graph recomputing": ({"cuda_graph": True, "recompute_granularity": "full"}, "--cuda-graph"),
    "graph pruned": ({"cuda_graph": True, "sparsify": True}, "--cuda-graph"),
    "graph cut": ({"cuda_graph": True, "tensor_model_parallel_size": 2, "world_size": 2}, "--cuda-graph"),
    "graph sharded": ({"cuda_graph": True, "zero_stage": 2, "world_size": 2}, "--cuda-graph"),
    "graph lengths": ({"cuda_graph": True, "curriculum_shortest": 8}, "--cuda-graph"),
    "layout of too few": (
        {"pipeline_model_parallel_layout": "Et|tL", "world_size": 2, "global_batch_size": 4, "num_layers": 4},
        "--pipeline-model-parallel-layout",
    ),
    "layout of two stacks": (
        {"family": "t5", "decoder_last_pipeline_num_layers": 1, "world_size": 2, "global_batch_size": 4},
        "--decoder-last-pipeline-num-layers",
    ),
    "layout and others": (
        {
            "account_for_loss_in_pipeline_split": True,
            "decoder_first_pipeline_num_layers": 1,
            "num_layers": 3,
            "world_size": 2,
            "global_batch_size": 4,
        },
        "--decoder-first-pipeline-num-layers",
    ),
    "virtual alone": ({"num_layers_per_virtual_pipeline_stage": 2}, "--num-layers-per-virtual-pipeline-stage"),
    "virtual and uneven": (
        {"num_layers_per_virtual_pipeline_stage": 3, "world_size": 2, "global_batch_size": 4},
        "--num-layers-per-virtual-pipeline-stage",
    ),
    "virtual twice": (
        {
            "num_layers": 8,
            "num_layers_per_virtual_pipeline_stage": 2,
            "virtual_stages_per_worker": 4,
            "world_size": 2,
            "global_batch_size": 4,
        },
        "--num-layers-per-virtual-pipeline-stage",
    ),
    "virtual and one stage": (
        {
            "num_layers_per_virtual_pipeline_stage": 1,
            "schedule": "gpipe",
            "world_size": 2,
            "global_batch_size": 4,
        },
        "--virtual-stages-per-worker",
    ),
    "virtual and two stacks": (
        {"family": "t5", "num_layers_per_virtual_pipeline_stage": 2, "world_size": 2, "global_batch_size": 4},
        "--num-layers-per-virtual-pipeline-stage",
    ),
    "dual stages": (
        {"global_batch_size": 16, "schedule": "dualpipe-v", "virtual_stages_per_worker": 1},
        "--virtual-stages-per-worker",
    ),
    "dual short": ({"world_size": 2, "global_batch_size": 6, "schedule": "dualpipe-v"}, "--global-batch-size"),
    "vee": ({"schedule": "zb-v", "virtual_stages_per_worker": 1}, "--virtual-stages-per-worker"),
    "experts of nobody": ({"expert_model_parallel_size": 2, **REPLICAS}, "--expert-model-parallel-size"),
    "experts sharded": (
        {"expert_model_parallel_size": 2, "num_experts": 3, **REPLICAS},
        "--expert-model-parallel-size",
    ),
    "experts without room": ({"moe_expert_slots": 1, **SHARED_EXPERTS}, "--moe-expert-slots"),
    "copies and ZeRO": ({"moe_expert_slots": 3, "zero_stage": 1, **SHARED_EXPERTS}, "--moe-expert-slots"),
    "copies compiled": ({"moe_expert_slots": 3, "torch_compile": True, **SHARED_EXPERTS}, "--moe-expert-slots"),
    "experts placed twice": (
        {
            "expert_model_parallel_size": 2,
            "num_experts": 4,
            "balance": "online",
            "balance_experts": True,
            "expert_rebalance_interval": 5,
            **REPLICAS,
        },
        "--expert-rebalance-interval",
    ),
    "experts alone": ({"expert_model_parallel_size": 2, "num_experts": 4}, "--expert-model-parallel-size"),
    "sequence alone": ({"sequence_parallel": True}, "--sequence-parallel"),
    "processes": ({"pipeline_model_parallel_size": 2, "global_batch_size": 4}, "--pipeline-model-parallel-size"),
    "replicas": (
        {"pipeline_model_parallel_size": 1, "world_size": 2, "micro_batch_size": 2, "global_batch_size": 6},
        "--global-batch-size",
    ),
    "stages": ({"world_size": 7, "global_batch_size": 14}, "--pipeline-model-parallel-size"),
    "interleaved": (
        {"schedule": "interleaved-1f1b", "virtual_stages_per_worker": 1},
        "--virtual-stages-per-worker",
    ),
    "plain": ({"virtual_stages_per_worker": 2}, "--virtual-stages-per-worker"),
    "rounds": ({"world_size": 2, "global_batch_size": 10, "schedule": "zero-bubble"}, "--global-batch-size"),
    "min_lr": ({"min_lr": 0.1}, "--min-lr"),
    "decoupled_min_lr alone": ({"decoupled_min_lr": 1e-6}, "--decoupled-min-lr"),
    "decoupled_min_lr above peak": ({"decoupled_min_lr": 1e-3, "decoupled_lr": 1e-4}, "--decoupled-min-lr"),
    "adafactor, slices": ({"optimizer": "adafactor", "world_size": 2, "tensor_model_parallel_size": 2}, "--optimizer"),
    "adafactor, rows": (
        {"optimizer": "adafactor", "world_size": 2, "pipeline_model_parallel_size": 1, "zero_stage": 1},
        "--optimizer",
    ),
    "bf16 moments alone": ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype"),
    "bf16 second moments alone": ({"exp_avg_sq_dtype": "bf16"}, "--exp-avg-sq-dtype"),
    "bf16 moments of sgd": (
        {"optimizer": "sgd", "use_precision_aware_optimizer": True},
        "--use-precision-aware-optimizer",
    ),
    "quintic steps": ({"optimizer": "muon", "muon_num_ns_steps": 4}, "--muon-num-ns-steps"),
    "polar_express steps": (
        {"optimizer": "muon", "muon_coefficient_type": "polar_express"},
        "--muon-num-ns-steps",
    ),
    "min_lr above decoupled_lr": ({"min_lr": 5e-5, "decoupled_lr": 1e-5}, "--min-lr"),
    "two warm-ups": ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, "--lr-warmup-fraction"),
    "long warm-up": ({"lr_warmup_iters": 51}, "--lr-warmup-iters"),
    "warm-up from above": ({"lr_warmup_init": 0.1}, "--lr-warmup-init"),
    "WSD without its length": ({"lr_decay_style": "WSD"}, "--lr-decay-style"),
    "length of WSD without it": ({"lr_wsd_decay_iters": 3}, "--lr-wsd-decay-iters"),
    "length of WSD in samples": ({"lr_wsd_decay_samples": 3}, "--lr-wsd-decay-samples"),
    "start of no increment": ({"start_weight_decay": 0.1}, "--start-weight-decay"),
    "increment without bounds": ({"weight_decay_incr_style": "cosine"}, "--weight-decay-incr-style"),
    "falling weight decay": (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
        "--start-weight-decay",
    ),
    "float8 without bf16": ({"fp8": True}, "--fp8"),
    "float8 of rows, hybrid": (
        {"bf16": True, "fp8_recipe": "rowwise", "fp8_format": "hybrid"},
        "--fp8-format",
    ),
    "float8 of nothing": (
        {"bf16": True, "fp8": True, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
        "--first-last-layers-bf16",
    ),
    "float8 of odd sizes": ({"bf16": True, "fp8_format": "e4m3", "ffn_hidden_size": 250}, "--ffn-hidden-size"),
    "float8 of odd slices": (
        {"bf16": True, "fp8": True, "tensor_model_parallel_size": 2, "world_size": 2, "ffn_hidden_size": 144},
        "--ffn-hidden-size",
    ),
    "float8 recipe without it": ({"fp8_recipe": "rowwise"}, "--fp8-recipe"),
    "float8 layers without it": (
        {"bf16": True, "fp8": True, "num_layers_at_start_in_bf16": 2},
        "--num-layers-at-start-in-bf16",
    ),
    "two types": ({"fp16": True, "bf16": True}, "--fp16"),
    "scale of nothing": ({"bf16": True, "loss_scale": 4.0}, "--loss-scale"),
    "scales": ({"fp16": True, "min_loss_scale": 8.0, "initial_loss_scale": 4.0}, "--min-loss-scale"),
    "low gradients": (
        {"accumulate_allreduce_grads_in_fp32": False},
        "--no-accumulate-allreduce-grads-in-fp32",
    ),
    "pruning order": ({"sparsify": True, "pruning_start_iter": 51}, "--pruning-end-iter"),
    "sparsity order": ({"sparsify": True, "initial_sparsity": 0.95}, "--final-sparsity"),
    "too sparse": ({"sparsify": True, "pruning_mode": "2:4", "final_sparsity": 0.6}, "--final-sparsity"),
    "transposed": ({"sparsify": True, "pruning_mode": "2:4-transposable", "final_sparsity": 0.6}, "--final-sparsity"),
    "block size": (
        {"sparsify": True, "pruning_mode": "block", "pruning_block_size": 48},
        "--pruning-block-size",
    ),
    "exit weights form": ({"early_exit_layers": "0", "exit_layer_weight": "x"}, "--exit-layer-weight"),
    "exit weights count": ({"early_exit_layers": "0", "exit_layer_weight": "0.1,0.2"}, "--exit-layer-weight"),
    "sampled vocabulary in parts": (
        {
            "early_exit_layers": "0",
            "early_exit_loss_vocabulary": 8,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "world_size": 2,
        },
        "--early-exit-loss-vocabulary",
    ),
    "two ways to freeze": ({"freeze_adaptive": True, "freeze_schedule": "1:1"}, "--freeze-adaptive"),
    "cache of nothing": ({"freeze_cache_activations": 8}, "--freeze-cache-activations"),
    "cache of what trains": ({"freeze_cache_activations": 8, "freeze_adaptive": True}, "--freeze-cache-activations"),
    "cache of what other depths train": (
        {
            "freeze_cache_activations": 8,
            "freeze_adaptive": True,
            "family": "llama",
            "mtp_num_layers": 1,
            "untie_embeddings_and_output_weights": True,
        },
        "--freeze-cache-activations",
    ),
    "cache and depths": (
        {"freeze_cache_activations": 8, "freeze_adaptive": True, "freeze_tied": True, "mod_capacity": 0.5},
        "--freeze-cache-activations",
    ),
    "cache and one scale of a microbatch": (
        {"freeze_cache_activations": 8, "freeze_schedule": "1:1", "freeze_tied": True, "fp8": True, "bf16": True},
        "--freeze-cache-activations",
    ),
    "cache and sinkhorn": (
        {
            **EXPERTS,
            "freeze_cache_activations": 8,
            "freeze_schedule": "1:1",
            "freeze_tied": True,
            "moe_router_load_balancing_type": "sinkhorn",
        },
        "--freeze-cache-activations",
    ),
    "freeze form": ({"freeze_schedule": "x"}, "--freeze-schedule"),
    "freeze more": ({"freeze_schedule": "10:5"}, "--freeze-schedule"),
    "own operations": ({"schedule": "custom"}, "--schedule"),
    "own operations grow": (
        {
            **{"schedule": "custom", "balance": "offline", "plan": "p", "train_iters": None, "train_samples": 99},
            **{"global_batch_size": 4, "rampup_batch_size": "2 2 9"},
        },
        "--schedule",
    ),
    "emulate nothing": ({"emulate_scale": 2.0}, "--emulate-scale"),
    "freeze nothing": ({"freeze_tied": True}, "--freeze-tied"),
    "freeze untied": (
        {"freeze_tied": True, "freeze_schedule": "1:1", "untie_embeddings_and_output_weights": True},
        "--freeze-tied",
    ),
    "unknown balance": (
        {**EXPERTS, "moe_router_load_balancing_type": "aux_los"},
        "--moe-router-load-balancing-type 'aux_los'",
    ),
    "balance twice": (
        {**EXPERTS, "moe_router_load_balancing_type": "aux_loss aux_loss", "moe_aux_loss_coeff": "1 1"},
        "--moe-router-load-balancing-type 'aux_loss aux_loss'",
    ),
    "balance of two kinds": (
        {**EXPERTS, "moe_router_load_balancing_type": "aux_loss sinkhorn", "moe_aux_loss_coeff": "1 0"},
        "--moe-router-load-balancing-type 'aux_loss sinkhorn'",
    ),
    "one coefficient of two losses": (
        {**EXPERTS, "moe_router_load_balancing_type": "aux_loss,seq_aux_loss", "moe_aux_loss_coeff": "0.1"},
        "--moe-aux-loss-coeff '0.1'",
    ),
    "negative coefficient": ({**EXPERTS, "moe_aux_loss_coeff": -1.0}, "--moe-aux-loss-coeff '-1.0'"),
    "coefficient of no loss": (
        {**EXPERTS, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
        "--moe-aux-loss-coeff '0.1'",
    ),
    "batch loss of expert choice": (
        {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss", "moe_routing": "expert-choice"},
        "--moe-router-load-balancing-type",
    ),
    "capacity of sinkhorn": (
        {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.0},
        "--moe-expert-capacity-factor",
    ),
    "context of sinkhorn": (
        {**EXPERTS, **CONTEXT, "moe_router_load_balancing_type": "sinkhorn"},
        "--moe-router-load-balancing-type",
    ),
    "exits of sequences": (
        {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "early_exit_layers": "1"},
        "--early-exit-layers",
    ),
    "scores of sinkhorn": (
        {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "sigmoid"},
        "--moe-router-score-function",
    ),
    "scores of expert choice": (
        {**EXPERTS, "moe_routing": "expert-choice", "moe_router_topk_scaling_factor": 2.0},
        "--moe-router-topk-scaling-factor",
    ),
    "softmax of sigmoids": (
        {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        "--moe-router-pre-softmax",
    ),
    "softmax of one expert": ({"num_experts": 4, "moe_router_topk": 1}, "--moe-router-topk"),
    "biases of a softmax": ({**EXPERTS, "moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
    "groups alone": ({**EXPERTS, "moe_router_num_groups": 2}, "--moe-router-num-groups"),
    "odd groups": ({**EXPERTS, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, "--moe-router-num-groups"),
    "more groups than there are": (
        {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
        "--moe-router-group-topk",
    ),
    "experts of too few groups": (
        {**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        "--moe-router-topk",
    ),
    "gate of an encoder": ({"family": "bert", "activation": "swiglu"}, "--activation"),
    "activation of relative positions": (
        {"family": "t5", "position_embedding_type": "relative", "activation": "gelu"},
        "--activation",
    ),
    "two kinds of sinks": (
        {"attention_sinks": True, "softmax_off_by_one": True, "attention_dropout": 0.0},
        "--softmax-off-by-one",
    ),
    "balanced pairs": ({"num_experts": 4, "moe_routing": "balanced"}, "--moe-router-topk"),
    "experts of all layers": ({"num_experts": 10_000, "num_layers": 14}, "--num-experts"),
    "no overflow": (
        {"num_experts": 4, "moe_routing": "expert-choice", "moe_expert_capacity_factor": 1.0},
        "--moe-expert-capacity-factor",
    ),
    "packed samples with routed blocks": (
        {"reset_attention_mask": True, "mod_capacity": 0.5},
        "--reset-attention-mask",
    ),
    "window of a bert": ({"attention_window": 8, "family": "bert"}, "--attention-window"),
    "conversations of random tokens": ({"sft": True, "mock_data": True, "data_path": None}, "--sft"),
    "conversations of a curriculum": ({"sft": True, "curriculum_shortest": 8}, "--sft"),
    "conversations with early exits": ({"sft": True, "early_exit_layers": "1"}, "--sft"),
    "conversations with routed blocks": ({"sft": True, "mod_capacity": 0.5}, "--sft"),
    "loss of exits at ends of documents": ({"eod_mask_loss": True, "early_exit_layers": "1"}, "--eod-mask-loss"),
    "routed blocks": ({"mod_capacity": 0.5, "mod_every": 5}, "--mod-every"),
    "exit form": ({"early_exit_layers": "2,1"}, "--early-exit-layers"),
    "exit behind all": ({"early_exit_layers": "1,3"}, "--early-exit-layers"),
    "exit of saturation at a routed block": (
        {"early_exit_layers": "1", "mod_capacity": 0.5, "early_exit_measure": "saturation"},
        "--early-exit-layers",
    ),
    "frozen by parts": (
        {
            "freeze_adaptive": True,
            "zero_stage": 2,
            "world_size": 2,
            "pipeline_model_parallel_size": 1,
            "global_batch_size": 4,
        },
        "--freeze-adaptive",
    ),
    "pruned by parts": (
        {
            "sparsify": True,
            "pruning_scope": "layer",
            "zero_stage": 2,
            "world_size": 2,
            "pipeline_model_parallel_size": 1,
            "global_batch_size": 4,
        },
        "--pruning-mode",
    ),
    "buckets and distances": (
        {"family": "t5", "sparse_attention": True, "position_embedding_type": "relative"},
        "--sparse-attention",
    ),
    "odd buckets": ({"sparse_attention": True, "sparse_attention_buckets": 5}, "--sparse-attention-buckets"),
    "split form": ({"split": "x"}, "--split"),
    "split empty": ({"split": "0,1,0"}, "--split"),
    "blend form": ({"data_path": "0.3 a b"}, "--data-path"),
    "two kinds of data": ({"train_data_path": "a"}, "--data-path"),
    "two kinds of data, one streamed": (
        {"hf_dataset": "a", "eval_iters": 0, "tokenizer_model": "t.json"},
        "--hf-dataset",
    ),
    "streamed text without a tokenizer": ({"hf_dataset": "a", "data_path": None, "eval_iters": 0}, "--hf-dataset"),
    "streamed text without validation": (
        {"hf_dataset": "a", "data_path": None, "tokenizer_model": "t.json"},
        "--hf-dataset",
    ),
    "streamed sentences": (
        {"hf_dataset": "a", "data_path": None, "eval_iters": 0, "tokenizer_model": "t.json", "family": "bert"},
        "--hf-dataset",
    ),
    "null with files": (
        {"tokenizer_type": "NullTokenizer", "tokenizer_model": "t.json"},
        "--tokenizer-type",
    ),
    "offline": ({"balance": "offline"}, "--balance"),
    "lockstep": ({"balance_lockstep": True}, "--balance-lockstep"),
    "epilogue of nothing": ({"inter_grad_comp_epilogue_only": True}, "--inter-grad-comp-epilogue-only"),
    "compressed alone": ({"inter_grad_comp": True}, "--inter-grad-comp"),
    "too many ranks": (
        {"inter_grad_comp": True, "inter_grad_comp_rank": 32, "world_size": 2, "global_batch_size": 4},
        "--inter-grad-comp-rank",
    ),
    "feedback of nothing": ({"use_error_feedback": True}, "--use-error-feedback"),
    "across steps of nothing": ({"error_feedback_across_steps": True}, "--error-feedback-across-steps"),
    "replicas of nothing": ({"grad_comp": True}, "--grad-comp"),
    "bf16 sums of whole gradients": (
        {"grad_reduce_in_bf16": True, "zero_stage": 1, "zero_gradient_sync": "step", **REPLICAS},
        "--grad-reduce-in-bf16",
    ),
    "copies of no shards": ({"hsdp": 2, "zero_stage": 2, **REPLICAS}, "--hsdp"),
    "copies of unequal size": ({"hsdp": 4, "zero_stage": 2, **REPLICAS}, "--hsdp"),
    "experts across copies": (
        {
            "hsdp": 2,
            "zero_stage": 2,
            "num_experts": 4,
            "expert_model_parallel_size": 4,
            **REPLICAS,
            "world_size": 4,
        },
        "--hsdp",
    ),
    "packed by parts": ({"grad_comp": True, "zero_stage": 2, **REPLICAS}, "--grad-comp"),
    "packed experts": (
        {"grad_comp": True, "expert_model_parallel_size": 2, "num_experts": 4, **REPLICAS},
        "--grad-comp",
    ),
    "selected of nothing": (
        {"selective_grad_comp": True, "selective_grad_comp_way": "1"},
        "--selective-grad-comp",
    ),
    "selected nobody": ({"grad_comp": True, "selective_grad_comp": True, **REPLICAS}, "--selective-grad-comp"),
    "way of nothing": ({"selective_grad_comp_way": "1"}, "--selective-grad-comp-way"),
    "too many selected": (
        {"grad_comp": True, "selective_grad_comp": True, "selective_grad_comp_way": "2", **REPLICAS},
        "--selective-grad-comp-way",
    ),
    "fused nothing": ({"emb_comm_opt": True, "untie_embeddings_and_output_weights": True}, "--emb-comm-opt"),
    "fused by parts": ({"emb_comm_opt": True, "zero_stage": 1, **REPLICAS}, "--emb-comm-opt"),
    "measuring nothing": ({"check_comp_ratio": True}, "--check-comp-ratio"),
    "lonely queries": ({**ICT, "micro_batch_size": 1}, "--micro-batch-size"),
    "more than all": ({**ICT, "retriever_report_topk_accuracies": "1 3"}, "--retriever-report-topk-accuracies"),
    "no number": ({**ICT, "retriever_report_topk_accuracies": "1 x"}, "--retriever-report-topk-accuracies"),
    "two lengths": ({**ICT, "retriever_seq_length": 16}, "--retriever-seq-length"),
    "titles of two": ({**ICT, "titles_data_path": "t", "data_path": "0.3 a 0.7 b"}, "--titles-data-path"),
    "pruned twice": ({**ICT, "biencoder_shared_query_context_model": True, "sparsify": True}, "--sparsify"),
    "cut queries": (
        {**ICT, "sequence_parallel": True, "tensor_model_parallel_size": 2, "world_size": 2},
        "--sequence-parallel",
    ),
    "towers of a gpt": ({"query_in_block_prob": 0.5}, "--query-in-block-prob"),
    "evaluating nothing": ({"skip_train": True, "load": "a", "eval_iters": 0}, "--skip-train"),
    "evaluating nobody": ({"skip_train": True}, "--skip-train"),
    "too few shards": (
        {"vocabulary_parallel": 1, "world_size": 2, "global_batch_size": 4, **UNTIED},
        "--vocabulary-parallel",
    ),
    "more shards than tokens": ({"vocabulary_parallel": 4096, "vocab_size": 97, **UNTIED}, "--vocabulary-parallel"),
    "graph with shards": (
        {"cuda_graph": True, "vocabulary_parallel": 2, "world_size": 2, "global_batch_size": 4, **UNTIED},
        "--cuda-graph",
    ),
    "shards of a bert": ({"vocabulary_parallel": 2, "family": "bert"}, "--vocabulary-parallel"),
    "shards of factored moments": ({"vocabulary_parallel": 2, "optimizer": "adafactor"}, "--vocabulary-parallel"),
    "context of a bert": ({**CONTEXT, "family": "bert"}, "--context-parallel-size"),
    "context in a graph": ({**CONTEXT, "cuda_graph": True}, "--context-parallel-size"),
    "context of an odd length": ({**CONTEXT, "seq_length": 66}, "--seq-length"),
    "rollback without saves": ({"loss_spike_action": "rollback"}, "--loss-spike-action"),
    "rollback without moments": (
        {"loss_spike_action": "rollback", "save_interval": 2, "no_save_optim": True},
        "--loss-spike-action",
    ),
    "rollback in Megatron's order": (
        {"loss_spike_action": "rollback", "save_interval": 2, "sample_order": "megatron"},
        "--loss-spike-action",
    ),
    "rollback and release": (
        {
            **{"loss_spike_action": "rollback", "save_interval": 2, "balance": "online", "pack_to": 1},
            **{"world_size": 2, "global_batch_size": 4},
        },
        "--loss-spike-action",
    ),
    "skipped range": ({"skip_train_samples": "8:8"}, "--skip-train-samples"),
    "skipped in Megatron's order": (
        {"skip_train_samples": "4:8", "sample_order": "megatron"},
        "--skip-train-samples",
    ),
    "two names": ({"run_dir": "a", "save": "b"}, "--save"),
}


def test_validate_base_case_has_no_conflict():
    assert problems() == []


@table("case", CASES)
def test_validate_conflict_is_reported_once(case):
    values, flag = CASES[case]
    assert [problem.path for problem in problems(**values)] == [flag]


def test_validate_every_rule_has_a_case():
    violated = set()
    for values, _flag in CASES.values():
        world_size = values.get("world_size", 1)
        rest = {name: value for name, value in values.items() if name != "world_size"}
        config = config_of(DefaultContext(world_size=world_size), **SMALL | rest)
        violated |= {rule for rule in RULES if any(rule(config, world_size))}
    assert violated == set(RULES)


def test_validate_neighboring_cases_pass():
    losses = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.01]}
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
    assert problems(**EXPERTS, **BIASED, **losses, **groups) == []
    assert problems(**EXPERTS, moe_router_load_balancing_type="sinkhorn", moe_router_topk=1) == []
    assert problems(**EXPERTS, moe_aux_loss_coeff=0.01, mod_capacity=0.5) == []
    assert problems(world_size=6, global_batch_size=12) == []
    assert problems(world_size=10, global_batch_size=20, granularity="sublayer") == []
    assert problems(world_size=2, global_batch_size=2, schedule="gpipe") == []
    assert problems(world_size=2, global_batch_size=8, schedule="interleaved-1f1b") == []
    assert problems(pruning_start_iter=51) == []
    assert problems(run_dir="a", save="a") == []


def test_check_conflicts_are_all_reported():
    config = config_of(**SMALL | {"num_attention_heads": 5, "global_batch_size": 3, "min_lr": 1.0})
    with pytest.raises(DocumentError) as caught:
        check(config, 1)
    assert [problem.path for problem in caught.value.problems] == ["--hidden-size", "--global-batch-size", "--min-lr"]
    assert caught.value.exit_code == 2
    check(config_of(**SMALL), 1)


def test_validate_fewer_microbatches_than_stages_pass():
    assert problems(world_size=2, global_batch_size=2) == []
    ramp = {"train_iters": None, "train_samples": 999, "global_batch_size": 16, "rampup_batch_size": "2 2 99"}
    assert problems(world_size=4, **ramp) == []
