"""Writes the fixtures of ``test_deepspeed.py`` with an installed DeepSpeed.

    python write_deepspeed_fixtures.py [CASE ...]

A GPT with Megatron's names trains for three steps under each of ``CASES``, and DeepSpeed itself saves it. Each archive
in ``fixtures/deepspeed/`` holds such a checkpoint; the ``.json`` next to it holds the version of DeepSpeed, a digest of
each float32 weight as DeepSpeed's own ``zero_to_fp32`` restores it, the same of weights and moments as the running
engine gives them, and the losses of the two steps that follow. Nothing in the test suite imports this module.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from torch import nn
from torch.nn import functional

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
LAYERS, HIDDEN, HEADS, INNER, WORDS, POSITIONS = 2, 4, 2, 6, 24, 8
STEPS, MORE_STEPS, BATCH, MICRO = 3, 2, 4, 1
SPLIT = ("word_embeddings", "query_key_value", "self_attention.dense.weight", "dense_h_to_4h", "4h_to_h.weight")
OPTIMIZER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY, CLIP, WARMUP = 0.1, 1.0, 4
PLAIN = {"stage": 0, "precision": "fp32", "tp": 1, "pp": 0, "dp": 2, "tied": True}
CASES = {
    f"zero{stage}-{precision}": PLAIN | {"stage": stage, "precision": precision}
    for stage in range(4)
    for precision in ("fp32", "fp16", "bf16")
}
CASES["zero1-bf16"]["rng"] = True
CASES["zero2-fp16-untied"] = PLAIN | {"stage": 2, "precision": "fp16", "tied": False}
CASES["zero1-bf16-tensor"] = PLAIN | {"stage": 1, "precision": "bf16", "tp": 2, "dp": 1}
CASES["zero3-bf16-three"] = PLAIN | {"stage": 3, "precision": "bf16", "dp": 3}
CASES["zero1-bf16-pipeline"] = PLAIN | {"stage": 1, "precision": "bf16", "pp": 2}
CASES["zero1-fp16-pipeline-untied"] = PLAIN | {"stage": 1, "precision": "fp16", "pp": 2, "tied": False}
CASES["zero0-fp32-pipeline"] = PLAIN | {"pp": 2, "dp": 1}
del CASES["zero2-fp32"]


def batch(step):
    """The token ids of one step, one more than are predicted in each row."""
    source = np.random.default_rng(step)
    return torch.from_numpy(source.integers(0, WORDS, (BATCH, POSITIONS + 1)))


class Embedding(nn.Module):
    """Megatron's embedding: a table of words and one of positions."""

    def __init__(self, ranks=1):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS // ranks, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, ids):
        return self.word_embeddings(ids) + self.position_embeddings(torch.arange(ids.shape[1]))


class Attention(nn.Module):
    """Rows of ``query_key_value`` are [heads, 3, width], as in version 3.0."""

    def __init__(self, ranks=1):
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN // ranks)
        self.dense = nn.Linear(HIDDEN // ranks, HIDDEN)

    def forward(self, x):
        rows = self.query_key_value(x).unflatten(-1, (HEADS, 3, HIDDEN // HEADS))
        q, k, v = (rows[..., i, :].transpose(1, 2) for i in range(3))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two matrices with the tanh form of GELU between them."""

    def __init__(self, ranks=1):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, INNER // ranks)
        self.dense_4h_to_h = nn.Linear(INNER // ranks, HIDDEN)

    def forward(self, x):
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Layer(nn.Module):
    """One block, norms before its parts."""

    def __init__(self, ranks=1):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention(ranks)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp(ranks)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Encoder(nn.Module):
    """All blocks and the last norm."""

    def __init__(self, ranks=1):
        super().__init__()
        self.layers = nn.ModuleList([Layer(ranks) for _ in range(LAYERS)])
        self.final_layernorm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class LanguageModel(nn.Module):
    """Megatron's ``language_model``."""

    def __init__(self, ranks=1, tied=True):
        super().__init__()
        self.embedding = Embedding(ranks)
        self.encoder = Encoder(ranks)
        if not tied:
            self.output_layer = nn.Linear(HIDDEN, WORDS // ranks, bias=False)


class Gpt(nn.Module):
    """Megatron's GPTModel; ``forward`` returns the loss, or a stand-in for it on a part of tensor parallelism."""

    def __init__(self, ranks=1, tied=True):
        super().__init__()
        self.ranks, self.tied = ranks, tied
        self.language_model = LanguageModel(ranks, tied)
        for name, parameter in self.named_parameters():  # DeepSpeed counts the others once in the norm
            parameter.model_parallel = ranks > 1 and any(split in name for split in SPLIT)

    def forward(self, ids, labels):
        if self.ranks > 1:
            return sum(((p.float() - 0.01 * ids.float().mean()) ** 2).sum() for p in self.parameters())
        model = self.language_model
        x = model.encoder(model.embedding(ids))
        table = model.embedding.word_embeddings if self.tied else model.output_layer
        return loss_of(functional.linear(x, table.weight), labels)


def loss_of(logits, labels):
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class EmbeddingPipe(Embedding):
    """As Megatron-DeepSpeed's, which names the weight that is tied."""

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight


def with_table(embedding, x):
    return functional.linear(x, embedding.word_embeddings_weight)


class HeadPipe(nn.Module):
    """As Megatron-DeepSpeed's LMHeadPipe."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x):
        return self.lm_head(x)


def pipeline(case):
    """Megatron-DeepSpeed's list of layers: a cast first, then embedding, blocks, norm, head, and a cast again."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    tied = {"tied_weight_attr": ["word_embeddings_weight"]}
    if case["tied"]:
        first = TiedLayerSpec("embed", EmbeddingPipe, **tied)
        last = TiedLayerSpec("embed", EmbeddingPipe, forward_fn=with_table, **tied)
    else:
        first, last = LayerSpec(EmbeddingPipe), LayerSpec(HeadPipe)
    blocks = [LayerSpec(Layer) for _ in range(LAYERS)]
    specs = [lambda x: x, first, *blocks, LayerSpec(nn.LayerNorm, HIDDEN), last, lambda x: x.float()]
    return PipelineModule(specs, num_stages=case["pp"], loss_fn=loss_of, partition_method="uniform", seed_layers=True)


class TensorRanks:
    """DeepSpeed's ``mpu`` for tensor parallelism over all processes."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.model = torch.distributed.new_group(list(range(world)))
        self.data = [torch.distributed.new_group([r]) for r in range(world)][rank]

    def get_model_parallel_rank(self):
        return self.rank

    def get_model_parallel_world_size(self):
        return self.world

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.data


def arguments(case):
    """Megatron's arguments that a checkpoint carries, as far as a reader looks at them."""
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=HEADS,
        kv_channels=HIDDEN // HEADS,
        max_position_embeddings=POSITIONS,
        seq_length=POSITIONS,
        padded_vocab_size=WORDS,
        orig_vocab_size=WORDS - 1,
        layernorm_epsilon=1e-5,
        bias_gelu_fusion=True,
        openai_gelu=False,
        weight_decay=DECAY,
        adam_beta1=0.9,
        adam_beta2=0.95,
        untie_embeddings_and_output_weights=not case["tied"],
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=max(1, case["pp"]),
        data_parallel_size=case["dp"],
        global_batch_size=BATCH,
        params_dtype={"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case["precision"]],
        iteration=STEPS,
        consumed_train_samples=STEPS * BATCH,
        consumed_valid_samples=0,
        seed=1234,
        bf16=case["precision"] == "bf16",
        fp16=case["precision"] == "fp16",
    )


def configuration(case):
    """DeepSpeed's configuration."""
    micro = MICRO
    ranks = case["dp"]
    result = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": max(1, BATCH // (micro * ranks)),
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
    }
    if case["precision"] == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100}
    if case["precision"] == "bf16":
        result["bf16"] = {"enabled": True}
        if case["stage"] == 1:
            result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def groups_of(model):
    """Megatron's two groups: with and without weight decay."""
    named = [p for p in model.parameters()]
    shape = [getattr(p, "ds_shape", p.shape) for p in named]
    wide = [p for p, s in zip(named, shape, strict=True) if len(s) > 1]
    thin = [p for p, s in zip(named, shape, strict=True) if len(s) <= 1]
    return [{"params": wide, "weight_decay": DECAY}, {"params": thin, "weight_decay": 0.0}]


def rate(step):
    """The factor on the learning rate: linear warm-up."""
    return min(1.0, step / WARMUP)


def train(engine, case, step, rank):
    """One step; returns the mean loss over the replicas."""
    ids = batch(step)
    share = ids.shape[0] // case["dp"] if case["dp"] != 3 else 1
    mine = ids[rank * share : (rank + 1) * share]
    rows = [(row[None, :-1], row[None, 1:]) for row in mine]
    if case["pp"]:
        return float(engine.train_batch(data_iter=iter(rows)))
    total = 0.0
    for inputs, labels in rows:
        loss = engine(inputs, labels)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / len(rows)
    found = torch.tensor([total])
    torch.distributed.all_reduce(found)
    return float(found) / torch.distributed.get_world_size()


def work(rank, world, case, target, port):
    """One process of a case: trains, saves, trains on."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # gloo needs no operator, and none is compiled
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # torch computes it on a CPU; DeepSpeed asks for fast instructions
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    mpu = TensorRanks(rank, world) if case["tp"] > 1 else None
    if case["pp"]:
        model = pipeline(case)
    elif case["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=configuration(case)):
            model = Gpt(tied=case["tied"])
    else:
        model = Gpt(case["tp"], case["tied"])
    optimizer = torch.optim.AdamW(groups_of(model), **OPTIMIZER)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step + 1))
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=configuration(case), mpu=mpu
    )[0]
    replica = engine.grid.get_data_parallel_rank() if case["pp"] else 0 if mpu else rank
    for step in range(STEPS):
        train(engine, case, step, replica)
    args = arguments(case)
    state = {"iteration": STEPS, "args": args, "checkpoint_version": 3.0, "tokens": STEPS * BATCH * POSITIONS}
    if case.get("rng"):
        state["random_rng_state"] = random.getstate()
        state["np_rng_state"] = np.random.get_state()
        state["torch_rng_state"] = torch.get_rng_state()
        state["cuda_rng_state"], state["rng_tracker_states"] = torch.zeros(16, dtype=torch.uint8), {}
    state["opt_param_scheduler"] = {
        "max_lr": OPTIMIZER["lr"],
        "lr_warmup_steps": WARMUP * BATCH,
        "num_steps": STEPS * BATCH,
        "lr_decay_style": "constant",
        "lr_decay_steps": 100 * BATCH,
        "min_lr": 0.0,
        "start_wd": DECAY,
        "end_wd": DECAY,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
    engine.save_checkpoint(target, tag=f"global_step{STEPS}", client_state=state)
    # ZeRO 3 and BF16_Optimizer link the moments to the weights; the optimizer of ZeRO 1 and 2 does so only when loaded.
    is_linked = case["stage"] == 3 or (case["stage"] == 1 and case["precision"] == "bf16")
    live = state_of(engine) if is_linked and case["tp"] == 1 and not case["pp"] else None
    # Most of DeepSpeed's optimizers make an update with gradients of 0 to begin with, which Adam counts.
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    updates = {int(state["step"]) for state in inner.state.values() if "step" in state}
    losses = [train(engine, case, step, replica) for step in range(STEPS, STEPS + MORE_STEPS)]
    if rank == 0:
        (Path(target) / "about.json").write_text(
            json.dumps({"losses": losses, "live": live, "updates": sorted(updates)})
        )
    torch.distributed.barrier()


def digest(tensor):
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def state_of(engine):
    """Digests of masters and moments by weight, as the running engine gives them; all processes call this."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = {"master": digest(safe_get_full_fp32_param(parameter))}
        for kind in ("exp_avg", "exp_avg_sq"):
            found[name][kind] = digest(safe_get_full_optimizer_state(parameter, kind))
    return found


def digests(directory):
    """SHA-256 of each float32 weight as DeepSpeed's ``zero_to_fp32`` restores it; None where that refuses."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(directory))
    except ValueError:  # it knows nothing but ZeRO, and of that not the form of BF16_Optimizer
        return None
    return {name: digest(weight) for name, weight in weights.items()}


def write(name, case, port):
    """Make one archive and its description."""
    import deepspeed

    world = case["tp"] * max(1, case["pp"]) * case["dp"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "checkpoint"
        torch.multiprocessing.spawn(work, (world, case, str(target), port), nprocs=world)
        found = json.loads((target / "about.json").read_text())
        (target / "about.json").unlink()
        weights = digests(target) if case["stage"] and case["tp"] == 1 and not case["pp"] else None
        for script in target.glob("*.py"):  # DeepSpeed adds copies of its converters
            script.unlink()
        about = {"deepspeed": deepspeed.__version__, "case": case, "weights": weights, **found}
        (FIXTURES / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
            for path in sorted(target.rglob("*")):
                info = archive.gettarinfo(path, str(path.relative_to(target)))
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with open(path, "rb") if path.is_file() else io.BytesIO() as handle:
                    archive.addfile(info, handle)
        (FIXTURES / f"{name}.tar.xz").write_bytes(packed.getvalue())


if __name__ == "__main__":
    import sys

    FIXTURES.mkdir(parents=True, exist_ok=True)
    for number, (name, case) in enumerate(CASES.items()):
        if name in sys.argv[1:] or not sys.argv[1:]:
            write(name, case, 29500 + number)
