"""Chat templates on SentencePiece models: ids and loss masks of transformers' tokenizers of the same directory."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynmo_tools._common.errors import UsageError
from dynmo_tools._common.sentencepiece_json import parse_sentencepiece, read_tokenizer_document, tokenizer_document
from dynmo_tools.config.settings import BinarizeChatSettings
from dynmo_tools.tokenization.binarize_chat import chat_tokenizer
from dynmo_tools.tokenization.conversations import conversation_of
from dynmo_train.config.fields import values_of
from dynmo_train.config.sections.evaluation import InferenceConfig
from dynmo_train.evaluation.chat_prompts import Conversation, open_chat_prompts
from tests.chat_templates import CHATML, CONVERSATIONS, INSTRUCTIONS, TURNS
from tests.tables import table

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

WORDS = [
    "the",
    "red",
    "green",
    "blue",
    "house",
    "what",
    "is",
    "two",
    "plus",
    "four",
    "simple",
    "answer",
    "to",
    "a",
    "question",
    "that",
    "nobody",
    "asks",
]
# What surrounds special tokens, joined and apart; characters that only bytes spell.
PARTS = [*"abc ABC\n\t  é日😀\u00a0▁<>|[]/0123", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
PARTS += ["<turn>", "<end_turn>", "<tool>", "  ", "\n\n", " <s> ", "<unk>", "<0x41>", "<bos>", "<pad>", "<mask>"]


def token(content, *, special=True, **flags):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": special, **flags}


def model_bytes(**options):
    generator, sink = random.Random(3), io.BytesIO()
    lines = [" ".join(generator.choices(WORDS, k=9)) + "." for _ in range(400)]
    defaults = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=sink,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **defaults | options,
    )
    return sink.getvalue()


GEMMA_MODEL = {
    "add_dummy_prefix": False,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "bos_piece": "<bos>",
    "eos_piece": "<eos>",
    "pad_piece": "<pad>",
    "user_defined_symbols": ["<mask>", "<turn>", "<end_turn>", "\n\n", "\n\n\n"],
}
MODELS = {"llama": {}, "mistral": {"control_symbols": ["[INST]", "[/INST]", "[CALLS]"]}, "gemma": GEMMA_MODEL}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **NAMES}
GEMMA = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
STATED = {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>")}
# Directory -> model, tokenizer_config.json, template. ``ADDED`` is replaced by the first ids behind the model's.
DIRECTORIES = {
    "llama-2": ("llama", LLAMA, INSTRUCTIONS),
    "llama, legacy": (
        "llama",
        {**LLAMA, "legacy": True, "bos_token": {**token("<s>"), "__type": "AddedToken"}},
        INSTRUCTIONS,
    ),
    "llama, chatml": (
        "llama",
        {
            **LLAMA,
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
            "added_tokens_decoder": STATED,
            "ADDED": [
                token("<|im_start|>"),
                token("<|im_end|>"),
                token("<pad>"),
                token("<tool>", special=False, lstrip=True),
            ],
        },
        CHATML,
    ),
    "llama, no prefix": (
        "llama",
        {**LLAMA, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        CHATML,
    ),
    "mistral": ("mistral", {**LLAMA, "tokenizer_class": "LlamaTokenizerFast"}, INSTRUCTIONS),
    "gemma": ("gemma", {**GEMMA, "pad_token": "<pad>"}, TURNS),
    "gemma, stated": (
        "gemma",
        {
            **GEMMA,
            "added_tokens_decoder": {
                str(at): token(name, special=name != "<mask>")
                for at, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn>", "<end_turn>"])
            },
            "additional_special_tokens": ["<turn>", "<end_turn>"],
        },
        TURNS,
    ),
}


@pytest.fixture(scope="module")
def models():
    return {name: model_bytes(**options) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    made = {}
    for name, (model, config, template) in DIRECTORIES.items():
        folder = tmp_path_factory.mktemp("sentencepiece")
        made[name] = write_directory(folder, models[model], config, template)
    return made


def write_directory(folder: Path, model: bytes, config: dict, template: str) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    config, added = dict(config), config.get("ADDED", ())
    size = len(parse_sentencepiece(model).pieces)
    if added:
        del config["ADDED"]
        config["added_tokens_decoder"] = {
            **config["added_tokens_decoder"],
            **{str(size + at): each for at, each in enumerate(added)},
        }
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def conversations(number):
    generator = random.Random(number)

    def text():
        words = " ".join(generator.choices(WORDS, k=generator.randint(0, 6)))
        return generator.choice([words, "".join(generator.choices(PARTS, k=generator.randint(0, 30))), words + "\n "])

    for _ in range(150):
        turns = generator.randint(1, 5)
        yield [{"role": ("user", "assistant")[at % 2], "content": text()} for at in range(turns)]
    yield from (each for each in CONVERSATIONS if each[0]["role"] != "system" and len(each) > 1)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_chat_on_a_sentencepiece_model_equals_transformers(folders, name):
    folder = folders[name]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    mine = chat_tokenizer(BinarizeChatSettings(tokenizer=folder))
    values = {"load": str(folder), "tokenizer_model": str(folder), "tokenizer_type": "SentencePieceTokenizer"}
    prompts = open_chat_prompts(values_of(InferenceConfig, values), folder, None)
    assert mine.num_ids == len(theirs)
    assert prompts.ends == (theirs.eos_token,)
    learned = 0
    for messages in conversations(len(name)):
        try:
            found = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        except transformers.utils.chat_template_utils.jinja2.exceptions.TemplateError:
            continue
        chat = mine.tokenize(conversation_of({"messages": messages}))
        assert chat.ids.tolist() == list(found["input_ids"]), messages
        assert chat.mask.tolist() == [bool(each) for each in found["assistant_masks"]], messages
        learned += int(chat.mask.sum())
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        text = prompts.text(Conversation(messages=tuple(messages)))
        assert prompts.tokenizer.encode(text) == list(ids), messages
        assert prompts.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert learned > 500


def test_plain_text_has_the_ids_of_sentencepiece(models):
    """Text without special tokens, after a space as the model puts it; transformers puts none before another one."""
    from tokenizers import Tokenizer

    for name, model in models.items():
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        document = tokenizer_document(parse_sentencepiece(model), {}, name)
        library = Tokenizer.from_str(json.dumps(document))
        for text in ["the red house", "two  plus\tfour", "é 日本 😀", "a ", "answer,that\nis"]:
            assert library.encode(text, add_special_tokens=False).ids == processor.encode(text), (name, text)


def test_template_reads_the_tokens_of_a_model_without_configuration(models, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(models["mistral"])
    (tmp_path / "t.jinja").write_text(INSTRUCTIONS)
    settings = BinarizeChatSettings(tokenizer=tmp_path / "tokenizer.model", chat_template=tmp_path / "t.jinja")
    messages = [{"role": "user", "content": "is two"}, {"role": "assistant", "content": "simple"}]
    chat = chat_tokenizer(settings).tokenize(conversation_of({"messages": messages}))
    assert chat.ids[0] == 1
    assert chat.ids[-1] == 2
    assert 3 in chat.ids
    assert chat.mask[-1]


@table(
    ("options", "config", "message"),
    [
        ({"model_type": "unigram"}, {}, "is not BPE.*tokenizer.json"),
        ({"byte_fallback": False}, {}, "no byte fallback.*tokenizer.json"),
        ({"normalization_rule_name": "nmt_nfkc"}, {}, "normalizes texts.*tokenizer.json"),
        ({}, {"tokenizer_class": "T5Tokenizer"}, "'T5Tokenizer'.*tokenizer.json"),
        ({}, {"added_tokens_decoder": {"9000": token("<x>")}}, "without a gap"),
        ({}, {"added_tokens_decoder": {"5": token("<x>")}}, "has the id 5"),
        ({}, {"added_tokens_decoder": {"-1": token("<x>")}}, "no token for '-1'"),
        ({}, {"added_tokens_decoder": {"²": token("<x>")}}, "no token for"),
        ({}, {"added_tokens_decoder": [1]}, "must be an object"),
        ({}, {"bos_token": 3}, "bos_token"),
        ({}, {"additional_special_tokens": [3]}, "additional_special_tokens"),
        ({}, {"additional_special_tokens": 3}, "additional_special_tokens"),
    ],
)
def test_model_without_such_a_form_is_refused_by_name(tmp_path, options, config, message):
    (tmp_path / "tokenizer.model").write_bytes(model_bytes(vocab_size=330, **options))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        read_tokenizer_document(tmp_path / "tokenizer.model", tmp_path / "tokenizer_config.json")


def test_file_of_another_format_is_refused(tmp_path):
    for text in (b"", b"{}", b"\x0a\xff\xff\xff", b"\xff" * 40):
        (tmp_path / "tokenizer.model").write_bytes(text)
        with pytest.raises(UsageError, match="not a SentencePiece model"):
            read_tokenizer_document(tmp_path / "tokenizer.model", None)


def test_data_and_answers_of_a_sentencepiece_model(folders, tmp_path, monkeypatch):
    """From the directory of a model: its conversations as a data set, and the answers of transformers."""
    import torch

    from dynmo_tools import cli as prep
    from dynmo_train.cli import app

    folder = tmp_path / "model"
    shutil.copytree(folders["llama, chatml"], folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    rows = [[{"role": "user", "content": "what is  two"}], [{"role": "user", "content": "a\n<|im_end|> b 😀"}]]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    words = ["generate", "--load", folder, "--greedy", "--max-new-tokens", "12", "--device", "cpu"]
    words += ["--cache-dir", tmp_path / "cache", "--messages", tmp_path / "chat.jsonl", "--format", "json"]
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    for messages, completion in zip(rows, json.loads(done.stdout), strict=True):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.no_grad():
            ids = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert completion["prompt_tokens"] == prompt.shape[1]
        assert completion["completion"] == tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [*rows[1], {"role": "assistant", "content": "simple"}]}) + "\n"
    )
    words = ["dynmo-prep", "binarize-chat", tmp_path / "chat.jsonl", "-o", tmp_path / "d", "--tokenizer", folder]
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    with pytest.raises(SystemExit) as stop:
        prep.main()
    assert not stop.value.code
    sidecar = json.loads((tmp_path / "d_chat_document.dataset.json").read_text())
    assert sidecar["tokenizer"]["type"] == "SentencePieceTokenizer"
    assert sidecar["tokenizer"]["vocab_size"] == len(tokenizer)
