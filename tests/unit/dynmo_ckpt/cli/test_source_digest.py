"""The digest that names caches of conversions."""

import shutil
from pathlib import Path

from dynmo_ckpt import cli


def test_source_digest_changed_table_or_module_gives_another_digest(tmp_path):
    copy = tmp_path / "dynmo_ckpt"
    shutil.copytree(Path(cli.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    found = {cli.source_digest(copy)}
    assert found == {cli.source_digest(Path(cli.__file__).parents[1])}
    for name in ("maps/config_keys.json", "maps/name_map.py"):
        (copy / name).write_text((copy / name).read_text() + "\n")
        found.add(cli.source_digest(copy))
    assert len(found) == 3
