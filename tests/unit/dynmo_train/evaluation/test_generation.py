"""Generation with a key-value cache equals full forward passes; sampling follows the probabilities."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import torch

from dynmo_train._common.document import MAX_DOCUMENT_BYTES
from dynmo_train._common.errors import UsageError
from dynmo_train.cli.generate import generation_settings, read_prompts
from dynmo_train.config.sections.evaluation import GenerateConfig
from dynmo_train.data.tokenizer import Tokenizer
from dynmo_train.evaluation.forward_engine import ForwardEngine
from dynmo_train.evaluation.lambada import truncate_left
from dynmo_train.evaluation.sampling import Sampling, next_token
from dynmo_train.evaluation.scoring import ScoredSequence
from dynmo_train.evaluation.text_generator import GenerationSettings, TextStream, build_completion
from dynmo_train.evaluation.token_generator import GeneratedTokens, GenerationRequest, StopCondition, TokenGenerator
from dynmo_train.launch.schedulers.hostfile import read_hostfile
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.kv_cache import Decoder, DecodingCache
from dynmo_train.models.layer_list import BoundaryShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import uniform_partition
from tests.tables import table

SHAPE = GptShape(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=12,
    vocab_size=23,
    padded_vocab_size=32,
    init_method_std=0.5,
)


def build():
    family = Gpt(SHAPE)
    modules = {item.name: family.build(item.name, torch.device("cpu")) for item in family.items}
    return family, modules


def whole(modules, ids_BT):
    """Logits of every position by the training modules, [B, T, V]."""
    x = ids_BT
    for module in list(modules.values())[:-1]:
        x = module(x)
    return modules["head"].logits(x)


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1], [2, 7]])
def test_decoder_in_chunks_equals_one_forward_pass(pieces):
    family, modules = build()
    decoder = Decoder(family, modules, SHAPE.max_position_embeddings)
    ids = torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(modules, ids)
    cache, read = DecodingCache(), 0
    for piece in pieces:
        logits = decoder.read(ids[:, read : read + piece], cache)
        read += piece
        torch.testing.assert_close(logits, expected[:, read - 1], rtol=1e-5, atol=1e-5)


def engine_of(family, modules):
    """A forward engine of one process, around modules that are already built."""
    world = World(rank=0, size=1, device=torch.device("cpu"), host="here", dims=ParallelDims())
    boundary = BoundaryShape.hidden(batch=1, tokens=1, width=SHAPE.hidden_size)
    return ForwardEngine(family, modules, uniform_partition(family.items, 1), world, boundary)


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def spell(ids):
    """Decode ids: each token is two letters, so that texts can begin and end within tokens."""
    return "".join(LETTERS[number] + LETTERS[number].swapcase() for number in ids)


def complete(prompts, *, max_new_tokens=6, eod=None, stop="", sampling=None, seeds=None, batch=8, recompute=False):
    family, modules = build()
    generator = TokenGenerator(
        engine_of(family, modules),
        max_tokens=SHAPE.max_position_embeddings,
        sampling=sampling or Sampling(),
        stop_condition=StopCondition(eod=eod, stops=(stop,) if stop else (), decode=spell),
        recompute=recompute,
    )
    requests = [
        GenerationRequest(ids=tuple(ids), max_new_tokens=max_new_tokens, seed=seed)
        for ids, seed in zip(prompts, seeds or [0] * 99, strict=False)
    ]
    return [(list(each.ids), each.finish_reason) for each in generator.generate(requests, batch)]


def slow(prompt, max_new_tokens=6):
    """Greedy decoding without a cache."""
    _, modules = build()
    modules = {name: module.eval() for name, module in modules.items()}
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            ids.append(int(whole(modules, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[3, 1], [5], [7, 7, 2, 9], [4, 4], [1, 2, 3]]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_greedy_generation_equals_full_recomputation(batch, recompute):
    assert complete(PROMPTS, batch=batch, recompute=recompute) == [(slow(ids), "length") for ids in PROMPTS]


def test_generation_ends_at_end_of_document_or_stop_text():
    whole_text = slow([3, 1], 9)
    eod = whole_text[4]
    cut = whole_text[: whole_text.index(eod)]
    assert complete([[3, 1]], max_new_tokens=9, eod=eod) == [(cut, "end")]
    # The stop text begins and ends in the middle of a token.
    across = spell(whole_text[2:4])[1:3]
    first = next(at for at in range(1, 10) if across in spell(whole_text[:at]))
    assert complete([[3, 1], [5]], max_new_tokens=9, stop=across)[0] == (whole_text[:first], "stop")
    assert (
        complete([[3, 1]], max_new_tokens=9, stop=spell([3, 1]) + spell(whole_text[:1]))[0][1] == "length"
    )  # not in the prompt


def test_draws_depend_on_the_seed_and_not_on_the_batch():
    hot = Sampling(temperature=2.0)
    alone = [complete([[3]], sampling=hot, seeds=[seed])[0] for seed in range(5)]
    assert complete([[3]] * 5, sampling=hot, seeds=range(5)) == alone
    assert complete([[3]] * 5, sampling=hot, seeds=range(5), batch=2) == alone
    assert len({tuple(ids) for ids, _ in alone}) > 1


def counts(sampling, draws=4000):
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [next_token(logits, sampling, generator) for _ in range(draws)]
    return [drawn.count(token) / draws for token in range(4)]


def test_draws_follow_the_probabilities():
    assert counts(Sampling(temperature=1.0)) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)
    flat = [p**0.5 for p in (0.1, 0.4, 0.2, 0.3)]
    assert counts(Sampling(temperature=2.0)) == pytest.approx([p / sum(flat) for p in flat], abs=0.03)


def test_top_k_and_top_p_remove_unlikely_tokens():
    assert counts(Sampling(temperature=1.0, top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.65)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.75)) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)
    assert counts(Sampling(temperature=1.0, top_p=0.01)) == [0, 1, 0, 0]
    assert counts(Sampling(), 3) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"top_k": 0, "top_p": 0.0}, 0.0),
        ({"top_k": 0, "top_p": 0.0, "temperature": 1.5}, 0.0),
        ({"top_p": 0.5}, 1.0),
        ({"top_k": 4}, 1.0),
    ],
)
def test_settings_without_top_k_and_top_p_are_greedy(options, temperature):
    assert generation_settings(GenerateConfig(**options), unconditional=False).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"top_k": 5, "top_p": 0.0}, Sampling(temperature=1.0, top_k=5)),
        ({"top_k": 5, "top_p": 0.0, "temperature": 0.5}, Sampling(temperature=0.5, top_k=5)),
        ({"top_k": 5, "top_p": 0.0, "greedy": True}, Sampling(top_k=5)),
        ({"top_p": 0.0, "greedy": True}, Sampling()),
    ],
)
def test_settings_with_zero_top_p_have_no_nucleus(options, sampling):
    assert generation_settings(GenerateConfig(**options), unconditional=False).sampling == sampling


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
    ],
)
def test_sampling_out_of_range_is_refused(values, flag):
    with pytest.raises(UsageError, match=flag):
        Sampling(**values).check()
    Sampling(temperature=1.0, top_k=5, top_p=1.0).check()


PIECES = (" he", " the", "re", " ab", "x")


def word_pieces(ids):
    """Decode as SentencePiece does: words begin with a space, which the first word of a text loses."""
    return "".join(PIECES[number] for number in ids).lstrip()


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("he the", " ab ", 2), (" he", " ab", 1), ("there", " ab he ", 3), ("e t", " ab h", 2), ("zz", " ab he there", 4)],
)
def test_stop_text_across_tokens_is_found_and_removed(stop, text, tokens):
    new, prompt = [3, 0, 1, 2], (4,)
    condition = StopCondition(eod=None, stops=("never", stop), decode=word_pieces)
    count = next((n for n in range(1, 5) if condition.finish_reason(prompt, new[:n], 9) == "stop"), None)
    generated = GeneratedTokens(ids=tuple(new[:count]), finish_reason="stop" if count else "length")
    settings = GenerationSettings(max_new_tokens=9, sampling=Sampling(), seed=0, stops=("never", stop))
    request = GenerationRequest(ids=prompt, max_new_tokens=9, seed=0)
    done = build_completion("x", request, generated, word_pieces, settings, 99)
    assert (done.completion, done.completion_tokens) == (text, tokens)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("there", " he"), " ab"),
        (("zz", "ab he t"), " "),
        (("e t", "b h"), " a"),
        (("re", "there"), " ab he "),
        (("zz", "y"), None),
    ],
)
def test_first_of_several_stop_texts_ends_the_continuation(stops, text):
    new, prompt = [3, 0, 1, 2], (4,)
    condition = StopCondition(eod=None, stops=stops, decode=word_pieces)
    count = next((n for n in range(1, 5) if condition.finish_reason(prompt, new[:n], 9) == "stop"), None)
    pieces: list[str] = []
    stream = TextStream(condition, pieces.append)
    request = GenerationRequest(ids=prompt, max_new_tokens=9, seed=0)
    for number in range(1, (count or 4) + 1):
        stream.add(request, new[:number])
    generated = GeneratedTokens(ids=tuple(new[:count]), finish_reason="stop" if count else "length")
    settings = GenerationSettings(max_new_tokens=9, sampling=Sampling(), seed=0, stops=stops)
    done = build_completion("x", request, generated, word_pieces, settings, 99).completion
    stream.finish(done)
    assert done == (" ab he there" if text is None else text)
    assert "".join(pieces) == done
    assert len(pieces) > 1 or text is not None


def test_stream_holds_back_incomplete_characters_and_begun_stop_texts():
    texts = {1: "a", 2: "a\ufffd", 3: "aß<", 4: "aß<e", 5: "aß<ex"}
    condition = StopCondition(eod=None, stops=("<end>",), decode=lambda ids: texts.get(len(ids), ""))
    pieces: list[str] = []
    stream = TextStream(condition, pieces.append)
    request = GenerationRequest(ids=(), max_new_tokens=9, seed=0)
    grown = []
    for number in range(1, 6):
        stream.add(request, list(range(number)))
        grown.append("".join(pieces))
    assert grown == ["a", "a", "aß", "aß", "aß<ex"]


def test_special_token_as_stop_ends_by_its_id():
    vocabulary = {"a": 0, "<|im_end|>": 1}
    decode = {0: "a", 1: ""}
    tokenizer = Tokenizer(
        to_ids=lambda _: [0],
        to_text=lambda ids: "".join(decode[number] for number in ids),
        vocab_size=2,
        eod=None,
        vocabulary=lambda: vocabulary,
    )
    special = tokenizer.special_ids(("<|im_end|>", "a", "b"))
    assert special == {"<|im_end|>": 1}
    condition = StopCondition(eod=None, end_ids=frozenset(special.values()))
    assert condition.finish_reason((0,), [0, 1], 9) == "end"
    assert condition.finish_reason((0,), [0, 0], 9) is None


def test_long_passage_is_truncated_on_the_left():
    sequence = ScoredSequence(tokens=np.arange(10), first_scored=8)
    assert truncate_left(sequence, 9) is sequence
    short = truncate_left(sequence, 4)
    assert (short.tokens.tolist(), short.first_scored, short.length) == ([5, 6, 7, 8, 9], 3, 4)


def test_prompts_of_a_fifo_are_refused(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    with pytest.raises(UsageError, match="is a FIFO; must be a regular file"):
        read_prompts(None, GenerateConfig(prompts=str(tmp_path / "prompts")))


@pytest.mark.parametrize("name", [None, "-", "/dev/stdin"])
def test_prompts_are_read_from_stdin_up_to_a_limit(monkeypatch, name):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert read_prompts(None, GenerateConfig(prompts=name)) == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * (MAX_DOCUMENT_BYTES + 1)))
    with pytest.raises(UsageError, match="at most 67,108,864 characters of prompts"):
        read_prompts(None, GenerateConfig(prompts=name))


def test_read_hostfile_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(UsageError, match="is a FIFO; must be a regular file"):
        read_hostfile(tmp_path / "hosts")


def test_prompt_has_the_separators_of_unicode(tmp_path):
    prompts = ["one\u2028two", "three\x0cfour\x85", "\x1cfive"]
    (tmp_path / "prompts").write_bytes("\r\n".join([*prompts, ""]).encode())
    assert read_prompts(None, GenerateConfig(prompts=str(tmp_path / "prompts"))) == prompts


@table("temperature", [1e-37, 1e-45, 5e-324])
@table("filters", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_temperature_near_0_draws_the_most_likely_token(temperature, filters):
    logits, generator = torch.tensor([1.0, -40.0, 3.0, 2.5]), torch.Generator().manual_seed(0)
    assert next_token(logits, Sampling(temperature=temperature, **filters), generator) == 2
