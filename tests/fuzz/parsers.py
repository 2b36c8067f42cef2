"""Finds the parsers of the packages by their names and parameters, for a test that each of them is fuzzed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("dynmo_balance", "dynmo_ckpt", "dynmo_tools", "dynmo_train")
PREFIXES = ("read_", "parse_", "decode_", "load_")
INPUTS = {"Path", "str", "bytes", "bytes | str", "str | os.PathLike[str]", "torch.Tensor"}
# Parsers without a target of their own, and why.
EXEMPT = {
    "dynmo_balance.formats.plan:read_plan_of_profile": "read_plan, and rules of the header",
    "dynmo_balance.partition.registry:load_balancer": "a name, looked up in a table",
    "dynmo_ckpt.huggingface.tokenizer:read_object": "the targets of folders with a tokenizer call it",
    "dynmo_ckpt.io.files:read_file": "returns bytes",
    "dynmo_ckpt.maps.name_map:load_map": "a file of the package",
    "dynmo_ckpt.native.checkpoint:load_manifest": "the targets of folders with a manifest call it",
    "dynmo_tools.dedup.sorted_pairs:read_pairs": "a memory map of numbers; any bytes are numbers",
    "dynmo_train.config.presets:read_recipe": "the name of a file of the package",
    "dynmo_train.config.resolve:read_config_file": "parse_config_file",
    "dynmo_train.data.tokenizer:load_tokenizer": "open_tokenizer",
    "dynmo_train.formats.checkpoint.reader:load_manifest": "the targets of folders with a manifest call it",
    "dynmo_train.launch.watch.heartbeat:read_heartbeat": "parse_page",
    "dynmo_train.launch.store_values:decode_value": "the targets of records of the store call it",
}


def parsers() -> Iterator[str]:
    """Public functions, as ``module:function``, that read a path, a text or bytes by their name and first parameter."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_common" not in path.parts:
                yield from _parsers_of(path)


def _parsers_of(path: Path) -> Iterator[str]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith(PREFIXES):
            continue
        first = node.args.args[:1]
        if first and first[0].annotation is not None and ast.unparse(first[0].annotation) in INPUTS:
            yield f"{module}:{node.name}"
