"""Chat templates: the text of a conversation, and which of its characters the assistant writes.

    chat_template.jinja, tokenizer_config.json ─> ChatTemplate.render(messages) ─> text, spans [begin, end)

A template with ``{% generation %}`` blocks marks what the assistant writes. Without them, the turns are found by
prefixes: the text of the messages before a turn, with the generation prompt, must be a prefix of the whole text, and so
must the text up to and with the turn. What is between their ends is the turn.

    render(m[:i], add_generation_prompt) ──────────────┐
    render(m[:i + 1]) ──────────────────────────────────────────┐
    render(m)        <user> Hi <end> <assistant> Hello! <end> <user> ...

Templates are programs of strangers: they run in jinja's sandbox, and read plain JSON values only.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .document import MAX_TABLE_BYTES, parse_any_json, read_text, short_repr
from .errors import MissingExtraError, UsageError

Message = Mapping[str, Any]
Span = tuple[int, int]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names of a message's reasoning; templates read the first one, those of gpt-oss the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Around the text of a generation block; both are noncharacters of Unicode, which no text should have.
BEGIN, END = "\ufdd0", "\ufdd1"


class ConversationError(Exception):
    """The template refuses a conversation, or fails on it; the others may be rendered."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of a conversation, and what the assistant writes of it.

    Attributes:
        text: the text.
        spans: characters ``[begin, end)`` of each turn of the assistant, ascending.
        is_marked: whether generation blocks state the spans; else they are what is between prefixes, and may end with
            what a template writes after the end of a turn.
    """

    text: str
    spans: tuple[Span, ...]
    is_marked: bool


def _raise_exception(message: str) -> None:
    """``raise_exception`` of templates.

    Raises:
        ConversationError: always.
    """
    raise ConversationError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """``tojson`` of templates, without the escapes for HTML of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Marks:
    """Whether generation blocks are marked in the text that is rendered now."""

    is_active = False


def _environment(date: datetime.date | None, marks: Marks) -> Any:
    """The sandbox that templates run in."""
    try:
        from jinja2 import ext, nodes
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("jinja2", "prep") from error

    class GenerationBlocks(ext.Extension):
        """Puts ``BEGIN`` and ``END`` around the text of ``{% generation %}`` blocks.

        Marks in the text, rather than lengths of what was rendered before: a block may be within a macro or ``set``.
        """

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            """The node of one block; ``parser`` is at its tag."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}" if marks.is_active else str(caller())

    def strftime_now(pattern: str) -> str:
        """The date of the settings; that of the clock would make other data each day.

        Raises:
            UsageError: the settings have no date.
        """
        if date is None:
            raise UsageError(
                "the chat template prints the current date; give --date YYYY-MM-DD, for the same data again"
            )
        return datetime.datetime.combine(date, datetime.time()).strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
    return environment


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text, or several by name.
        origin: its file, for messages.
        variables: what a template reads besides messages: special tokens by name.
        date: date that ``strftime_now`` returns.

    Raises:
        UsageError: the text is not a jinja template, or the named ones have no ``default``.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        origin: str,
        variables: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self.origin, self.variables = origin, dict(variables or {})
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            names = ", ".join(sorted(sources)) or "none"
            raise UsageError(
                f"{origin}: has several chat templates and no default ({names}); give --chat-template FILE"
            )
        self._marks = Marks()
        self._is_marked = {name: GENERATION.search(text) is not None for name, text in sources.items()}
        environment = _environment(date, self._marks)
        from jinja2 import TemplateError

        self._compiled: dict[str, Any] = {}
        for name, text in sources.items():
            try:
                self._compiled[name] = environment.from_string(text)
            # A template of hostile depth ends in a RecursionError of the parser.
            except (TemplateError, RecursionError, ValueError, OverflowError) as error:
                raise UsageError(f"{origin}: not a chat template: {error}") from error

    def _name(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._compiled else "default"

    def text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The text of messages.

        Args:
            messages: the conversation.
            tools: JSON schemas of tools, or None.
            prompt: append what comes before a turn of the assistant.

        Raises:
            ConversationError: the template refuses the messages, or fails on them.
            UsageError: the template needs ``--date``.
        """
        try:
            rendered: str = self._compiled[self._name(tools)].render(
                messages=[_completed(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except (ConversationError, UsageError):
            raise
        except Exception as error:
            raise ConversationError(f"{type(error).__name__}: {error}") from error
        return rendered

    def render(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """The text of a conversation, and what the assistant writes of it.

        Args:
            messages: the conversation; each has at least a ``role``.
            tools: JSON schemas of tools, or None.

        Raises:
            ConversationError: the template refuses the messages, or fails on them.
            UsageError: the turns of the assistant cannot be found in the text of this template.
        """
        whole = self.text(messages, tools)
        if self._is_marked[self._name(tools)]:
            self._marks.is_active = True
            try:
                spans = self._from_marks(self.text(messages, tools), whole)
            finally:
                self._marks.is_active = False
            return Rendered(text=whole, spans=spans, is_marked=True)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        spans = tuple(self._turn(whole, messages, number, tools) for number in turns)
        return Rendered(text=whole, spans=spans, is_marked=False)

    def _from_marks(self, marked: str, whole: str) -> tuple[Span, ...]:
        """The spans of ``whole`` that are marked in ``marked``.

        Raises:
            ConversationError: marks are within one another, or the template changes marked text, such as its length.
        """
        # Between BEGIN and END: odd parts of a text that is cut at either.
        parts = re.split(f"[{BEGIN}{END}]", marked)
        if "".join(parts) != whole or re.sub(f"[^{BEGIN}{END}]", "", marked) != (BEGIN + END) * (len(parts) // 2):
            raise ConversationError("a generation block is within another one, or its text is changed after it")
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        return tuple((ends[number], ends[number + 1]) for number in range(1, len(parts), 2))

    def _turn(self, whole: str, messages: Sequence[Message], number: int, tools: Any) -> Span:
        """The span of a turn in ``whole``, by prefixes.

        Raises:
            ConversationError: the template cannot render what comes before the first message, which is a turn.
            UsageError: a text that must be a prefix is not one.
        """
        try:
            before = self.text(messages[:number], tools, prompt=True)
            until = whole if number + 1 == len(messages) else self.text(messages[: number + 1], tools)
        except ConversationError as error:
            if number == 0:
                raise
            raise self._no_prefixes(number, f"the text up to it cannot be rendered: {error}") from error
        for text, name in ((before, f"the first {number:,} messages and the generation prompt"), (until, "the turn")):
            if not whole.startswith(text):
                raise self._no_prefixes(number, f"the text up to {name} is not a prefix of the whole text")
        if len(until) < len(before):
            raise self._no_prefixes(number, "the text with it is shorter than the text before it")
        return len(before), len(until)

    def _no_prefixes(self, number: int, reason: str) -> UsageError:
        return UsageError(
            f"{self.origin}: the assistant's tokens cannot be found: the template has no {{% generation %}} block, and"
            f" of message {number + 1:,} of a conversation {reason}; put {{% generation %}} and {{% endgeneration %}}"
            " around what the assistant writes in a copy of the template, and give it as --chat-template"
        )


def _completed(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no key that is null, and reasoning under each of its names."""
    stated = {key: value for key, value in message.items() if value is not None}
    reasoning = next((stated[key] for key in REASONING if key in stated), None)
    return stated if reasoning is None else {"thinking": reasoning, **stated, "reasoning_content": reasoning}


def read_tokenizer_config(config: Path) -> dict[str, Any]:
    """The contents of a ``tokenizer_config.json``.

    Raises:
        UsageError: it cannot be read, or is not a JSON object.
    """
    try:
        values = parse_any_json(read_text(config, MAX_TABLE_BYTES), MAX_TABLE_BYTES)
    except ValueError as error:
        raise UsageError(f"{config}: not a JSON document: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{config}: must be an object, is {short_repr(values)}")
    return values


def open_chat_template(
    template: Path | None,
    config: Path | None,
    date: datetime.date | None,
    defaults: Mapping[str, str] | None = None,
) -> ChatTemplate:
    """The chat template of a model.

    Args:
        template: the template, or None for that of ``config``.
        config: ``tokenizer_config.json``, which has the special tokens, or None.
        date: date that ``strftime_now`` returns.
        defaults: special tokens of the tokenizer by name, where the configuration has none of that name.

    Raises:
        UsageError: neither file has a template, or a file is invalid.
    """
    values = {} if config is None else read_tokenizer_config(config)
    variables = {**(defaults or {}), **special_tokens(values, str(config))}
    if template is not None:
        return ChatTemplate(read_text(template, MAX_TABLE_BYTES), str(template), variables, date)
    source = values.get("chat_template")
    if isinstance(source, list) and all(isinstance(each, dict) for each in source):
        source = {each.get("name"): each.get("template") for each in source}
    if source is None:
        raise UsageError(
            "the tokenizer has no chat template: neither chat_template.jinja nor tokenizer_config.json with a"
            " chat_template is next to it; give --chat-template FILE"
        )
    if not isinstance(source, str | dict) or (
        isinstance(source, dict) and not all(isinstance(part, str) for pair in source.items() for part in pair)
    ):
        raise UsageError(f"{config}: chat_template must be a text, or a list of name and template")
    return ChatTemplate(source, str(config), variables, date)


def special_tokens(config: Mapping[str, Any], origin: str) -> dict[str, str]:
    """The special tokens of a ``tokenizer_config.json`` by name, as templates read them.

    Args:
        config: its contents.
        origin: its path, for messages.

    Raises:
        UsageError: one is not a text.
    """
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise UsageError(f"{origin}: {name} must be a text, is {short_repr(token)}")
        if token is not None:
            found[name] = token
    return found
