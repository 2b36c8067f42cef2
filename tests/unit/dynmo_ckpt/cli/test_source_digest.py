"""The digest by which caches of conversions are named."""

import shutil
from pathlib import Path

import dynmo_ckpt.cli.source_digest as module


def test_a_change_of_a_table_or_module_gives_another_digest(tmp_path, monkeypatch):
    copy = tmp_path / "dynmo_ckpt"
    shutil.copytree(Path(module.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = module.source_digest()
    monkeypatch.setattr(module, "__file__", str(copy / "cli" / "source_digest.py"))
    assert module.source_digest() == before
    found = {before}
    for name in ("maps/config_keys.json", "maps/name_map.py"):
        (copy / name).write_text((copy / name).read_text() + "\n")
        found.add(module.source_digest())
    assert len(found) == 3
