"""Loss curves of a small GPT or Llama, ours and transformers', from the same weights on the same batches.

    python tests/benchmarks/train_curve.py TEXT [--family gpt] [--steps 200] [--tokenizer tokenizer.json]

TEXT is any text of some 100 kB, such as WikiText-2's; its tokens are its bytes, or those of ``--tokenizer``. Ours is
the engine with two microbatches a step; theirs is transformers' model with torch's AdamW, clipping, and the rate of
each step written out here. No dropout, float32. Prints losses at some steps and the largest difference; ends with 1
where that is not below ``--tolerance``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

PEAK, FLOOR, WARMUP, DECAY, CLIP, BETAS = 1e-3, 1e-4, 20, 0.1, 1.0, (0.9, 0.95)
MICROBATCHES, SAMPLES = 2, 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model: layers, width, heads, groups of keys (Llama), width of the MLP, tokens of a sample, vocabulary."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    groups: int = 2
    inner: int = 352
    tokens: int = 128
    vocabulary: int = 256


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to ``FLOOR``, of update ``step`` from 1; the first one's is that at 0."""
    step -= 1
    if step <= WARMUP:
        return PEAK * step / WARMUP
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def batch(ids: torch.Tensor, sizes: Sizes, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text from places drawn for the step, and the same one token on."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(0, len(ids) - sizes.tokens - 1, (MICROBATCHES * SAMPLES,), generator=generator)
    rows = torch.stack([ids[begin : begin + sizes.tokens + 1] for begin in begins.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def family_of(name: str, sizes: Sizes):
    from plain_engine import gpt_of

    from dynmo_train.models.families.llama import Llama, LlamaShape

    if name == "gpt":
        common = {"layers": sizes.layers, "width": sizes.width, "heads": sizes.heads}
        return gpt_of(**common, tokens=sizes.tokens, vocabulary=sizes.vocabulary)
    common = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": sizes.tokens,
        "vocab_size": sizes.vocabulary,
        "padded_vocab_size": sizes.vocabulary,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    own = {"ffn_hidden_size": sizes.inner, "num_key_value_heads": sizes.groups, "head_dim": sizes.width // sizes.heads}
    return Llama(LlamaShape(**common, **own))


def ours(family, ids: torch.Tensor, sizes: Sizes, steps: int) -> tuple[dict[str, torch.Tensor], Callable[[int], float]]:
    """The initial weights by name, and what trains a step and gives its loss."""
    from plain_engine import engine_batch, engine_of

    from dynmo_train.optim.lr_schedule import LearningRate
    from dynmo_train.parallel.process_groups import init_world

    rate = LearningRate(peak=PEAK, floor=FLOOR, style="cosine", warmup_steps=WARMUP, decay_steps=steps)
    boundary = (SAMPLES, sizes.tokens, sizes.width)
    engine = engine_of(family, init_world("cpu"), microbatches=MICROBATCHES, boundary=boundary, rate=rate)
    weights = {name: parameter.detach().clone() for _, name, parameter in engine.item_store.parameters()}

    def train(step: int) -> float:
        return engine.train_step(engine_batch(batch(ids, sizes, step), step, MICROBATCHES), sampled=False).loss

    return weights, train


def _gpt2(weights: dict[str, torch.Tensor], sizes: Sizes) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=sizes.vocabulary,
            n_positions=sizes.tokens,
            n_embd=sizes.width,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    out = {"transformer.wte.weight": weights["embedding.word.weight"]}
    out["transformer.wpe.weight"] = weights["embedding.position.weight"]
    pairs = {"transformer.ln_f": "head.norm"}
    for n in range(sizes.layers):
        mine, other = f"layers.{n}", f"transformer.h.{n}"
        pairs |= {f"{other}.ln_1": f"{mine}.attention.norm", f"{other}.ln_2": f"{mine}.mlp.norm"}
        for theirs, name in (("attn.c_proj", "attention.dense"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2")):
            out[f"{other}.{theirs}.weight"] = weights[f"{mine}.{name}.weight"].t()
            out[f"{other}.{theirs}.bias"] = weights[f"{mine}.{name}.bias"]
        for kind in ("weight", "bias"):
            # Ours are grouped by head, theirs by query, key and value.
            rows = weights[f"{mine}.attention.qkv.{kind}"].unflatten(0, (sizes.heads, 3, -1)).transpose(0, 1)
            flat = rows.flatten(0, 2)
            out[f"{other}.attn.c_attn.{kind}"] = flat.t() if kind == "weight" else flat
    out |= {f"{t}.{kind}": weights[f"{o}.{kind}"] for t, o in pairs.items() for kind in ("weight", "bias")}
    return model, out


def _llama(weights: dict[str, torch.Tensor], sizes: Sizes) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.groups,
            max_position_embeddings=sizes.tokens,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        )
    )
    out = {"model.embed_tokens.weight": weights["embedding.word.weight"]}
    out |= {"model.norm.weight": weights["head.norm.weight"], "lm_head.weight": weights["head.weight"]}
    per, K = sizes.heads // sizes.groups, sizes.width // sizes.heads
    names = {
        "self_attn.o_proj": "attention.dense",
        "input_layernorm": "attention.norm",
        "post_attention_layernorm": "mlp.norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.fc2",
    }
    for n in range(sizes.layers):
        mine, other = f"layers.{n}", f"model.layers.{n}"
        qkv = weights[f"{mine}.attention.qkv.weight"].view(sizes.groups, per + 2, K, -1)
        for place, part in (("q", qkv[:, :-2]), ("k", qkv[:, -2:-1]), ("v", qkv[:, -1:])):
            out[f"{other}.self_attn.{place}_proj.weight"] = part.reshape(-1, sizes.width)
        out |= {f"{other}.{theirs}.weight": weights[f"{mine}.{name}.weight"] for theirs, name in names.items()}
    return model, out


def theirs(
    name: str, weights: dict[str, torch.Tensor], ids: torch.Tensor, sizes: Sizes, steps: int
) -> Callable[[int], float]:
    """What trains transformers' model a step, from the same weights, and gives its loss."""
    model, values = (_gpt2 if name == "gpt" else _llama)(weights, sizes)
    own = dict(model.named_parameters())
    if set(own) != set(values):
        raise SystemExit(f"other parameters than thought: {sorted(set(own) ^ set(values))}")
    with torch.no_grad():
        for parameter_name, parameter in own.items():
            parameter.copy_(values[parameter_name])
    groups = [
        {"params": [p for p in own.values() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in own.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=1e-8)
    model.train()

    def train(step: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        total = 0.0
        for inputs, labels in zip(*(part.split(SAMPLES) for part in batch(ids, sizes, step)), strict=True):
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICROBATCHES
            total += loss.item()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return train


def curves(name: str, ids: torch.Tensor, sizes: Sizes, steps: int) -> list[tuple[float, float]]:
    """The losses of all steps: ours, theirs."""
    weights, train_ours = ours(family_of(name, sizes), ids, sizes, steps)
    train_theirs = theirs(name, weights, ids, sizes, steps)
    return [(train_ours(step), train_theirs(step)) for step in range(1, steps + 1)]


def read_ids(path: Path, tokenizer: Path | None) -> tuple[torch.Tensor, int]:
    """The text as ids, and how many ids there are."""
    if tokenizer is None:
        return torch.tensor(list(path.read_bytes()), dtype=torch.int64), 256
    from dynmo_train.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return torch.tensor(loaded.encode(path.read_text(encoding="utf-8")), dtype=torch.int64), loaded.vocab_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--family", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids, vocabulary = read_ids(given.text, given.tokenizer)
    losses = curves(given.family, ids, Sizes(vocabulary=vocabulary), given.steps)
    sys.stdout.write("| step | ours | transformers | difference |\n|---|---|---|---|\n")
    for step in sorted({1, 10, 50, 100, 150, given.steps} & set(range(given.steps + 1))):
        mine, other = losses[step - 1]
        sys.stdout.write(f"| {step} | {mine:.6f} | {other:.6f} | {abs(mine - other):.1e} |\n")
    worst = max(abs(mine - other) for mine, other in losses)
    sys.stdout.write(f"largest difference in {given.steps} steps: {worst:.2e} (goal: below {given.tolerance:.0e})\n")
    return 0 if worst < given.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
