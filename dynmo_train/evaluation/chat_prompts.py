"""Prompts of conversations: messages to the text that a chat template writes before a turn of the assistant.

    {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}     one object or list of messages a line
      --ChatTemplate, add_generation_prompt--> text --tokenizer, special tokens in the text--> ids

The ids are those of transformers' ``apply_chat_template(messages, add_generation_prompt=True)``.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.chat_template import ChatTemplate, ConversationError, Message, open_chat_template
from .._common.document import MAX_DOCUMENT_BYTES, parse_any_json
from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig
from ..data.tokenizer import SENTENCE_PIECE, Tokenizer, TokenizerFiles, open_chat_tokenizer

HUGGING_FACE = "HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages to answer, and JSON schemas of tools or None."""

    messages: tuple[Message, ...]
    tools: Any = None


def conversations_of(text: str, origin: str) -> list[Conversation]:
    """The conversations of a JSON Lines text.

    Args:
        text: an object with ``messages``, or a list of messages, on each line; blank lines are skipped.
        origin: its file, for messages.

    Raises:
        UsageError: a line is not a conversation, or there is none.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = parse_any_json(line, MAX_DOCUMENT_BYTES)
        except ValueError as error:
            raise UsageError(f"{origin}:{number}: not a JSON document: {error}") from error
        found.append(_conversation_of(value, f"{origin}:{number}"))
    if not found:
        raise UsageError(f'{origin}: no conversation; write one JSON object a line, {{"messages": [...]}}')
    return found


def _conversation_of(value: Any, origin: str) -> Conversation:
    if not isinstance(value, dict):
        value = {"messages": value}
    messages, tools = value.get("messages"), value.get("tools")
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise UsageError(
            f'{origin}: not a conversation: must be {{"messages": [...]}} or a list of messages, each with a role,'
            ' such as {"role": "user", "content": "..."}'
        )
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise UsageError(f"{origin}: tools must be a list of JSON schemas")
    return Conversation(messages=tuple(messages), tools=tools or None)


def of_user(prompt: str, system: str | None) -> Conversation:
    """A conversation of one message of the user, after a system message where one is given."""
    before = () if system is None else ({"role": "system", "content": system},)
    return Conversation(messages=(*before, {"role": "user", "content": prompt}))


@dataclass(frozen=True, kw_only=True)
class ChatPrompts:
    """Writes the prompt of a conversation.

    Attributes:
        template: the chat template.
        ends: special tokens that end a turn: the template's end-of-sequence token, where it has one.
        tokenizer: finds special tokens in text.
    """

    template: ChatTemplate
    ends: tuple[str, ...]
    tokenizer: Tokenizer

    def text(self, conversation: Conversation) -> str:
        """The text before the assistant's next turn.

        Raises:
            UsageError: the template refuses the messages, or fails on them.
        """
        try:
            text = self.template.text(conversation.messages, conversation.tools, prompt=True)
            # JSON may have surrogates, which no tokenizer reads.
            text.encode()
        except (ConversationError, UnicodeEncodeError) as error:
            raise UsageError(f"{self.template.origin}: cannot write a conversation: {error}") from error
        return text


def open_chat_prompts(inference: InferenceConfig, directory: Path, template: str | None) -> ChatPrompts:
    """The chat template of a model.

    Args:
        inference: options of the tokenizer.
        directory: directory of the checkpoint.
        template: file of the template (``--chat-template``); None is the one next to the tokenizer.

    Raises:
        UsageError: there is no template, or the tokenizer does not find special tokens in text.
    """
    files = TokenizerFiles.of(vars(inference))
    if files is None:
        folder = directory / "tokenizer"
        if not folder.is_dir():
            raise UsageError(f"{directory} contains no tokenizer; give --tokenizer-model FILE")
        files = TokenizerFiles.of_folder(folder)
    if files.kind not in (HUGGING_FACE, *SENTENCE_PIECE):
        raise UsageError(
            f"--chat: a {files.kind} does not find the special tokens of a chat template in text; give"
            " --tokenizer-model with a tokenizer.json or a SentencePiece model"
        )
    tokenizer, special = open_chat_tokenizer(files)
    folder = next(iter(files.files.values())).parent
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    chosen = Path(template) if template is not None else own if own.is_file() else None
    if chosen is not None and not chosen.is_file():
        raise UsageError(f"--chat-template {chosen}: no such file")
    # Of today, as in transformers: a template may write it into the system message.
    today = datetime.datetime.now().date()
    compiled = open_chat_template(chosen, config if config.is_file() else None, today, special)
    end = compiled.variables.get("eos_token")
    return ChatPrompts(template=compiled, ends=() if not end else (str(end),), tokenizer=tokenizer)


def end_ids_of(source: Mapping[str, Any] | None) -> frozenset[int]:
    """The ids of a published model's end tokens: of its ``generation_config.json``, else of its ``config.json``.

    Transformers ends at the same ones.

    Args:
        source: ``source`` of a checkpoint's manifest; None has none.
    """
    found = source or {}
    config = found.get("config") or {}
    stated = (found.get("generation_config") or {}, config, config.get("text_config") or {})
    ends = next((each["eos_token_id"] for each in stated if each.get("eos_token_id") is not None), None)
    values: Sequence[Any] = ends if isinstance(ends, list) else [ends]
    return frozenset(each for each in values if type(each) is int)
