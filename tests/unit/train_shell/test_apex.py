"""NVIDIA's apex is told from the package of the same name by its optimizers."""

from __future__ import annotations

import sys

import pytest

from dynmo_train.optim.apex import find_apex

NVIDIA = {"__init__.py": "", "optimizers/__init__.py": "class FusedAdam:\n    pass\n"}
OTHERS = {
    "no optimizers": {"__init__.py": ""},
    "another meaning": {"__init__.py": "", "optimizers/__init__.py": "FusedAdam = 'a string'\n"},
    "no FusedAdam": {"__init__.py": "", "optimizers/__init__.py": "class Adam:\n    pass\n"},
    "broken": {"__init__.py": "raise RuntimeError('needs a web server')\n"},
    "missing parts": {"__init__.py": "import a_module_that_is_not_there\n"},
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    def write(files):
        for name, text in files.items():
            path = tmp_path / "apex" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def test_nvidias_is_known_by_its_optimizers(install):
    install(NVIDIA)
    apex = find_apex()
    assert apex.state == "present"
    assert apex.fused_adam.__name__ == "FusedAdam"
    assert apex.line(used=True) == "apex: NVIDIA's, its FusedAdam is used"
    assert "not used" in apex.line(used=False)


@pytest.mark.parametrize("kind", OTHERS)
def test_another_project_of_that_name_is_told(install, kind):
    install(OTHERS[kind])
    apex = find_apex()
    assert (apex.state, apex.fused_adam) == ("other", None)
    assert "is not NVIDIA's (the apex on the package index is another project)" in apex.line(used=False)


def test_none_is_told():
    apex = find_apex(find=lambda name: None)
    assert apex.state == "absent"
    assert "not installed" in apex.line(used=False)
