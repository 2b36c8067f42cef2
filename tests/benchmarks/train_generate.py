"""Tokens per second of greedy generation on CPU with a key-value cache: ours and transformers', in the same run.

All continue the same prompts by the same number of tokens in this process, taking turns; reading the prompt counts.
transformers runs with each of its settings for CPU, and the fastest one is compared. With ``--top-k`` tokens are drawn
from the k most likely ones; the texts then differ, since each program has random numbers of its own.

    python tests/benchmarks/train_generate.py [--model llama-small] [--batch 8] [--new 64] [--top-k 50] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from typer.testing import CliRunner

from dynmo_train._common.console import emit

PROMPT_TOKENS = 32
OPPONENTS = {"sdpa": ("sdpa", None), "eager": ("eager", None), "static": ("sdpa", "static")}


def reference(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2-124m":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    elif name == "llama-125m":
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            max_position_embeddings=1024,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def ours(model: torch.nn.Module, folder: Path, new: int, top_k: int):
    """What continues prompts with the same weights, through the native checkpoint."""
    from dynmo_ckpt.cli import app
    from dynmo_train.config.fields import values_of
    from dynmo_train.config.sections.evaluation import InferenceConfig
    from dynmo_train.evaluation.forward_engine import load_forward_engine
    from dynmo_train.evaluation.model_checkpoint import open_model
    from dynmo_train.evaluation.sampling import Sampling
    from dynmo_train.evaluation.token_generator import GenerationRequest, StopCondition, TokenGenerator
    from dynmo_train.parallel.process_groups import init_world

    model.save_pretrained(folder / "hf")
    done = CliRunner().invoke(app, ["convert", str(folder / "hf"), str(folder / "native"), "--to", "native"])
    if done.exit_code:
        raise RuntimeError(done.output)
    place = values_of(InferenceConfig, {"load": str(folder / "native"), "device": "cpu"})
    world = init_world("cpu")
    source = open_model(folder / "native", place, world)
    engine = load_forward_engine(source, place, world, tokens=1)
    sampling = Sampling(temperature=1.0, top_k=top_k) if top_k else Sampling()
    generator = TokenGenerator(engine, max_tokens=1024, sampling=sampling, stop_condition=StopCondition(eod=None))

    def run(ids: torch.Tensor) -> list[list[int]]:
        requests = [GenerationRequest(ids=tuple(row), max_new_tokens=new, seed=0) for row in ids.tolist()]
        return [list(each.ids) for each in generator.generate(requests, len(requests))]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m", choices=("gpt2-124m", "llama-125m", "llama-small"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--top-k", type=int, default=0, help="0: greedy")
    parser.add_argument("--opponents", default=",".join(OPPONENTS))
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Processor time, with --threads 1, is comparable on a machine that others use at the same time.
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    model = reference(options.model)
    ids = torch.randint(5, 30000, (options.batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))

    def theirs(setting: str):
        attention, cache = OPPONENTS[setting]

        def generate(ids: torch.Tensor) -> list[list[int]]:
            model.set_attn_implementation(attention)
            drawn = {"do_sample": True, "top_k": options.top_k} if options.top_k else {"do_sample": False}
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=options.new,
                    use_cache=True,
                    cache_implementation=cache,
                    disable_compile=True,  # the first turns would compile for minutes
                    **drawn,
                )
            return out[:, ids.shape[1] :].tolist()

        return generate

    with tempfile.TemporaryDirectory() as folder:
        run = ours(model, Path(folder), options.new, options.top_k)
    programs = {"dynmo-train": run} | {f"transformers {name}": theirs(name) for name in options.opponents.split(",")}
    rates: dict[str, list[float]] = {name: [] for name in programs}
    texts = {}
    for turn in range(options.repeats + 1):
        for name, go in programs.items():
            started = clock()
            texts[name] = go(ids)
            elapsed = clock() - started
            if turn:  # the first turn warms up
                rates[name].append(options.batch * options.new / elapsed)
    mine = texts.pop("dynmo-train")
    title = f"{options.model} batch {options.batch}" + (f" top-k {options.top_k}" if options.top_k else "")
    for name, values in rates.items():
        emit(f"{title} {name}: {', '.join(f'{v:.1f}' for v in values)} tokens/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in medians if name != "dynmo-train"), key=lambda name: medians[name])
    ratios = [f"{of(rates['dynmo-train']) / of(rates[best]):.2f}" for of in (statistics.median, max)]
    same = "" if options.top_k else f"; {sum(mine == each for each in texts.values())} of {len(texts)} texts identical"
    emit(f"{title}: ratio to {best}: {ratios[0]} of medians, {ratios[1]} of fastest turns{same}")


if __name__ == "__main__":
    main()
