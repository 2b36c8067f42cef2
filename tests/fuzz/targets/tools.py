"""Parsers of ``dynmo_tools``: documents in all containers, recipes, tokenizers, indexed datasets, work files."""

# Seeds are lines as other programs write them.
# ruff: noqa: E501
from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target, bytes_target, file_target, fixtures, text_target
from tests.fuzz.targets.common import click_command, command_target, document_targets
from tests.paths import CONTRACTS, ROOT

P = "dynmo_tools"
ROWS = (
    b'{"text": "one two three", "url": "http://a.org/x", "meta": {"id": 1, "tags": ["a", null, 1.5]}}\n'
    b'{"text": "\\u00e9\\ud83d\\ude00 x", "n": 12345678901234567890, "text": "twice"}\n\n{"text": ""}\n'
)
DUMP = (
    b"<mediawiki><siteinfo><base>http://w.org/wiki/Main</base></siteinfo>"
    b"<page><title>A</title><ns>0</ns><id>1</id><revision><id>2</id><text>'''A''' is [[B|b]] {{t|x=1}} &amp; "
    b"&lt;ref&gt;r&lt;/ref&gt;</text></revision></page>\n<page><title>B</title><ns>0</ns><id>2</id>"
    b"<redirect title='A'/><revision><id>3</id><text>#redirect [[A]]</text></revision></page></mediawiki>\n"
)
WIKITEXT = [
    "'''A''' is [[B|b]] and {{t|x={{u|1}}}}.\n== H ==\n* one\n* two\n{| class=\"x\"\n|-\n| a || b\n|}\n<ref name=\"r\">r</ref>",
    "[[File:x.png|thumb|A [[b]] c]] <math>x^2</math> <!-- c --> &nbsp; [http://a.org b] <nowiki>[[x]]</nowiki> ''i''",
]  # fmt: skip
HTML = [
    "<!DOCTYPE html><html><head><title>T</title><script>x<y</script></head><body><p>a&amp;b<br>c</p>"
    "<ul><li>x<li>y</ul><!-- c --><pre>z</pre></body></html>"
]


def _slices(read: Any, path: Path) -> None:
    from dynmo_tools.io.jsonl import Slice

    size = path.stat().st_size
    for part in (Slice(path=path), Slice(path=path, begin=size // 2), Slice(path=path, end=size // 2)):
        for _ in read(part):
            pass


def _whole(read: Any, path: Path) -> None:
    from dynmo_tools.io.jsonl import Slice

    for _ in read(Slice(path=path)):
        pass


def _whole_lines(read: Any, path: Path) -> None:
    from dynmo_tools.io.jsonl import Slice

    for _ in read(Slice(path=path), 1 << 20):
        pass


def _parse_row(parse: Callable[[bytes], Any], data: bytes) -> None:
    """Parse a row, and write it again: its text replaced in place, and as a whole."""
    from dynmo_tools.io.json_edit import append_entry, replace_value
    from dynmo_tools.io.jsonl import encode_row, path_of, text_of

    value = parse(data)
    encode_row(value)
    text_of(value, "text", allow_surrogates=True)
    parse(replace_value(data, path_of(value, "text"), b'"x"'))
    if "x_new" not in value:
        parse(append_entry(data, "x_new", b"1"))


CHATS = (
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}], "tools": "[{}]"}\n'
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"}\n'
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def _conversation(read: Any, data: bytes) -> None:
    """Read a conversation, and render it."""
    from dynmo_tools._common.chat_template import ChatTemplate
    from dynmo_tools.io.jsonl import parse_line

    conversation = read(parse_line(data))
    ChatTemplate(CHAT_TEMPLATE, "t.jinja").render(conversation.messages, conversation.tools)


def _not_conversations() -> tuple[type[Exception], ...]:
    from dynmo_tools._common.chat_template import ConversationError
    from dynmo_tools.io.jsonl import BadLineError

    return BadLineError, ConversationError


def _compressed(ending: str) -> Callable[[Path], list[bytes]]:
    def seeds(_folder: Path) -> list[bytes]:
        if ending == "gz":
            return [gzip.compress(ROWS, mtime=0)]
        if ending == "bz2":
            return [bz2.compress(ROWS)]
        if ending == "xz":
            return [lzma.compress(ROWS)]
        import zstandard

        return [zstandard.ZstdCompressor().compress(ROWS), zstandard.ZstdCompressor().compress(ROWS) * 2]

    return seeds


def _parquet(_folder: Path) -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    table = pyarrow.table({"text": ["a", "b", None], "n": [1, 2, 3], "l": [[1], [], [2, 3]]})
    pyarrow.parquet.write_table(table, sink)
    return [sink.getvalue()]


def _indexed(read: Any, path: Path) -> None:
    path.with_suffix(".bin").write_bytes(bytes(12))
    read(path.with_suffix(""))


def _indexed_any_size(read: Any, path: Path) -> None:
    """The tokens have the size that the index states, as far as it is small."""
    content = path.read_bytes()
    for size in (0, 6, 12, 24, 48, len(content) % 64):
        path.with_suffix(".bin").write_bytes(bytes(size))
        try:
            read(path.with_suffix(""))
        except _errors():
            continue


def _errors() -> type[Exception]:
    from dynmo_tools._common.errors import DynmoError

    return DynmoError


def _tokenizer_json(_folder: Path) -> list[bytes]:
    from dynmo_tools.tokenization.definitions import Definition, bert_definition, gpt2_definition

    vocabulary = _folder / "vocab.json"
    merges = _folder / "merges.txt"
    words = _folder / "vocab.txt"
    from dynmo_tools.tokenization.definitions import characters_of_bytes

    tokens = [*sorted(characters_of_bytes()), "ab", "<|endoftext|>"]
    vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    merges.write_text("#version: 0.2\na b\n")
    words.write_text("[UNK]\n[CLS]\n[SEP]\na\n##b\n")
    found: list[Definition] = [gpt2_definition(vocabulary, merges), bert_definition(words, lower=True)]
    added = json.loads(found[0].text)
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added["added_tokens"] = [{"id": 3, "content": "<|endoftext|>", **token}]
    return [*(each.text.encode() for each in found), json.dumps(added).encode()]


def _load_tokenizer(kind: str, engine: str, **names: str) -> Callable[[Any, Path], None]:
    def call(read: Any, path: Path) -> None:
        from dynmo_tools.tokenization.tokenizers import Engine, TokenizerFiles, TokenizerType

        files = {name: path.parent / file for name, file in names.items()}
        tokenizer = read(TokenizerFiles(kind=TokenizerType(kind), engine=Engine(engine), **files))
        tokenizer.encode_batch(["a ab b x", ""])
        tokenizer.vocabulary()

    return call


def _with_merges(call: Callable[[Any, Path], None], file: str, content: str) -> Callable[[Any, Path], None]:
    def run(read: Any, path: Path) -> None:
        (path.parent / file).write_text(content)
        call(read, path)

    return run


SPECIAL_TOKENS = (
    b'{"tokenizer_class": "LlamaTokenizer", "legacy": false, "bos_token": "<s>", "eos_token": {"content": "</s>"},'
    b' "added_tokens_decoder": {"0": {"content": "<unk>", "special": true}}, "additional_special_tokens": ["<x>"]}'
)


def _with_model(read: Any, path: Path) -> object:
    model = path.with_name("tokenizer.model")
    if not model.exists():
        model.write_bytes(_sentence_piece(path.parent, byte_fallback=True)[0])
    return read(model, path)


def _sentence_piece(_folder: Path, *, byte_fallback: bool = False) -> list[bytes]:
    import sentencepiece

    sink = io.BytesIO()
    lines = iter(["a b c ab abc", "b c a bca", "hello world", "the quick brown fox"] * 5)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=sink,
        vocab_size=300 if byte_fallback else 40,
        hard_vocab_limit=not byte_fallback,
        byte_fallback=byte_fallback,
        model_type="bpe",
        minloglevel=2,
        num_threads=1,
        normalization_rule_name="identity",
    )
    return [sink.getvalue()]


def _word_blocks(folder: Path) -> list[bytes]:
    from dynmo_tools.tokenization.word_counts import WordBlock

    sink = io.BytesIO()
    WordBlock.of([b"one", b"two", b"three"], [3, 2, 1]).write(sink)
    WordBlock.of([b"x"], [1]).write(sink)
    return [sink.getvalue()]


def _manifest(folder: Path) -> list[bytes]:
    from dynmo_tools.formats.workfiles import MANIFEST

    fields = {
        "step": "clean", "digest": "0" * 64, "output": "out.jsonl", "settings": {"language": "en"},
        "limits": {"task_bytes": 1 << 20, "max_line_bytes": 1 << 20},
        "sources": [{"path": "a.jsonl", "size_bytes": 10, "mtime_ns": 5}],
        "tasks": [{"path": "a.jsonl", "begin": 0, "end": None}],
    }  # fmt: skip
    MANIFEST.write(folder / "manifest.json", fields)
    return [(folder / "manifest.json").read_bytes()]


_TALLY = {
    "documents_in": 3, "bytes_in": 100, "documents_out": 2, "bytes_out": 50, "blank_lines": 0, "lines": 3, "changed": 1,
    "dropped": {"short": 1}, "rejected": {},
}  # fmt: skip
_SUMMARY = {
    "step": "clean", "inputs": ["a.jsonl"], "output": "b.jsonl", **_TALLY, "seconds": 1.5, "megabytes_per_second": 2.5,
    "facts": {"x": [1, None]},
}  # fmt: skip
WORK_DOCUMENTS = {
    "TASK": {
        "task": "0", "digest": "0" * 64, "outputs": {"a": 1}, "tally": _TALLY, "result": {}, "facts": {}, "seconds": 0.5,
    },
    "SUMMARY": _SUMMARY,
    "PIPELINE": {
        "recipe": "r", "documents_in": 3, "bytes_in": 100, "documents_out": 2, "documents_rejected": 0, "tokens": 5,
        "data_prefix": None, "tokenizer": "t.json", "seconds": 2.5,
        "steps": [{"name": "clean", **_SUMMARY, "reused": False}],
    },
    "FINGERPRINTS": {"scheme": "x", "num_seeds": 10, "seed": 1, "shingle_characters": 5, "documents": 2},
}  # fmt: skip


def _work_formats() -> list[Target]:
    """The formats of the files in a work folder."""

    def target(name: str) -> Target:
        def seeds(folder: Path) -> list[bytes]:
            from dynmo_tools.formats import workfiles

            getattr(workfiles, name).write(folder / "x.json", WORK_DOCUMENTS[name])
            return [(folder / "x.json").read_bytes()]

        def read(_: Any, path: Path) -> None:
            from dynmo_tools.formats import workfiles

            getattr(workfiles, name).read(path)

        return file_target(
            f"{P}.formats.workfiles:WorkFormat", seeds, file="document.json", label=name.lower(), call=read
        )

    return [target(name) for name in WORK_DOCUMENTS]


def _match_settings() -> Any:
    from dynmo_tools.config.settings import MatchSettings

    return MatchSettings()


def _fingerprints(folder: Path) -> list[bytes]:
    from dynmo_tools.dedup.fingerprints import rules_of
    from dynmo_tools.formats.workfiles import FINGERPRINTS

    FINGERPRINTS.write(folder / "x.json", {**rules_of(_match_settings()), "documents": 0})
    return [(folder / "x.json").read_bytes()]


def _load_part(read: Any, path: Path) -> None:
    (path.parent / "signatures.u32").write_bytes(b"")
    read(path.parent, _match_settings())


def _journal(_read: Any, path: Path) -> None:
    from dynmo_tools.web import fetch

    for _ in fetch._journal_rows(path, "d"):
        pass


def _url(parse: Any, text: str) -> None:
    from dynmo_tools.web.http_client import without_credentials
    from dynmo_tools.web.url_filter import drop_reason, host_of

    host_of(text)
    without_credentials(text)
    parse(text, frozenset({"x"}), (".jpg",))
    drop_reason(text, frozenset(), ())


def _allowed(_parse: Any, text: str) -> None:
    from dynmo_tools.web.http_client import AllowedHosts

    AllowedHosts.parse(text.split(","))


def _classic(parse: Any, text: str) -> None:
    parse(text.split())


def _sidecars(folder: Path) -> list[bytes]:
    return fixtures(CONTRACTS, "dataset/valid/*.json")(folder)


def _sidecar(read: Any, path: Path) -> None:
    read(path.with_name(path.name.removesuffix(".json")))


OPTIONS = {
    "clean": "--input a.jsonl --output b.jsonl --language en --min-tokens 128 --workers 2",
    "dedup": "--input a.jsonl --output b.jsonl --threshold 0.7 --num-bands 20",
    "binarize": "--input a.jsonl --output-prefix p --tokenizer t.json --append-eod --workers 2",
}


def _bad_line() -> tuple[type[Exception], ...]:
    from dynmo_tools.io.jsonl import BadLineError

    return (BadLineError,)


def _zstandard_frames() -> bytes:
    """Three frames, the second of which ends within a line."""
    import zstandard

    return b"".join(map(zstandard.compress, (b"a\n", b"b\nc", b"d\n")))


def _xml_errors() -> tuple[type[Exception], ...]:
    from xml.etree import ElementTree

    return (ElementTree.ParseError, EOFError, OSError)


TARGETS = [
    *document_targets(P),
    bytes_target(f"{P}.io.jsonl:parse_line", filter(None, ROWS.splitlines()), call=_parse_row, errors=_bad_line()),
    bytes_target(f"{P}.io.jsonl:parse_plain_line", ROWS.splitlines(), errors=_bad_line()),
    bytes_target(
        f"{P}.tokenization.conversations:conversation_of",
        CHATS.splitlines(),
        call=_conversation,
        errors=_not_conversations(),
    ),
    file_target(f"{P}.io.jsonl:read_objects", lambda _: [ROWS.replace(b"\n\n", b"\n")], file="rows.jsonl"),
    file_target(f"{P}.io.jsonl:read_lines", lambda _: [ROWS], file="rows.jsonl", call=_whole_lines),
    *(
        file_target(
            f"{P}.io.jsonl:read_lines",
            _compressed(ending),
            file=f"rows.jsonl.{ending}",
            label=ending,
            call=_whole_lines,
            more_readers=(f"{P}.io.codecs:open_read",),
        )
        for ending in ("gz", "bz2", "xz", "zst")
    ),
    file_target(f"{P}.io.jsonl:read_parquet", _parquet, file="rows.parquet", call=_whole),
    file_target(
        f"{P}.io.mediawiki_dump:read_pages", lambda _: [DUMP], file="dump.xml", call=_slices, errors=_xml_errors()
    ),
    file_target(
        f"{P}.io.mediawiki_dump:read_pages",
        lambda _: [bz2.compress(DUMP), bz2.compress(DUMP[:300]) + bz2.compress(DUMP[300:])],
        file="dump.xml.bz2",
        label="bz2",
        call=_whole,
        errors=_xml_errors(),
    ),
    file_target(f"{P}.io.mediawiki_dump:read_site", lambda _: [DUMP], file="dump.xml", errors=_xml_errors()),
    file_target(f"{P}.io.frames:line_frames", lambda _: [_zstandard_frames()], file="in.jsonl.zst"),
    bytes_target(
        f"{P}.web.charset:decode",
        [*HTML, b'<meta charset="gb2312">\xc4\xe3', b"\x1b$B%F%9%H", "<?xml encoding='utf-16'?>é".encode("utf-16")],
        call=lambda decode, data: [decode(data, label, is_markup=True) for label in (None, "koi8-r", "utf-16")],
    ),
    text_target(f"{P}.extract.wikitext:text_of", WIKITEXT),
    text_target(f"{P}.extract.html:extract_text", HTML),
    file_target(
        f"{P}.formats.indexed:read_index",
        fixtures(CONTRACTS, "indexed/valid/*.idx"),
        file="data.idx",
        call=_indexed_any_size,
    ),
    file_target(f"{P}.formats.dataset:read_sidecar", _sidecars, file="data.json", call=_sidecar),
    *_work_formats(),
    file_target(
        f"{P}.runner.task_manifest:load_manifest",
        _manifest,
        file="manifest.json",
        call=lambda read, path: read(path.parent),
    ),
    text_target(
        f"{P}.runner.recipe:parse_recipe",
        fixtures(ROOT, "dynmo_tools/recipes/*.toml"),
        call=lambda parse, text: parse(text, "recipe", ("dedup.threshold=0.8",)),
    ),
    text_target(f"{P}.config.options:parse_assignment", ["dedup.threshold=0.9", "a.b=[1, 2]", "a.b=x", 'a.b="x"']),
    text_target(f"{P}.config.settings:parse_task", ["lambada=x.jsonl", "mine=/x/y:question"]),
    file_target(
        f"{P}.tokenization.definitions:read_definition",
        _tokenizer_json,
        file="tokenizer.json",
        call=lambda read, path: read(path).added,
    ),
    file_target(
        f"{P}.tokenization.definitions:read_vocabulary",
        lambda _: [b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'],
        file="vocab.json",
    ),
    *(
        file_target(
            f"{P}.tokenization.tokenizers:load_tokenizer",
            _tokenizer_json,
            file="tokenizer.json",
            label=f"hf-{engine}",
            call=_load_tokenizer("HuggingFaceTokenizer", engine, model="tokenizer.json"),
        )
        for engine in ("auto", "tokenizers", "gigatoken")
    ),
    file_target(
        f"{P}.tokenization.tokenizers:load_tokenizer",
        lambda _: [b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'],
        file="vocab.json",
        label="gpt2-vocab",
        call=_with_merges(
            _load_tokenizer("GPT2BPETokenizer", "auto", vocab="vocab.json", merges="merges.txt"), "merges.txt", "a b\n"
        ),
    ),
    file_target(
        f"{P}.tokenization.tokenizers:load_tokenizer",
        lambda _: [b"#version: 0.2\na b\n"],
        file="merges.txt",
        label="gpt2-merges",
        call=_with_merges(
            _load_tokenizer("GPT2BPETokenizer", "auto", vocab="vocab.json", merges="merges.txt"),
            "vocab.json",
            '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}',
        ),
    ),
    file_target(
        f"{P}.tokenization.tokenizers:load_tokenizer",
        lambda _: [b"[UNK]\n[CLS]\n[SEP]\na\n##b\n"],
        file="vocab.txt",
        label="bert",
        call=_load_tokenizer("BertWordPieceCase", "auto", vocab="vocab.txt"),
    ),
    file_target(
        f"{P}.tokenization.tokenizers:load_tokenizer",
        lambda _: [b'{"a": 0, "<unk>": 1, "<eod>": 2}'],
        file="words.json",
        label="words",
        call=_load_tokenizer("WhitespaceVocab", "auto", vocab="words.json"),
    ),
    file_target(
        f"{P}.tokenization.tokenizers:load_tokenizer",
        _sentence_piece,
        file="tokenizer.model",
        label="sentencepiece",
        call=_load_tokenizer("SentencePieceTokenizer", "auto", model="tokenizer.model"),
    ),
    file_target(
        f"{P}._common.sentencepiece_json:read_tokenizer_document",
        partial(_sentence_piece, byte_fallback=True),
        file="tokenizer.model",
        call=lambda read, path: read(path, None),
    ),
    file_target(
        f"{P}._common.sentencepiece_json:read_tokenizer_document",
        lambda _: [SPECIAL_TOKENS],
        file="tokenizer_config.json",
        label="config",
        call=_with_model,
    ),
    file_target(f"{P}.tokenization.word_counts:read_blocks", _word_blocks, file="words.bin"),
    file_target(
        f"{P}.decontaminate.steps:read_task",
        lambda _: [
            b'{"question": "a b c", "answer": ["x"]}\n{"question": "d"}\n',
            b'{"data": [{"question": {"text": "x"}}]}',
        ],
        file="task.jsonl",
        call=lambda read, path: list(read(path, ("question", "text"))),
    ),
    file_target(
        f"{P}.dedup.groups:read_removal_set", lambda _: [b'{"a": ["b", "c@10"]}\n{"d": []}\n'], file="groups.jsonl"
    ),
    file_target(f"{P}.dedup.fingerprints:load_part", _fingerprints, file="header.json", call=_load_part),
    file_target(f"{P}.web.url_filter:read_list", lambda _: [b"# c\na.org\nB.com # x\n"], file="list.txt"),
    text_target(
        f"{P}.web.url_filter:drop_reason",
        ["http://www.a.co.uk:80/x?y#z", "https://user:pw@[::1]/x.jpg", "//a", "http://1.2.3.4/x"],
        call=_url,
    ),
    file_target(
        f"{P}.web.fetch:_journal_rows",
        lambda _: [b'{"digest": "d"}\n{"url": "http://a.org", "text": "x", "n": 0}\n{"n": 1, "failed": "x"}\n'],
        file="journal",
        call=_journal,
    ),
    text_target(f"{P}.web.http_client:AllowedHosts", ["10.0.0.0/8,[::1],a.org", "::ffff:1.2.3.4"], call=_allowed),
    text_target(
        f"{P}.cli.classic_args:from_classic_syntax",
        ["find-duplicates --inputs a id b id --output c", "merge --json_path x", "clean a b"],
        call=_classic,
    ),
    *(
        command_target(P, click_command(f"{P}.cli.commands", "app", name), name, [line])
        for name, line in OPTIONS.items()
    ),
]
