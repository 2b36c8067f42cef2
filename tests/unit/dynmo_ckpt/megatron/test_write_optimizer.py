"""Megatron's formats are written with Adam's moments; the state of other optimizers is refused."""

import pytest

from dynmo_ckpt._common.console import Format
from dynmo_ckpt.formats.choices import ReadOptions, WriteOptions
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.operations.convert import convert
from dynmo_ckpt.operations.write import WriteSettings
from tests.tables import table
from tests.unit.dynmo_ckpt import native_checkpoints

SETTINGS = WriteSettings(jobs=1, verify=False, overwrite=True, plan_only=False, format=Format.JSON)


def converted(source, target, target_format, *, with_optimizer):
    convert(
        source,
        target,
        source_format="native",
        target_format=target_format,
        read=ReadOptions(),
        write=WriteOptions(),
        with_optimizer=with_optimizer,
        check_logits=False,
        settings=SETTINGS,
    )


@table("target_format", ["legacy", "dcp", "deepspeed"])
@table("kind", ["sgd", "muon", "adafactor"])
def test_convert_state_of_another_optimizer_is_refused(tmp_path, kind, target_format, capsys):
    m = native_checkpoints.model()
    p = native_checkpoints.true_rows(m["vocab_size"], native_checkpoints.parameters(m))
    native_checkpoints.save(tmp_path / "in", p | native_checkpoints.optimizer_state(p, kind), m, optimizer=kind)
    with pytest.raises(UnsupportedError, match=f"optimizer state of {kind}; .* --no-optimizer or --to native"):
        converted(tmp_path / "in", tmp_path / "out", target_format, with_optimizer=True)
    converted(tmp_path / "in", tmp_path / "out", target_format, with_optimizer=False)
    assert any((tmp_path / "out").iterdir())
    capsys.readouterr()
