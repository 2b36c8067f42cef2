"""Token ids and loss masks of conversations: those of transformers' ``apply_chat_template``."""

from __future__ import annotations

import datetime
import json

import pytest

from dynmo_tools._common.chat_template import ChatTemplate, ConversationError, open_chat_template
from dynmo_tools._common.errors import UsageError
from dynmo_tools.io.jsonl import BadLineError
from dynmo_tools.tokenization.conversations import ChatTokenizer, conversation_of
from dynmo_tools.tokenization.definitions import read_definition
from tests.chat_templates import (
    ANSWER,
    CHATML,
    CONVERSATIONS,
    MACRO,
    TEMPLATES,
    TURNS,
    USER,
    without_blocks,
    write_tokenizer,
)
from tests.tables import table

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")


def chat_tokenizer(folder, date=None):
    template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    compiled = open_chat_template(template if template.exists() else None, config, date)
    return ChatTokenizer(read_definition(folder / "tokenizer.json"), compiled)


def reference(tokenizer, messages, **options):
    found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **options)
    return found["input_ids"], [bool(each) for each in found["assistant_masks"]]


def compare(mine, reference_tokenizer, messages, tools=None):
    """Equal ids and masks; False where both refuse the conversation."""
    row = {"messages": messages} | ({} if tools is None else {"tools": tools})
    try:
        ids, mask = reference(reference_tokenizer, messages, tools=tools)
    except transformers.utils.chat_template_utils.jinja2.exceptions.TemplateError:
        with pytest.raises(ConversationError):
            mine.tokenize(conversation_of(row))
        return False
    chat = mine.tokenize(conversation_of(row))
    assert chat.ids.tolist() == list(ids)
    assert chat.mask.tolist() == mask
    assert any(mask)
    assert not all(mask)
    return True


@pytest.mark.parametrize("file", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_with_generation_blocks_equals_transformers(tmp_path, name, file):
    folder = write_tokenizer(tmp_path, name, TEMPLATES[name], file=file)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    mine = chat_tokenizer(folder)
    equal = [compare(mine, theirs, messages) for messages in CONVERSATIONS]
    assert sum(equal) >= 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_by_prefixes_equals_that_by_blocks(tmp_path, name):
    theirs = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "marked", name, TEMPLATES[name]))
    mine = chat_tokenizer(write_tokenizer(tmp_path / "plain", name, without_blocks(TEMPLATES[name])))
    equal = [compare(mine, theirs, messages) for messages in CONVERSATIONS]
    assert sum(equal) >= 3


def test_blocks_within_a_macro_have_the_spans_of_those_without(tmp_path):
    # transformers counts the characters before a block without those of the macro that it is in.
    plain, macro = (ChatTemplate(text, "t.jinja", {"bos_token": "<bos>"}) for text in (TURNS, MACRO))
    for messages in CONVERSATIONS[:2]:
        assert macro.render(messages) == plain.render(messages)


def test_block_whose_text_is_changed_after_it_is_refused(tmp_path):
    source = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ConversationError, match="changed after it"):
        ChatTemplate(source, "t.jinja").render([ANSWER])


def test_tools_and_reasoning_are_rendered_as_by_transformers(tmp_path):
    template = TEMPLATES["llama-3-like"].replace(
        "message.content | trim + '<|eot|>' }}{% endgen",
        "(message.reasoning_content or '') + message.content + '<|eot|>' }}{% endgen",
    )
    folder = write_tokenizer(tmp_path, "llama-3-like", template)
    theirs, mine = transformers.AutoTokenizer.from_pretrained(folder), chat_tokenizer(folder)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {}}}]
    messages = [USER, {**ANSWER, "thinking": "Hm.", "tool_calls": None}]
    assert compare(mine, theirs, messages, tools)
    assert compare(mine, theirs, messages)


def test_named_templates_are_selected_as_by_transformers(tmp_path):
    folder = write_tokenizer(tmp_path, "chatml", CHATML, file=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": CHATML, "tool_use": "tools: {{ tools | length }}\n" + CHATML, "rag": "x"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, mine = transformers.AutoTokenizer.from_pretrained(folder), chat_tokenizer(folder)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert compare(mine, theirs, [USER, ANSWER], tools)
    assert compare(mine, theirs, [USER, ANSWER])


def test_template_where_prefixes_fail_is_refused_by_name(tmp_path):
    # The reasoning of all turns but the last one is removed, as published templates of reasoning models do.
    template = without_blocks(CHATML).replace(
        "message.content", "(message.content if loop.last else message.content.split('</think>')[-1])"
    )
    mine = chat_tokenizer(write_tokenizer(tmp_path, "chatml", template))
    thought = {"role": "assistant", "content": "<think>Hm.</think>4"}
    mine.tokenize(conversation_of({"messages": [USER, thought]}))
    with pytest.raises(UsageError, match=r"chat_template\.jinja.*not a prefix.*--chat-template"):
        mine.tokenize(conversation_of({"messages": [USER, thought, USER, thought]}))


def test_header_of_a_first_turn_of_the_assistant_is_not_learned(tmp_path):
    template = without_blocks(CHATML).replace("{% if messages[0]", "{% if messages and messages[0]")
    marked = write_tokenizer(tmp_path / "marked", "chatml", CHATML)
    mine = chat_tokenizer(write_tokenizer(tmp_path / "plain", "chatml", template))
    system = {"role": "system", "content": "Terse."}
    assert compare(mine, transformers.AutoTokenizer.from_pretrained(marked), [system, ANSWER, USER, ANSWER])


@pytest.mark.parametrize("text", ["\ufdd0", "a\ufdd1b", "\ufdd0x\ufdd1"])
def test_message_with_the_marks_is_refused(tmp_path, text):
    mine = chat_tokenizer(write_tokenizer(tmp_path, "chatml", CHATML))
    for role in ("user", "assistant"):
        messages = [USER, {"role": role, "content": text}, ANSWER]
        with pytest.raises(ConversationError, match="generation block"):
            mine.tokenize(conversation_of({"messages": messages}))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].role.x }}",
    ],
)
def test_template_in_the_sandbox_fails_on_the_conversation(source):
    with pytest.raises(ConversationError):
        ChatTemplate(source, "t.jinja").text([USER])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}x", "{% include 'x' %}{% block %}"])
def test_text_that_jinja_cannot_parse_is_refused_by_name(source):
    with pytest.raises(UsageError, match=r"t\.jinja: not a chat template"):
        ChatTemplate(source, "t.jinja")


def test_date_of_a_template_is_that_of_the_settings():
    source = "{{ strftime_now('%d %b %Y') }}"
    with pytest.raises(UsageError, match="--date"):
        ChatTemplate(source, "t.jinja").text([USER])
    assert ChatTemplate(source, "t.jinja", date=datetime.date(2025, 3, 1)).text([USER]) == "01 Mar 2025"


def test_share_gpt_rows_are_the_same_conversation():
    row = {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        "system": "Terse.",
        "tools": '[{"type": "function"}]',
    }
    messages = (
        {"role": "system", "content": "Terse."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    )
    assert conversation_of(row).messages == messages
    assert conversation_of(row).tools == [{"type": "function"}]


@table(
    ("row", "reason"),
    [
        ({"text": "x"}, "key"),
        ({"messages": []}, "type"),
        ({"messages": "x"}, "type"),
        ({"messages": [1]}, "type"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": 1}]}, "role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [USER], "tools": "{"}, "type"),
        ({"messages": [USER], "tools": [1]}, "type"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "role"),
        ({"conversations": [{"from": "human"}]}, "type"),
        ({"conversations": [{"from": "human", "value": "x"}, {"role": "user"}]}, "role"),
    ],
)
def test_row_without_a_conversation_is_rejected(row, reason):
    with pytest.raises(BadLineError) as caught:
        conversation_of(row)
    assert caught.value.reason == reason
