"""Files of a tokenizer that are damaged end in a message with the file's name."""

import json

import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.huggingface.tokenizer import copied_tokenizer
from dynmo_ckpt.io.errors import CorruptError
from dynmo_tools.tokenization.definitions import read_definition
from tests.tables import table

DAMAGED = [b"[" * 2000, b"null", b"[]", b"", b"\xff", b'{"</s>":"x"}', b'{"</s>":true}', b'{"</s>":-1}', b'{"</s>":[]}']


@table("payload", DAMAGED, ids=lambda payload: repr(payload[:12]))
def test_tokenizer_files_damaged_vocabulary_is_refused(tmp_path, payload):
    (tmp_path / "vocab.json").write_bytes(payload)
    with pytest.raises(CorruptError, match=r"vocab\.json: not a vocabulary"):
        copied_tokenizer(tmp_path, 30, 8)


@pytest.mark.parametrize("number", ["x", None, -1, 1.5, True, [1]])
def test_tokenizer_files_invalid_id_is_refused(tmp_path, number):
    document = {"model": {"vocab": {"a": 0, "b": number}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"tokenizer\.json: not a tokenizer file: the id of 'b'"):
        copied_tokenizer(tmp_path, 30, 8)


QWEN = {"a": 0, "<|endoftext|>": 7, "<|im_end|>": 8}
DEEPSEEK = {"a": 0, "<\uff5cend\u2581of\u2581sentence\uff5c>": 3}
# Tokens, tokenizer_config.json, config.json of the model, and the ids that follow.
SPECIAL = [
    (QWEN, {}, None, {"bos": (7,), "pad": (7,), "eos": (7,)}),
    (QWEN, {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}, None, {"eos": (8,), "pad": (7,)}),
    (QWEN, {"bos_token": None}, {"eos_token_id": [8, 7], "bos_token_id": 7}, {"bos": (7,), "eos": (8, 7)}),
    (QWEN, {"eos_token": "<|im_end|>"}, {"eos_token_id": 7}, {"eos": (8, 7)}),
    (QWEN, {"eos_token": "missing"}, {"eos_token_id": 99}, {"bos": (7,), "pad": (7,), "eos": (7,)}),
    (QWEN, {}, {"text_config": {"eos_token_id": 8}}, {"eos": (8,)}),
    (DEEPSEEK, {}, None, {"bos": (3,), "pad": (3,), "eos": (3,)}),
    ({"a": 0, "</s>": 7}, {}, None, {"bos": (7,), "pad": (7,), "eos": (7,)}),
    ({"a": 0}, {}, None, {}),
]


@table(("tokens", "settings", "config", "expected"), SPECIAL)
def test_special_tokens_are_those_of_the_configurations(tmp_path, tokens, settings, config, expected):
    """The same in an export and at the end of documents."""
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert copied_tokenizer(tmp_path, 30, 8, [config]).special == expected
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    assert copied_tokenizer(tmp_path, 30, 8).special == expected
    document = {"model": {"vocab": tokens}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert read_definition(tmp_path / "tokenizer.json").token_id(None) == expected.get("eos", (None,))[0]


def test_tokenizer_of_another_model_is_refused(tmp_path):
    """By its vocabulary in any file, and by a special token without a row; other added tokens may have none."""
    (tmp_path / "vocab.json").write_text(json.dumps(QWEN))
    with pytest.raises(UsageError, match="the token id 8; the vocabulary of the model ends at 7"):
        copied_tokenizer(tmp_path, 8, 8)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "added_tokens.json").write_text('{"<image>": 9}')
    assert copied_tokenizer(tmp_path, 8, 8).beyond == ("<image>",)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<image>"}')
    with pytest.raises(UsageError, match="the eos token has the id 9"):
        copied_tokenizer(tmp_path, 8, 8)


def test_file_that_links_out_of_its_directory_is_refused(tmp_path):
    """But for the snapshots of the hub's cache."""
    snapshot = tmp_path / "models--x" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "1").write_text("#version: 0.2")
    (snapshot / "merges.txt").symlink_to("../../blobs/1")
    assert list(copied_tokenizer(snapshot, 8, 8).files) == ["merges.txt"]
    (tmp_path / "secret").write_text("x")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="out of its directory"):
        copied_tokenizer(snapshot, 8, 8)


def test_tokenizer_files_have_every_chat_template(tmp_path):
    """The names under which transformers looks for them."""
    (tmp_path / "additional_chat_templates").mkdir()
    names = ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (tmp_path / name).write_text(name)
    assert copied_tokenizer(tmp_path, 30, 8).files == {name: name.encode() for name in names}
