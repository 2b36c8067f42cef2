"""Conversations: rows of JSON lines to messages, and messages to token ids with a loss mask.

{"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}
{"conversations": [{"from": "human", "value": ...}, ...], "system": ...}       ShareGPT
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.chat_template import ChatTemplate, Message, Span
from .._common.document import MAX_TABLE_BYTES, parse_any_json
from ..io.jsonl import BadLineError, contains_surrogates
from .definitions import Definition
from .tokenizers import HuggingFaceTokenizer

MESSAGES, SHARE_GPT = "messages", "conversations"
SHARE_GPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The messages of a row, and its tools."""

    messages: tuple[Message, ...]
    tools: Any = None


def conversation_of(row: Mapping[str, Any], key: str | None = None) -> Conversation:
    """The conversation of a row, in either form.

    Args:
        row: the JSON object of a line.
        key: key of the messages; None is ``messages``, else ``conversations``.

    Raises:
        BadLineError: with ``key``, ``type``, ``surrogate`` or ``role``.
    """
    name = key or next((each for each in (MESSAGES, SHARE_GPT) if each in row), None)
    if name is None or name not in row:
        raise BadLineError("key")
    found = row[name]
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise BadLineError("type")
    tools = row.get("tools")
    if isinstance(tools, str):  # data sets with a schema of columns store the list as text
        try:
            tools = parse_any_json(tools, MAX_TABLE_BYTES)
        except ValueError as error:
            raise BadLineError("type") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise BadLineError("type")
    if contains_surrogates([found, tools, row.get("system")]):
        raise BadLineError("surrogate")
    messages = _from_share_gpt(found, row.get("system")) if "from" in found[0] else found
    if not all(isinstance(each.get("role"), str) for each in messages):
        raise BadLineError("role")
    return Conversation(messages=tuple(messages), tools=tools or None)


def _from_share_gpt(turns: Sequence[Mapping[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Messages from turns with ``from`` and ``value``.

    Raises:
        BadLineError: with ``role`` or ``type``.
    """
    messages: list[dict[str, Any]] = []
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        role = SHARE_GPT_ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
        if role is None:
            raise BadLineError("role")
        if not isinstance(turn.get("value"), str):
            raise BadLineError("type")
        messages.append({"role": role, "content": turn["value"]})
    return messages


@dataclass(frozen=True, kw_only=True)
class TokenizedChat:
    """Token ids of a conversation ``[tokens]``, int64, and whether each is the assistant's ``[tokens]``, bool."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]


class ChatTokenizer:
    """Tokenizes conversations by a chat template.

    Runs on the ``tokenizers`` library: the loss mask needs the characters of each token, which gigatoken does not
    return.

    Args:
        definition: the tokenizer.
        template: the chat template.
        eod: id that ends each conversation, or None.
        vocabulary: tokens and ids that the data set's digest is of; None is all, with added ones.

    Raises:
        UsageError: the library cannot read the tokenizer.
    """

    def __init__(
        self,
        definition: Definition,
        template: ChatTemplate,
        eod: int | None = None,
        vocabulary: Mapping[str, int] | None = None,
    ) -> None:
        self._tokenizer = HuggingFaceTokenizer(definition)
        self._template, self.eod = template, eod
        self._special = {definition.ids[token] for token in definition.added}
        self.num_ids = definition.num_ids
        self.vocabulary = definition.vocabulary() if vocabulary is None else vocabulary

    def tokenize(self, conversation: Conversation) -> TokenizedChat:
        """Token ids and loss mask of a conversation.

        Raises:
            ConversationError: the template refuses the messages, or fails on them.
            UsageError: the turns of the assistant cannot be found in the text of the template.
        """
        rendered = self._template.render(conversation.messages, conversation.tools)
        ids, offsets = self._tokenizer.encode_with_offsets(rendered.text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for span in rendered.spans:
            begin, end = _tokens_of(offsets, span)
            if not rendered.is_marked:
                end = self._end_of_turn(ids, offsets, rendered.text, begin, end)
            mask[begin:end] = True
        if self.eod is not None:
            # The end of the conversation is to be learned where the assistant has the last word.
            ids, mask = np.append(ids, self.eod), np.append(mask, bool(len(mask) and mask[-1]))
        return TokenizedChat(ids=ids, mask=mask)

    def _end_of_turn(
        self, ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], text: str, begin: int, end: int
    ) -> int:
        """The end of a turn without white space after its last special token.

        A template separates turns by a newline after its end-of-turn token. The model never generates it: generation
        ends at that token.
        """
        last = end
        while last > begin and ids[last - 1] not in self._special and not text[slice(*offsets[last - 1])].strip():
            last -= 1
        return last if last > begin and ids[last - 1] in self._special else end


def _tokens_of(offsets_T2: npt.NDArray[np.int64], span: Span) -> tuple[int, int]:
    """The tokens ``[begin, end)`` that have a character of a span.

    Args:
        offsets_T2: first and last + 1 character of each token ``[tokens, 2]``, ascending.
        span: the characters ``[begin, end)``.
    """
    if span[0] == span[1]:
        return 0, 0
    begin = int(np.searchsorted(offsets_T2[:, 1], span[0], side="right"))
    return begin, int(np.searchsorted(offsets_T2[:, 0], span[1], side="left"))
