"""Commands of ``dynmo-prep`` over small inputs, and what a run of one leaves: for tests that disturb each of them."""

from __future__ import annotations

import json
import re

WORDS = [
    "The",
    "river",
    "runs",
    "past",
    "old",
    "mills",
    "under",
    "bridges",
    "of",
    "stone",
    "where",
    "nobody",
    "waits",
    "long",
]
SENTENCES = [" ".join(WORDS[at % 7 :] + WORDS[: at % 11]) + f" {at}." for at in range(60)]
DUMP = "".join(
    f"<page><title>P{n}</title><ns>0</ns><id>{n}</id><revision><id>{n}</id><text>'''P{n}''' is [[a]] page.</text>"
    "</revision></page>"
    for n in range(1, 20)
)

ROLES = ("user", "assistant")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)

STEPS = {
    "merge": ("{in}/in.jsonl", "-o", "out.jsonl.zst"),
    "add-id": ("{in}/in.jsonl", "-o", "out.jsonl", "--id-prefix", "x"),
    "clean": ("{in}/in.jsonl", "-o", "out.jsonl", "--save-dropped", "dropped.jsonl"),
    "fix": ("{in}/in.jsonl", "-o", "out.jsonl", "--tasks", "ftfy_fix_text", "--tasks", "general_cleaning"),
    "find-duplicates": ("{in}/in.jsonl", "-o", "pairs.jsonl", "--save-fingerprints", "prints"),
    "group-duplicates": ("{in}/pairs.jsonl", "-o", "groups.jsonl"),
    "remove-duplicates": ("{in}/in.jsonl", "-o", "out.jsonl", "--groups", "{in}/groups.jsonl"),
    "dedup": ("{in}/in.jsonl", "-o", "out.jsonl"),
    "decontaminate": (
        "{in}/in.jsonl", "-o", "out.jsonl", "--task", "lambada={in}/task.jsonl", "--save-dictionary", "grams.jsonl",
    ),
    "shuffle": ("{in}/in.jsonl", "-o", "out.jsonl"),
    "split-sentences": ("{in}/in.jsonl", "-o", "out.jsonl"),
    "train-tokenizer": ("{in}/in.jsonl", "-o", "tokenizer.json", "--vocab-size", "280"),
    "binarize": ("{in}/in.jsonl", "-o", "data", "--tokenizer", "{in}/tokenizer.json", "--append-eod"),
    "binarize-chat": (
        "{in}/chat.jsonl", "-o", "chat", "--tokenizer", "{in}/tokenizer.json", "--chat-template", "{in}/chat.jinja",
    ),
    "extract-wiki": ("{in}/dump.xml", "-o", "out.jsonl"),
    "blacklist-urls": ("{in}/urls.txt", "-o", "kept.txt", "--save-dropped", "dropped.txt"),
    "fetch-urls": ("{in}/pages.txt", "-o", "pages.jsonl", "--delay-s", "0", "--allow-host", "127.0.0.1"),
    "merge-indexed": ("{in}/data_text_document", "{in}/lazy", "-o", "both"),
    "convert-indexed": ("{in}/data_text_document", "-o", "lazy", "--to", "lazy"),
    "sample-corpus": ("-o", "corpus.jsonl", "--max-bytes", "20000"),
}  # fmt: skip


def write_inputs(folder):
    """Texts, a task and a dump, from which the commands themselves make the other inputs."""
    texts = [" ".join(SENTENCES[at : at + 12]) for at in range(40)]
    rows = [{"url": f"u{n}", "text": text} for n, text in enumerate([*texts, texts[3], texts[7] + " ", "Short."])]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.jsonl").write_text(json.dumps({"text": " ".join(texts[5].split()[20:40])}) + "\n")
    chats = [
        [{"role": role, "content": text} for role, text in zip(ROLES, texts[n : n + 2], strict=True)] for n in range(30)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "dump.xml").write_text(f"<mediawiki><siteinfo><base>http://w.org/w</base></siteinfo>{DUMP}</mediawiki>")
    (folder / "urls.txt").write_text("".join(f"http://site{n % 30}.org/{n}\n" for n in range(60)) + "http://a/b.jpg\n")


# Made from the texts, in this order; ``{in}`` is the folder of inputs.
DERIVED_INPUTS = (
    ("find-duplicates", "{in}/in.jsonl", "-o", "{in}/pairs.jsonl"),
    ("group-duplicates", "{in}/pairs.jsonl", "-o", "{in}/groups.jsonl"),
    ("train-tokenizer", "{in}/in.jsonl", "-o", "{in}/tokenizer.json", "--vocab-size", "270"),
    ("binarize", "{in}/in.jsonl", "-o", "{in}/data", "--tokenizer", "{in}/tokenizer.json"),
    ("convert-indexed", "{in}/data_text_document", "-o", "{in}/lazy", "--dtype", "uint16"),
)


def outputs(folder):
    """The bytes of each file that a run left, without the folder of its plan and markers, and the time of writing."""
    return {
        str(path.relative_to(folder)): re.sub(rb'"created_utc": ?"[^"]*"', b"", path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and not any(part.endswith(".work") for part in path.relative_to(folder).parts)
    }
