"""Tokens per second of greedy generation on CPU with a key-value cache: ours and transformers', in the same run.

Both continue the same prompts by the same number of tokens in this process, taking turns; reading the prompt counts.

    python tests/benchmarks/train_generate.py [--model llama-small] [--batch 8] [--new 64] [--repeats 3]
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


def ours(model: torch.nn.Module, folder: Path, new: int):
    """What continues prompts with the same weights, through the native checkpoint."""
    from dynmo_ckpt.cli import app
    from dynmo_train.config.evaluation import InferenceConfig
    from dynmo_train.config.fields import values_of
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
    generator = TokenGenerator(engine, max_tokens=1024, sampling=Sampling(), stop_condition=StopCondition(eod=None))

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
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Processor time, with --threads 1, is comparable on a machine that others use at the same time.
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    model = reference(options.model)
    ids = torch.randint(5, 30000, (options.batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))

    def theirs(ids: torch.Tensor) -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new, do_sample=False, use_cache=True
            )
        return out[:, ids.shape[1] :].tolist()

    with tempfile.TemporaryDirectory() as folder:
        run = ours(model, Path(folder), options.new)
    rates: dict[str, list[float]] = {"dynmo-train": [], "transformers": []}
    texts = {}
    for turn in range(options.repeats + 1):
        for name, go in (("dynmo-train", run), ("transformers", theirs)):
            started = clock()
            texts[name] = go(ids)
            elapsed = clock() - started
            if turn:  # the first turn warms up
                rates[name].append(options.batch * options.new / elapsed)
    same = sum(a == b for a, b in zip(texts["dynmo-train"], texts["transformers"], strict=True))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        emit(f"{options.model} batch {options.batch} {name}: {', '.join(f'{v:.1f}' for v in values)} tokens/s")
    ratio = medians["dynmo-train"] / medians["transformers"]
    emit(
        f"{options.model} batch {options.batch}: ratio of medians {ratio:.2f};"
        f" {same} of {options.batch} texts identical"
    )


if __name__ == "__main__":
    main()
