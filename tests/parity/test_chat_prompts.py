"""Prompts of conversations: the token ids of transformers' ``apply_chat_template`` with the generation prompt."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.config.fields import values_of
from dynmo_train.config.sections.evaluation import InferenceConfig
from dynmo_train.data.tokenizer import load_tokenizer
from dynmo_train.evaluation.chat_prompts import Conversation, conversations_of, end_ids_of, of_user, open_chat_prompts
from tests.chat_templates import CHATML, CONVERSATIONS, TEMPLATES, write_tokenizer
from tests.levels import complete_but
from tests.tables import table

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chat_prompts(folder, template=None):
    values = {"load": str(folder), "tokenizer_model": str(folder / "tokenizer.json")}
    return open_chat_prompts(values_of(InferenceConfig, values), folder, template)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("file", complete_but([True, False], True))
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_of_a_conversation_has_the_ids_of_transformers(tmp_path, name, file, tools):
    folder = write_tokenizer(tmp_path, name, TEMPLATES[name], file=file)
    theirs, mine = transformers.AutoTokenizer.from_pretrained(folder), chat_prompts(folder)
    tokenizer, equal = load_tokenizer(folder / "tokenizer.json"), 0
    for messages in (each[:end] for each in CONVERSATIONS for end in range(1, len(each) + 1)):
        conversation = Conversation(messages=tuple(messages), tools=tools)
        try:
            expected = theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except transformers.utils.chat_template_utils.jinja2.exceptions.TemplateError:
            with pytest.raises(UsageError, match="cannot write a conversation"):
                mine.text(conversation)
            continue
        assert tokenizer.encode(mine.text(conversation)) == list(expected)
        equal += 1
    assert equal >= 3
    assert mine.ends == (theirs.eos_token,)


def test_template_of_a_file_replaces_that_of_the_tokenizer(tmp_path):
    folder = write_tokenizer(tmp_path, "chatml", CHATML)
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}>{{ eos_token }}")
    assert chat_prompts(folder, str(tmp_path / "own.jinja")).text(of_user("Hi", None)) == "Hi><|im_end|>"
    with pytest.raises(UsageError, match="no such file"):
        chat_prompts(folder, str(tmp_path / "none.jinja"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="no chat template"):
        chat_prompts(folder)


@table(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"messages": []}',
        '{"messages": [{"content": "x"}]}',
        '{"messages": [{"role": 1}]}',
        '{"messages": [{"role": "user"}], "tools": 3}',
        '["x"]',
        "\n \n",
        "",
        "[" * 100_000,
    ],
)
def test_line_that_is_not_a_conversation_is_refused(line):
    with pytest.raises(UsageError, match=r"t\.jsonl"):
        conversations_of(line, "t.jsonl")


def test_surrogates_are_refused_before_the_tokenizer_reads_them(tmp_path):
    mine = chat_prompts(write_tokenizer(tmp_path, "chatml", CHATML))
    (conversation,) = conversations_of('[{"role": "user", "content": "\\ud800"}]', "t.jsonl")
    with pytest.raises(UsageError, match="surrogates not allowed"):
        mine.text(conversation)


def test_end_ids_are_those_of_the_generation_config():
    assert end_ids_of(None) == end_ids_of({"generation_config": None}) == frozenset()
    assert end_ids_of({"generation_config": {"eos_token_id": 5}}) == {5}
    assert end_ids_of({"generation_config": {"eos_token_id": [5, 7]}}) == {5, 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama with a chat tokenizer, in Hugging Face's form."""
    import torch

    folder = write_tokenizer(tmp_path_factory.mktemp("model"), "chatml", CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def generate(*words, input=None):
    return CliRunner().invoke(app, ["generate", *map(str, words)], input=input)


@pytest.mark.complete
def test_answers_are_those_of_transformers(model, tmp_path):
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    rows = [CONVERSATIONS[0][:1], CONVERSATIONS[2][:2], CONVERSATIONS[1][:3]]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    words = ("--load", model, "--max-new-tokens", "8", "--greedy", "--cache-dir", tmp_path, "--device", "cpu")
    done = generate(*words, "--messages", tmp_path / "chat.jsonl", "--format", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for messages, completion in zip(rows, found, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.no_grad():
            ids = reference.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert completion["prompt_tokens"] == prompt.shape[1]
        new = ids[0, prompt.shape[1] :]
        assert completion["completion"] == tokenizer.decode(new, skip_special_tokens=True)
    user = CONVERSATIONS[0][0]["content"]
    plain = generate(*words, "--chat", "--prompt", user)
    assert plain.stdout.rstrip("\n") == found[0]["completion"].rstrip("\n")
    streamed = generate(*words, "--chat", "--prompt", user, "--stream")
    assert streamed.stdout.rstrip("\n") == found[0]["completion"].rstrip("\n")
    # The token that the model predicts first ends the turn.
    config = json.loads((model / "tokenizer_config.json").read_text())
    first = tokenizer.convert_ids_to_tokens([int(new[0])])[0]
    shutil.copytree(model, tmp_path / "ends")
    generation = {"eos_token_id": [1, int(new[0])]}
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps(generation))
    words = ("--load", tmp_path / "ends", "--greedy", "--cache-dir", tmp_path, "--device", "cpu", "--format", "json")
    (tmp_path / "last.jsonl").write_text(json.dumps(rows[2]) + "\n")
    ended = json.loads(generate(*words, "--messages", tmp_path / "last.jsonl").stdout)[0]
    assert (ended["finish_reason"], ended["completion_tokens"]) == ("end", 0), (first, config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "x", "--system", "y"), "--system"),
        (("--prompt", "x", "--chat-template", "t.jinja"), "--chat-template"),
        (("--interactive", "--chat"), "--interactive"),
        (("--messages", "-", "--prompt", "x"), "--messages"),
        (("--chat", "--num-samples", "2"), "--chat"),
    ],
)
def test_options_of_conversations_that_exclude_others_are_refused(words, message):
    done = generate("--load", "none", *words, input="")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(message)
