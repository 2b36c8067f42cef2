"""Command lines of other programs: each flag is translated, ignored or refused with a remedy."""

from __future__ import annotations

import json
import shlex

import pytest
import typer

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.config import config_of, option_specs, validate, with_deepspeed
from dynmo_train.config.compat.deepspeed import parse_deepspeed
from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.translate import translate
from tests.tables import table

COMMANDS = typer.main.get_command(app).commands["pretrain"].commands


def declared(family):
    return {
        name: 0 if option.is_flag else option.nargs
        for option in COMMANDS[family].params
        for name in (*option.opts, *option.secondary_opts)
    }


def config_from(words, family="gpt", **more):
    """The configuration of a command line, as the command resolves it."""
    translation = translate(shlex.split(words), family, declared(family))
    assert not translation.problems, translation.problems
    command = COMMANDS[family]
    context = command.make_context(family, list(translation.arguments))
    names = option_specs()
    flags = {name: value for name, value in context.params.items() if name in names and value is not None}
    return config_of(family=family, **flags, **more), translation


GPT_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000"
    " --lr-decay-style cosine --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --lr-warmup-fraction .01 --fp16"
    " --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --checkpoint-activations"
    " --save checkpoints/gpt2_345m --load checkpoints/gpt2_345m --data-path my-gpt2_text_document"
)
BERT_DISTRIBUTED = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512"
    " --micro-batch-size 4 --global-batch-size 32 --lr 0.0001 --train-iters 1000000 --lr-decay-iters 990000"
    " --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0"
    " --vocab-file bert-vocab.txt --tokenizer-type BertWordPieceLowerCase --data-impl mmap --split 949,50,1 --fp16"
    " --save c --load c --data-path my-bert_text_sentence --tensor-model-parallel-size 2"
    " --pipeline-model-parallel-size 2 --DDP-impl torch"
)
GPT3_175B = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288"
    " --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1"
    " --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375"
    " --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine"
    " --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path 0.4 A 0.6 B --vocab-file v.json"
    " --merge-file m.txt --save-interval 1000 --save c --load c --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1"
    " --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --tensorboard-dir tb --fp16"
    " --activations-checkpoint-method uniform --log-throughput"
)
CHINESE_GUIDE = (
    "--model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8"
    " --seq-length 1024 --max-position-embeddings 1024 --train-iters 500 --lr-decay-iters 320000 --save c --load c"
    " --data-path nist02-32k_text_sentence --vocab-file vocab.json --merge-file bpe32k --data-impl mmap"
    " --split 900,50,50 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5"
    " --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations --log-interval 10"
    " --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"
)
DEEPSPEED_GUIDE = (
    "--model-parallel-size 4 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
    " --max-position-embeddings 1024 --batch-size 9 --train-iters 500 --lr-decay-iters 320000 --save c --load c"
    " --data-path d --vocab-file v --merge-file m --data-impl mmap --split 900,50,50 --distributed-backend nccl"
    " --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01"
    " --checkpoint-activations --log-interval 10 --save-interval 10 --eval-interval 1000 --eval-iters 10 --fp16"
    " --tensorboard-dir tensorboard_data/24l_1024h --deepspeed --deepspeed_config ds_zero_stage_2_config.json"
    " --zero-stage 0 --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000"
    " --zero-contigious-gradients --zero-reduce-scatter --checkpoint-num-layers 1 --partition-activations"
    " --synchronize-each-layer --contigious-checkpointing"
)
LLAMA2 = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 2048 --train-samples 100000000"
    " --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-samples 200000 --data-path d"
    " --tokenizer-type Llama2Tokenizer --tokenizer-model t.model --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1"
    " --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --bf16 --swiglu --normalization RMSNorm"
    " --use-rotary-position-embeddings --no-position-embedding --disable-bias-linear"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --use-flash-attn"
    " --no-query-key-layer-scaling --use-mcore-models --overlap-grad-reduce --sequence-parallel"
    " --tensor-model-parallel-size 2 --log-throughput --exit-duration-in-mins 230 --save-interval 1000"
    " --eval-interval 1000 --eval-iters 40"
)


def test_translate_gpt_345m_command_line():
    config, translation = config_from(GPT_345M, vocab_size=50257)
    assert translation.notes == ()
    assert validate(config, 1) == []
    assert config.training.recompute_granularity == "full"
    assert config.warmup_samples == 3200 * 8
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert config.padded_vocab_size == 50304


def test_translate_bert_distributed_command_line():
    config, translation = config_from(BERT_DISTRIBUTED, "bert", vocab_size=30522)
    assert translation.notes == ()
    assert (config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size) == (2, 2)
    assert config.parallel.DDP_impl == "torch"


def test_translate_gpt3_175b_command_line():
    config, translation = config_from(GPT3_175B, vocab_size=50257)
    assert translation.notes == ()
    assert config.data.blend == ((0.4, "A"), (0.6, "B"))
    assert [config.batch_sizes.at(consumed) for consumed in (0, 10**7)] == [16, 1536]
    assert (config.decay_samples, config.warmup_samples) == (126953125, 183105)
    assert config.batch_sizes.consumed_after(config.training.train_iters) <= 146484375


def test_translate_chinese_guide_command_line():
    config, translation = config_from(CHINESE_GUIDE, vocab_size=32000)
    assert [note.split(":")[0] for note in translation.notes] == ["--distributed-backend"]
    assert (config.training.micro_batch_size, config.optimizer.lr_warmup_fraction) == (8, 0.01)
    assert config.data.split_shares == (0.9, 0.05, 0.05)


def test_translate_deepspeed_guide_command_line():
    config, translation = config_from(DEEPSPEED_GUIDE, vocab_size=32000)
    assert config.parallel.tensor_model_parallel_size == 4
    assert config.run.deepspeed_config == "ds_zero_stage_2_config.json"
    assert config.run.tensorboard_dir == "tensorboard_data/24l_1024h"
    assert {note.split(":")[0] for note in translation.notes} == {
        "--distributed-backend",
        "--deepspeed",
        "--zero-reduce-bucket-size",
        "--zero-allgather-bucket-size",
        "--zero-contigious-gradients",
        "--zero-reduce-scatter",
        "--checkpoint-num-layers",
        "--partition-activations",
        "--synchronize-each-layer",
        "--contigious-checkpointing",
    }


def test_translate_llama_2_command_line():
    config, translation = config_from(LLAMA2, "llama", vocab_size=32000)
    assert config.precision.bf16
    assert config.parallel.DDP_impl == "torch"
    assert "--no-position-embedding" in {note.split(":")[0] for note in translation.notes}
    assert (config.model.activation, config.model.normalization) == ("swiglu", "rmsnorm")
    assert not config.model.add_bias_linear


REFUSED = {
    "conversion": "--model-type GPT --target-pipeline-model-parallel-size 1 -i a -o b -i_g 1 -p 1",
    "generation": "--out-seq-length 1024 --temperature 1.0 --genfile samples.json --num-samples 2 --top_p 0.9"
    " --recompute",
    "evaluation": "--task WIKITEXT103 --valid-data text",
    "launcher": "--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000",
    "shape": "--init-method-xavier-uniform --fp32-residual-connection",
    "offloading": "--checkpoint-in-cpu",
    "ModelOpt": "--export-kd-teacher-load t --export-kd-cfg c --export-te-mcore-model --export-quant-cfg fp8"
    " --finetune-data-files a b",
    "Pai-Megatron-Patch": "--train-mode finetune --dataset JSON-SFT --extra-vocab-size 467"
    " --patch-tokenizer-type DeepSeekV2Tokenizer",
    "Swiss AI": "--xielu --goldfish-loss --goldfish-k 50 --goldfish-h 50 --trigger-path t",
    "specification": "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
}


@table("name", REFUSED)
def test_translate_unsupported_flags_are_refused_with_remedy(name):
    words = shlex.split(REFUSED[name])
    translation = translate(words, "gpt", declared("gpt"))
    assert [problem.path for problem in translation.problems] == [word for word in words if word.startswith("-")]
    assert all(
        any(advice in problem.message for advice in ("leave it out", "use ", "pretrain llama", "--num-query-groups"))
        for problem in translation.problems
    )
    assert translation.arguments == ()


def test_translate_flags_of_forks_that_change_nothing_are_accepted():
    words = "--train-mode pretrain --dataset MMAP --max-padding-length 8 --spec local --qknorm-impl apex"
    translation = translate(shlex.split(words), "gpt", declared("gpt"))
    assert (translation.problems, translation.arguments) == ((), ())
    assert len(translation.notes) == 5
    words = "--qk-nope-head-dim 128 --qk-rope-head-dim 64 --use-multi-token-prediction --num-mtp-predictor 1"
    translation = translate(shlex.split(words), "gpt", declared("gpt"))
    assert " ".join(translation.arguments) == "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --mtp-num-layers 1"


def test_translate_refusals_are_all_reported():
    with pytest.raises(DocumentError) as caught:
        COMMANDS["gpt"].make_context("gpt", ["--checkpoint-in-cpu", "--task", "A"])
    assert caught.value.exit_code == 2
    assert [problem.path for problem in caught.value.problems] == ["--checkpoint-in-cpu", "--task"]


OPTIMUS_CC = """--inter_grad_comp --inter_grad_comp_rank 12 --inter_grad_comp_epilogue_only --use_error_feedback
  --grad_comp --grad_comp_rank 64 --grad_comp_warm_up 0.2 --selective_grad_comp --selective_grad_comp_way 2
  --emb_comm_opt --check_orth_error_acti"""


def test_translate_optimus_cc_underscores_are_accepted():
    translation = translate(shlex.split(OPTIMUS_CC), "gpt", declared("gpt"))
    assert translation.problems == translation.notes == ()
    dashed = translate(shlex.split(OPTIMUS_CC.replace("_", "-")), "gpt", declared("gpt"))
    assert translation == dashed
    assert translation.arguments[:3] == ("--inter-grad-comp", "--inter-grad-comp-rank", "12")


def test_compat_flags_do_not_hide_declared_options():
    assert not set(FLAGS) & set(declared("gpt")) - {"--zero-stage"}


@pytest.mark.parametrize(
    "words",
    [
        "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "--data-parallel-sharding-strategy=optim_grads_params --use-distributed-optimizer",
        "--use-torch-fsdp2 --use-distributed-optimizer",
        "--use-distributed-optimizer --zero-stage 3",
    ],
)
def test_translate_sharding_strategy_decides_in_any_order(words):
    translation = translate(shlex.split(words), "gpt", declared("gpt"))
    assert translation.arguments == ("--zero-stage", "3")


@pytest.mark.parametrize(
    ("words", "is_passed"),
    [
        ("--sequence-parallel", False),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size=1 --sequence-parallel", False),
        ("--sequence-parallel --tensor-model-parallel-size 2", True),
        ("--sequence-parallel --tensor-model-parallel-size=2", True),
        ("--sequence-parallel --config run.toml", True),
        ("--sequence-parallel --recipe llama-2-7b", True),
    ],
)
def test_translate_sequence_parallel_alone_has_no_effect(words, is_passed):
    translation = translate(shlex.split(words), "gpt", declared("gpt"))
    assert ("--sequence-parallel" in translation.arguments) == is_passed
    assert bool(translation.notes) != is_passed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--train_iters 5", ["--train-iters", "5"]),
        ("--min-lr=-1e-5 x", ["--min-lr", "-1e-5", "x"]),
        ("--min-lr -.5", ["--min-lr", "-.5"]),
        ("--data-path '1 a' b", ["--data-path", "'1 a' b"]),
        ("--data-path a --lr 1", ["--data-path", "a", "--lr", "1"]),
        ("--nonsense 1", ["--nonsense", "1"]),
    ],
)
def test_translate_declared_flags_are_unchanged(words, expected):
    assert list(translate(shlex.split(words), "gpt", declared("gpt")).arguments) == expected


DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 2},
    "zero_optimization": {"stage": 0, "cpu_offload": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    },
    "wall_clock_breakdown": False,
}


def test_parse_deepspeed_returns_option_values():
    found = parse_deepspeed(DEEPSPEED)
    assert found.problems == ()
    assert found.ignored == ("steps_per_print", "zero_optimization.cpu_offload", "wall_clock_breakdown")
    values = {name: value for name, value in found.values.items() if name != "zero_stage"}
    assert found.values["zero_stage"] == 0
    config = config_of(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=100,
        train_iters=200,
        data_path="d",
        **values,
    )
    assert validate(config, 1) == []
    assert (config.training.global_batch_size, config.microbatches) == (32, 8)
    assert (config.precision.fp16, config.precision.initial_loss_scale) == (True, 65536.0)
    assert (config.optimizer.adam_beta2, config.optimizer.weight_decay) == (0.95, 0.1)
    assert config.curriculum.at(100) == 32


def test_parse_deepspeed_sgd_becomes_the_optimizer_and_its_momentum():
    found = parse_deepspeed(
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.0, "eps": 1e-8}}}
    )
    assert found.values == {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.8, "weight_decay": 0.0}
    assert found.ignored == ("optimizer.params.eps",)


@table(
    ("document", "path"),
    [
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params.nesterov"),
        ({"optimizer": {"type": "SGD", "params": {"dampening": 0.1}}}, "optimizer.params.dampening"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "optimizer.params.bias_correction"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled"),
        ({"bf16": True}, "bf16"),
        ({"zero_optimization": 3}, "zero_optimization"),
        ({"curriculum_learning": {"enabled": "true"}}, "curriculum_learning.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"),
    ],
)
def test_parse_deepspeed_refuses_what_changes_the_training(document, path):
    assert [problem.path for problem in parse_deepspeed(document).problems] == [path]


def test_parse_deepspeed_accepts_neutral_parameters():
    params = {"bias_correction": True, "amsgrad": False, "nesterov": False, "dampening": 0.0}
    document = {"optimizer": {"params": params}, "bf16": {"enabled": False}, "torch_autocast": {"enabled": False}}
    assert parse_deepspeed(document).problems == ()


def test_parse_deepspeed_muon_becomes_the_optimizer():
    params = {"lr": 0.01, "momentum": 0.95, "betas": [0.9, 0.95], "weight_decay": 0.1, "nesterov": True, "ns_steps": 3}
    found = parse_deepspeed({"optimizer": {"type": "Muon", "params": params}})
    expected = {"optimizer": "muon", "lr": 0.01, "muon_momentum": 0.95, "weight_decay": 0.1}
    expected |= {"muon_nesterov": True, "muon_num_ns_steps": 3}
    assert found.values == {**expected, "adam_beta1": 0.9, "adam_beta2": 0.95}
    assert found.problems == ()
    [problem] = parse_deepspeed({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}}).problems
    assert problem.path == "optimizer.params.muon_lr"
    assert "--decoupled-lr" in problem.message


@pytest.mark.parametrize(
    ("document", "value"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam; must be Adam, AdamW.* give --optimizer"),
        ({"curriculum_learning": {"enabled": True, "curriculum_type": "vocabulary"}}, "vocabulary"),
    ],
)
def test_with_deepspeed_unsupported_setting_is_refused(tmp_path, document, value):
    (tmp_path / "ds.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=value):
        with_deepspeed({"deepspeed_config": str(tmp_path / "ds.json")}, {})


def test_with_deepspeed_conflicts_with_flags_are_all_reported(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 32, "gradient_clipping": 1, "dump_state": 1}))
    path = str(tmp_path / "ds.json")
    with pytest.raises(DocumentError) as caught:
        with_deepspeed({"deepspeed_config": path, "global_batch_size": 8}, {"clip_grad": 0.5})
    assert {problem.path for problem in caught.value.problems} == {"--global-batch-size", "--clip-grad"}
    given = {"deepspeed_config": path, "global_batch_size": 32}
    flags, values = with_deepspeed(given, {"clip_grad": 1.0})
    assert flags == given
    assert values == {"global_batch_size": 32, "clip_grad": 1.0}
    assert "ignored dump_state" in capsys.readouterr().err


def test_with_deepspeed_zero_stage_overrides_flag_of_0(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    given = {"deepspeed_config": str(tmp_path / "ds.json"), "zero_stage": 0, "clip_grad": 1.0}
    assert with_deepspeed(given, {}) == ({**given, "zero_stage": None}, {"zero_stage": 2})
    with pytest.raises(DocumentError, match="--zero-stage"):
        with_deepspeed({**given, "zero_stage": 1}, {})


@table(
    ("document", "given", "defaults"),
    [
        ({}, {}, {"clip_grad": 0.0}),
        ({"gradient_clipping": "auto"}, {}, {}),
        ({}, {"clip_grad": 0.5}, {}),
        ({"fp16": {"enabled": True}}, {}, {"clip_grad": 0.0, "initial_loss_scale": 65536.0}),
        ({"fp16": {"enabled": True, "loss_scale": 8}, "gradient_clipping": 1.0}, {}, {}),
    ],
)
def test_file_of_deepspeed_has_its_defaults_and_prints_them(document, given, defaults, tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps(document))
    _, values = with_deepspeed({"deepspeed_config": str(tmp_path / "ds.json"), **given}, {})
    assert {name: values[name] for name in values.keys() & {"clip_grad", "initial_loss_scale"}} == defaults | (
        {"clip_grad": 1.0} if document.get("gradient_clipping") == 1.0 else {}
    )
    printed = capsys.readouterr().err
    assert all(f"--{name.replace('_', '-')} {value:g}" in printed for name, value in defaults.items())
    assert ("defaults of DeepSpeed" in printed) == bool(defaults)


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_with_deepspeed_invalid_file_is_refused(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UsageError, match=r"ds\.json"):
        with_deepspeed({"deepspeed_config": str(tmp_path / "ds.json")}, {})


def test_arguments_of_the_hugging_face_trainer_have_their_meaning():
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 9 --mock-data --max-seq-length 8"
    words += " --learning_rate 1e-3 --max_steps 7 --per_device_train_batch_size 3 --gradient_accumulation_steps 2"
    words += " --gradient_checkpointing True --save_total_limit 4 --lr_scheduler_type constant_with_warmup"
    config, translation = config_from(f"{words} --do_train --optim adamw_torch --bf16 True --fp16 False")
    training = config.training
    assert (config.optimizer.lr, config.optimizer.lr_decay_style, training.train_iters) == (1e-3, "constant", 7)
    assert (training.micro_batch_size, training.global_batch_size) == (3, 6)
    assert (training.recompute_granularity, config.run.keep_checkpoints) == ("full", 4)
    assert (config.precision.bf16, config.precision.fp16) == (True, False)
    assert [note.partition(":")[0] for note in translation.notes] == ["--do-train"]
    (problem,) = translate(["--num_train_epochs", "3"], "gpt", declared("gpt")).problems
    assert "--train-samples" in problem.message


@pytest.mark.parametrize("words", ["--num-experts-switch 4", "--num-experts 4 --topk 1"])
def test_translate_one_expert_per_token_weighs_by_its_probability(words):
    config, _ = config_from(GPT_345M + " --vocab-size 1000 " + words)
    assert (config.model.num_experts, config.model.moe_router_topk, config.model.moe_router_pre_softmax) == (4, 1, True)
    assert not [problem for problem in validate(config, 1) if "moe" in problem.path]


def test_translate_two_experts_per_token_are_divided_by_their_sum():
    config, _ = config_from(GPT_345M + " --vocab-size 1000 --num-experts 4 --topk 2")
    assert (config.model.moe_router_topk, config.model.moe_router_pre_softmax) == (2, False)
