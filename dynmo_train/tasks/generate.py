"""Text from a checkpoint: reads it, continues prompts, one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..errors import UsageError
from ..families import CAUSAL, family_of_manifest
from ..loading import default_cache, is_hugging_face, native_copy
from ..models.decoding import Cache, Decoder
from ..models.items import parameters_of
from ..parallel.seeding import stable_seed
from .sampling import Sampling, next_token


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A continued prompt. ``finish_reason`` is ``end`` (the model ended the document), ``length`` or ``positions``."""

    prompt: str
    completion: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str

    def to_document(self) -> dict[str, Any]:
        """For ``--format json``."""
        return asdict(self)


def load_decoder(checkpoint: Checkpoint, device: torch.device) -> Decoder:
    """The model of a checkpoint with its weights, dropout off; reads no optimizer state."""
    model = checkpoint.manifest["model"]
    if model["family"] not in CAUSAL:
        raise UsageError(
            f"{checkpoint.directory} holds a {model['family']} model, which does not continue text; models of the"
            f" families {', '.join(CAUSAL)} do"
        )
    try:
        family = family_of_manifest(model)
    except (TypeError, KeyError) as error:
        raise UsageError(f"{checkpoint.directory}: the manifest's model cannot be built: {error}") from error
    modules = {}
    for item in family.items:
        module = family.build(item.name, torch.device("meta"))
        weights = checkpoint.load(parameters_of(item.name, module), device)
        prefix = len(item.name) + 1
        module.load_state_dict({name[prefix:]: tensor.float() for name, tensor in weights.items()}, assign=True)
        modules[item.name] = module
    return Decoder(family, modules, model["max_position_embeddings"])


def open_tokenizer(checkpoint: Checkpoint, given: Path | None) -> Tokenizer:
    """The tokenizer that was asked for, else the one in the checkpoint; it must fit the vocabulary."""
    path = given or checkpoint.directory / "tokenizer"
    if given is None and not path.is_dir():
        raise UsageError(f"{checkpoint.directory} holds no tokenizer; give --tokenizer-model")
    tokenizer = load_tokenizer(path)
    vocab_size = checkpoint.manifest["model"]["vocab_size"]
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(f"{path} has {tokenizer.vocab_size} ids; the model of {checkpoint.directory} has {vocab_size}")
    return tokenizer


def complete(
    decoder: Decoder, prompt: Sequence[int], *, max_new_tokens: int, eod: int | None, sampling: Sampling, seed: int
) -> tuple[list[int], str]:
    """Continue one prompt of token ids: the new ids, without the end of document, and why they end."""
    generator = torch.Generator().manual_seed(seed)
    device = next(decoder.modules["embedding"].parameters()).device
    cache = Cache()
    new: list[int] = []
    ids = list(prompt)
    while len(new) < max_new_tokens:
        if len(prompt) + len(new) > decoder.max_tokens:
            return new, "positions"
        logits_BV = decoder.read(torch.tensor([ids], device=device), cache)
        ids = [next_token(logits_BV[0], sampling, generator)]
        if ids[0] == eod:
            return new, "end"
        new += ids
    return new, "length"


def _prompt_ids(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Token ids of a prompt; an empty one begins a document, after the token that ends the one before."""
    ids = tokenizer.encode(text)
    if not ids:
        if tokenizer.eod is None:
            raise UsageError("an empty prompt needs a tokenizer with an end-of-document token; give --prompt TEXT")
        ids = [tokenizer.eod]
    if len(ids) > max_tokens:
        raise UsageError(f"the prompt {text[:40]!r}... has {len(ids)} tokens; the model has {max_tokens} positions")
    return ids


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate: ``num_samples`` continuations of each prompt, of at most ``max_new_tokens`` tokens.

    ``cache_dir`` is where a Hugging Face directory is kept in native form; None: the folder that is usual.
    """

    load: Path
    prompts: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    num_samples: int
    tokenizer_model: Path | None
    cache_dir: Path | None = None


def _open(request: Request) -> Checkpoint:
    path = request.load
    if is_hugging_face(path):
        path = native_copy(path, request.cache_dir or default_cache())
    return open_checkpoint(find_checkpoint(path))


def generate(request: Request, device: torch.device) -> list[Completion]:
    """Answer a request, prompt by prompt; sample ``n`` of a prompt is the same however many are drawn.

    Raises:
        UsageError: no checkpoint, no tokenizer, a prompt longer than the model's positions.
    """
    request.sampling.check()
    if request.num_samples > 1 and request.sampling.temperature == 0.0:
        raise UsageError("--num-samples above 1 gives the same text again without --temperature above 0")
    checkpoint = _open(request)
    tokenizer = open_tokenizer(checkpoint, request.tokenizer_model)
    decoder = load_decoder(checkpoint, device)
    prompts = [_prompt_ids(text, tokenizer, decoder.max_tokens) for text in request.prompts]
    results = []
    for number, ids in enumerate(prompts):
        for sample in range(request.num_samples):
            new, reason = complete(
                decoder,
                ids,
                max_new_tokens=request.max_new_tokens,
                eod=tokenizer.eod,
                sampling=request.sampling,
                seed=stable_seed(request.seed, number, sample),
            )
            # Decoded together: a character's bytes may lie on both sides of the border.
            text, start = tokenizer.decode([*ids, *new]), tokenizer.decode(ids)
            results.append(
                Completion(
                    prompt=request.prompts[number],
                    completion=text[len(start) :] if text.startswith(start) else tokenizer.decode(new),
                    prompt_tokens=len(ids),
                    completion_tokens=len(new),
                    finish_reason=reason,
                )
            )
    return results
