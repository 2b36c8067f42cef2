"""Files of a tokenizer that are damaged end in a message with the file's name."""

import json

import pytest

from dynmo_ckpt.huggingface.tokenizer import copied_tokenizer
from dynmo_ckpt.io.errors import CorruptError
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


def test_tokenizer_files_of_vocabulary_give_end_token(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "</s>": 7}')
    assert copied_tokenizer(tmp_path, 30, 8).id_of("eos") == 7
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    assert copied_tokenizer(tmp_path, 30, 8).id_of("eos") is None


def test_tokenizer_files_have_every_chat_template(tmp_path):
    """The names under which transformers looks for them."""
    (tmp_path / "additional_chat_templates").mkdir()
    names = ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (tmp_path / name).write_text(name)
    assert copied_tokenizer(tmp_path, 30, 8).files == {name: name.encode() for name in names}
