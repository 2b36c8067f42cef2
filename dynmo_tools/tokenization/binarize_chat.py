"""The step ``binarize-chat``: conversations to token ids and a loss mask, as two indexed datasets of equal index.

    PREFIX_chat_document             token ids, a document per conversation
    PREFIX_chat_document.loss_mask   uint8, 1 for tokens of the assistant: what a model learns to generate

``dynmo-train pretrain --sft`` reads both. Phases and files are those of ``binarize``.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.chat_template import ConversationError, open_chat_template
from .._common.errors import UsageError
from .._common.sentencepiece_json import is_sentencepiece
from ..config.settings import BinarizeChatSettings
from ..formats.dataset import digest_file, digest_vocabulary
from ..formats.indexed import best_dtype
from ..io.jsonl import BadLineError
from ..runner.task import FIRST_FAILURE, Phase, Task, read_marker
from ..runner.task_manifest import TaskManifest
from .binarize import BATCH_CHARACTERS, SequenceWriter, join_parts
from .conversations import ChatTokenizer, TokenizedChat, conversation_of
from .definitions import read_definition, sentencepiece_definition
from .provenance import tokenizer_files
from .tokenizers import Encoded

MASK_DTYPE = np.dtype(np.uint8)
MAX_ERROR_CHARACTERS = 300
NO_TURN = "no_assistant"
"""Reason of conversations that are dropped: the model learns nothing from them."""


def binarize_chat_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``binarize-chat``."""
    return [
        Phase(name="tokenize", run="tokenization.binarize_chat:tokenize_slice", tasks=len(manifest.tasks), reads=True),
        Phase(name="join", run="tokenization.binarize_chat:join", tasks=1),
    ]


# A worker runs many tasks with one tokenizer.
@functools.lru_cache(maxsize=2)
def _tokenizer(
    tokenizer: Path, template: Path | None, config: Path | None, date: str | None, eod_token: str | None
) -> ChatTokenizer:
    defaults, pieces = {}, None
    if is_sentencepiece(tokenizer):
        definition, model = sentencepiece_definition(tokenizer, config)
        defaults, pieces = model.special_tokens(), {piece: at for at, (piece, _) in enumerate(model.pieces)}
    else:
        definition = read_definition(tokenizer)
    eod = None if eod_token is None else definition.token_id(eod_token)
    if eod_token is not None and eod is None:
        raise UsageError(f"--eod-token {eod_token}: is not a token of {tokenizer}; name one of its tokens")
    day = None if date is None else datetime.date.fromisoformat(date)
    return ChatTokenizer(definition, open_chat_template(template, config, day, defaults), eod, pieces)


def chat_tokenizer(settings: BinarizeChatSettings) -> ChatTokenizer:
    """The tokenizer and the chat template of the settings.

    Raises:
        UsageError: a file cannot be used, or there is no chat template.
    """
    return _tokenizer(
        settings.tokenizer, settings.chat_template, settings.tokenizer_config, settings.date, settings.eod_token
    )


def _encoded(arrays: Sequence[npt.NDArray[np.int64]]) -> Encoded:
    """A batch from one array per conversation."""
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
    return Encoded(ids=np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64), lengths=lengths)


def tokenize_slice(task: Task) -> None:
    """Task function: token ids and loss mask of the conversations of one slice."""
    settings: BinarizeChatSettings = task.job.settings
    tokenizer = chat_tokenizer(settings)
    dtypes = best_dtype(tokenizer.num_ids), MASK_DTYPE
    writers = [SequenceWriter(task, number, dtype) for number, dtype in enumerate(dtypes)]
    waiting: list[TokenizedChat] = []
    num_learned = 0

    def flush() -> None:
        ones = np.ones(len(waiting), dtype=np.int64)
        writers[0].write(_encoded([chat.ids for chat in waiting]), ones)
        writers[1].write(_encoded([chat.mask.astype(np.int64) for chat in waiting]), ones)
        waiting.clear()

    size = 0
    for row in task.objects():
        try:
            chat = tokenizer.tokenize(conversation_of(row.value, settings.messages_key))
        except BadLineError as error:
            task.reject_row(row, error.reason)
            continue
        except ConversationError as error:
            task.result.setdefault(FIRST_FAILURE, f"{settings.template_source}: {error}"[:MAX_ERROR_CHARACTERS])
            task.reject_row(row, "template")
            continue
        if not chat.mask.any():
            task.counts.drop(NO_TURN)
            continue
        waiting.append(chat)
        num_learned += int(chat.mask.sum())
        size += len(chat.ids)
        if size >= BATCH_CHARACTERS:
            flush()
            size = 0
    flush()
    task.counts.documents_out += writers[0].num_documents
    task.counts.bytes_out += sum(
        writer.num_tokens * dtype.itemsize for writer, dtype in zip(writers, dtypes, strict=True)
    )
    task.result.update(
        num_ids=tokenizer.num_ids,
        eod_id=tokenizer.eod,
        learned=num_learned,
        tokens=[writer.piece() for writer in writers],
        input=digest_file(task.slice.path, *task.slice.stored),
    )
    # Equal for all tasks, so it is computed once.
    if task.index == 0:
        task.result["vocab_sha256"] = digest_vocabulary(tokenizer.vocabulary)


def join(task: Task) -> None:
    """Task function: the two datasets of all slices; that of the ids is completed last."""
    settings: BinarizeChatSettings = task.job.settings
    results = [read_marker(task, "tokenize", index)["result"] for index in range(len(task.manifest.tasks))]
    first: dict[str, Any] = results[0]
    tokenizer = {
        "type": "SentencePieceTokenizer" if is_sentencepiece(settings.tokenizer) else "HuggingFaceTokenizer",
        "vocab_size": first["num_ids"],
        "vocab_sha256": first["vocab_sha256"],
        "files": tokenizer_files(settings),
    }
    mask, prefix = settings.mask_prefix(task.job.output), settings.data_prefix(task.job.output)
    join_parts(task, results, mask, part=1, form="mmap", dtype=MASK_DTYPE, tokenizer=None, eod=None)
    dtype = best_dtype(first["num_ids"])
    index = join_parts(
        task, results, prefix, part=0, form="mmap", dtype=dtype, tokenizer=tokenizer, eod=first["eod_id"]
    )
    task.facts.update(
        tokens=index.num_tokens,
        learned_tokens=sum(result["learned"] for result in results),
        sequences=len(index.lengths),
        data_prefix=str(prefix),
        num_ids=first["num_ids"],
    )
