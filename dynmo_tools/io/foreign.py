"""Inputs that are not documents: what they are, by their name or first line, and how to make documents of them."""

from __future__ import annotations

import os
import re
from collections import Counter

from .codecs import PARQUET

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE)
_SCHEME = re.compile(r"(?:s3|s3a|gs|gcs|hf|http|https|ftp|hdfs|az|abfs|abfss):")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What JSON lines look like, for messages.
EXAMPLE = '{"text": "..."}'
_NOT_TEXT = (
    # First characters of a line as ``jsonl.excerpt`` decodes it: bytes that are not UTF-8 are U+FFFD.
    ("\x1f\ufffd", "the file is compressed by gzip; name it .gz"),
    ("(\ufffd/\ufffd", "the file is compressed by zstandard; name it .zst"),
    ("\ufffd7zXZ", "the file is compressed by xz; name it .xz"),
    ("BZh", "the file is compressed by bzip2; name it .bz2"),
    ("PAR1", f"the file is Parquet; name it {PARQUET}"),
    ("PK\x03\x04", "the file is a ZIP archive; unpack it"),
    ("\ufffd\ufffd", "the file is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE > OTHER"),
    ("WARC/", "the file is a WARC; extract its pages to JSON lines, for example with datatrove's WarcReader"),
    ("version https://git-lfs", "the file is a pointer of Git LFS; fetch its contents: git lfs pull"),
    ("[", "the file is one JSON array; make lines of it: jq -c '.[]' FILE > FILE.jsonl"),
    ("<mediawiki", "the file is a MediaWiki dump; use extract-wiki"),
    ("<", "the file is XML or HTML"),
)


def hint_of_line(line: str, *, has_plain_text: bool) -> str:
    """What a file is whose first invalid line this is, and the remedy.

    Args:
        line: first characters of the line.
        has_plain_text: the step has ``--plain-text``.
    """
    for begin, remedy in _NOT_TEXT:
        if line.startswith(begin):
            return remedy
    if "\0" in line:
        return "the file is binary or UTF-16; iconv converts UTF-16"
    if line.strip() == "{":
        return "the file is one JSON document over several lines; make lines of it: jq -c . FILE > FILE.jsonl"
    if line.lstrip().startswith("{"):
        return ""
    if has_plain_text:
        return f"the lines are not JSON such as {EXAMPLE}; use --plain-text for a document per line of text"
    return (
        f"the lines are not JSON such as {EXAMPLE}; make it of plain text: jq -Rc '{{text: .}}' FILE > FILE.jsonl, "
        "or use binarize --plain-text"
    )


def is_scheme(name: str) -> bool:
    """Whether the first folder of a path is a scheme: a path has one slash of ``s3://bucket/key`` only."""
    return _SCHEME.fullmatch(name) is not None


def hint_of_absent(name: str) -> str:
    """The remedy for an input that does not exist as a file: an address, a dataset of the hub; empty for others."""
    if address := _ADDRESS.match(name):
        scheme, rest = address[1].lower(), address[2]
        command = {
            "s3": f"aws s3 cp --recursive {name} data",
            "gs": f"gcloud storage cp --recursive {name} data",
            "hf": f"hf download {rest.removeprefix('datasets/')} --repo-type dataset --local-dir data",
            "http": f"curl -LO {name}",
            "https": f"curl -LO {name}",
        }.get(scheme)
        download = f": {command}" if command else ""
        return f"addresses cannot be read; download the files first{download}"
    if _HUB_ID.fullmatch(name) and not os.path.exists(name.partition("/")[0]):
        return (
            "a dataset of the Hugging Face Hub is downloaded first: "
            f"hf download {name} --repo-type dataset --local-dir data"
        )
    return ""


def pattern_of_folder(folder: str) -> str:
    """A pattern of the files in a folder, by their most frequent extension."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    files = [name for name in names if os.path.isfile(os.path.join(folder, name))]
    endings = Counter(name[name.find(".", 1) :] for name in files if "." in name[1:])
    if endings:
        return f"{folder}/*{max(sorted(endings), key=endings.__getitem__)}"
    return f"{folder}/*/*{PARQUET}" if names and not files else f"{folder}/*.jsonl.zst"
