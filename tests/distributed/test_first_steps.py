"""Runs from what transformers saved have transformers' losses, before and after ``dynmo-ckpt`` had the checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from typer.testing import CliRunner

from dynmo_train.data.batches import RunData
from dynmo_train.parallel.process_groups import destroy_world
from tests.distributed.sentences import write_sentences
from tests.distributed.whole_runs import figures, run_command, write_data
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "max_position_embeddings": 32, "vocab_size": 97, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 97}
BLENDERBOT = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
BLENDERBOT |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
T5 = {
    "d_model": 32,
    "d_ff": 128,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "n_positions": 32,
}
THEIRS = {
    "gpt": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, rms_norm_eps=1e-5)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**LLAMA, num_local_experts=4, rope_theta=1e4)),
    "bert": lambda: tf.MegatronBertForPreTraining(
        tf.MegatronBertConfig(**SIZES, vocab_size=95, max_position_embeddings=32, layer_norm_eps=1e-5)
    ),
    "t5": lambda: tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**BLENDERBOT, vocab_size=105)),
    "relative t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, vocab_size=105)),
}
WORDS = {"tokenizer-type": "BertWordPieceLowerCase"}
SPANS = {
    "encoder-num-layers": "2",
    "decoder-num-layers": "1",
    "decoder-seq-length": "16",
    "vocab-extra-ids": "10",
    **WORDS,
}
ROTARY = {"num-layers": "2", "num-query-groups": "2", "ffn-hidden-size": "128", "vocab-size": "97"}
OURS = {
    "gpt": {"num-layers": "2", "vocab-size": "97"},
    "llama": ROTARY,
    "mixtral": {**ROTARY, "num-experts": "4", "moe-z-loss-coeff": "0.001", "moe-aux-loss-coeff": "0.01"},
    "bert": {"num-layers": "2", **WORDS},
    "t5": {**SPANS},
    "relative t5": {**SPANS, "position-embedding-type": "relative", "layernorm-epsilon": "1e-6"},
}
COMMON = {
    "hidden-size": "32",
    "num-attention-heads": "4",
    "max-position-embeddings": "32",
    "seq-length": "32",
    "micro-batch-size": "4",
    "global-batch-size": "4",
    "train-iters": "4",
    "save-interval": "2",
    "lr": "2e-3",
    "split": "100,0,0",
    "eval-iters": "0",
    "attention-dropout": "0",
    "hidden-dropout": "0",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    sentences, vocabulary = write_sentences(folder)
    return {"causal": write_data(folder / "causal"), "sentences": sentences, "vocabulary": vocabulary}


@pytest.fixture
def batches(monkeypatch):
    """Step -> the tensors of the batch that a run in this process takes."""
    recorded = {}
    own = RunData.train_shard

    def training(self, consumed, step, replica, context_rank):
        recorded[step] = own(self, consumed, step, replica, context_rank)
        return recorded[step]

    monkeypatch.setattr(RunData, "train_shard", training)
    return recorded


def train(data, kind, run, *extra, **options):
    family = "t5" if "t5" in kind else "llama" if kind == "mixtral" else kind
    files = {"data-path": data["causal"]}
    if family in ("bert", "t5"):
        files = {"data-path": data["sentences"], "vocab-file": data["vocabulary"]}
    merged = COMMON | OURS[kind] | files | {name.replace("_", "-"): value for name, value in options.items()}
    flags = [str(part) for name, value in merged.items() for part in (f"--{name}", value)]
    try:
        code, talk = run_command(["pretrain", family, "--run-dir", str(run), *flags, *extra])
    finally:
        destroy_world()
    assert code == 0, talk
    return figures(run)


def convert(*arguments):
    from dynmo_ckpt.cli import app

    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)


def loss_of(model, batch):
    """What transformers makes of a batch of ours: the loss, and the norm of its gradients over all parameters."""
    given = batch.inputs
    if "decoder_ids" in given:
        read = {"input_ids": given["encoder_ids"], "attention_mask": given["encoder_attention_mask"].long()}
        logits = model(**read, decoder_input_ids=given["decoder_ids"]).logits
    elif "attention_mask" in given:
        both = {"attention_mask": given["attention_mask"].long(), "token_type_ids": given["types"]}
        logits = model(given["ids"], **both).prediction_logits
    else:
        logits = model(given["ids"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="none")
    counts = given["loss_mask"].flatten() if "loss_mask" in given else torch.ones_like(losses)
    loss = (losses * counts).sum() / counts.sum()
    model.zero_grad()
    loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), float(torch.stack(norms).norm())


@pytest.mark.parametrize("kind", complete_but(THEIRS, "gpt"))
def test_first_losses_equal_those_of_transformers(data, batches, tmp_path, kind):
    torch.manual_seed(3)
    theirs = THEIRS[kind]().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
        if kind == "t5":
            theirs.model.decoder.embed_positions.weight.copy_(theirs.model.encoder.embed_positions.weight)
    theirs.save_pretrained(tmp_path / "theirs")
    cache = ("--cache-dir", str(tmp_path / "cache"))
    whole = train(data, kind, tmp_path / "whole", "--load", str(tmp_path / "theirs"), *cache)
    loss, norm = loss_of(theirs, batches[1])
    assert whole[1][0] == pytest.approx(loss, abs=1e-5)
    if kind in ("gpt", "llama"):  # the others have further losses, or one table of positions for both stacks
        assert whole[1][1] == pytest.approx(norm, rel=1e-4)

    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    convert("convert", half, tmp_path / "hf", "--to", "hf")
    opened = type(theirs).from_pretrained(tmp_path / "hf").eval()
    assert whole[3][0] == pytest.approx(loss_of(opened, batches[3])[0], abs=1e-5)

    convert("split", half, tmp_path / "split", "--tp", 2, "--pp", 2)
    on = train(data, kind, tmp_path / "on", "--load", str(tmp_path / "split"))
    assert on == {step: whole[step] for step in (3, 4)}


@pytest.mark.complete
def test_finetune_may_change_the_training_of_experts(data, batches, tmp_path):
    """With ``--finetune`` the loss coefficients of experts may differ; with a resume they may not."""
    train(data, "mixtral", tmp_path / "run")
    open_again = ("--load", str(tmp_path / "run"))
    other = {"moe_aux_loss_coeff": "0.5", "train_iters": "1"}
    first = train(data, "mixtral", tmp_path / "fine", *open_again, "--finetune", **other)
    assert list(first) == [1]
    with pytest.raises(AssertionError, match=r"moe_aux_loss_coeff is 0\.01 there and 0\.5 here"):
        train(data, "mixtral", tmp_path / "on", *open_again, **other)
