"""The benchmark suite: turns, ratios, peers that are missing or fail, result documents, the figures of the README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.suite import results
from tests.benchmarks.suite.__main__ import command_line
from tests.benchmarks.suite.cases import CASES
from tests.benchmarks.suite.measure import BenchmarkError, Case, Program, portable, run_case, summary_of
from tests.paths import ROOT

pytestmark = pytest.mark.complete

COMMITTED = ROOT / "tests" / "benchmarks" / "results.json"
PRINT = "import json, pathlib; p = pathlib.Path('turns'); p.write_text((p.read_text() if p.exists() else '') + '{0}');"


def printing(name, value):
    text = PRINT.replace("{0}", name) + f"print('a line'); print(json.dumps({{'x': {value}}}))"
    return Program(command=[sys.executable, "-c", text], printed="x")


def case(programs, **more):
    options = {"name": "a-case", "area": "a", "text": "A case", "unit": "s", "ours": "o", **more}
    return Case(programs=lambda work: programs, **options)


def measured(tmp_path, programs, *, with_peers=True, **more):
    return run_case(case(programs, **more), tmp_path, repeats=3, with_peers=with_peers, log=lambda line: None)


def test_run_case_of_the_same_value_each_time_runs_once(tmp_path):
    found = measured(tmp_path, {"o": printing("o", 2.0)}, warm_up=False, repeatable=False)
    assert found["programs"]["o"]["values"] == [2.0]


def test_run_case_programs_take_turns(tmp_path):
    found = measured(tmp_path, {"o": printing("o", 2.0), "p": printing("p", 5.0)})
    assert (tmp_path / "turns").read_text() == "op" * 4  # one turn of warm-up
    assert found["programs"]["o"]["values"] == [2.0] * 3
    assert found["programs"]["p"]["ratio"] == 2.5


def test_run_case_ratio_of_rates_is_ours_over_the_peer(tmp_path):
    programs = {"o": printing("o", 2.0), "p": printing("p", 5.0)}
    found = measured(tmp_path, programs, higher_is_better=True, warm_up=False)
    assert found["programs"]["p"]["ratio"] == 0.4
    assert (tmp_path / "turns").read_text() == "op" * 3


def test_run_case_without_peers_runs_ours_only(tmp_path):
    found = measured(tmp_path, {"o": printing("o", 2.0), "p": printing("p", 5.0)}, with_peers=False)
    assert list(found["programs"]) == ["o"]


def test_run_case_peer_that_fails_or_lacks_is_reported(tmp_path):
    failing = Program(command=[sys.executable, "-c", "raise SystemExit('no such option')"])
    lacking = Program(command=["none"], missing="not installed: none")
    found = measured(tmp_path, {"o": printing("o", 2.0), "p": failing, "q": lacking})
    assert found["missing"] == {"p": "failed: no such option", "q": "not installed: none"}
    assert list(found["programs"]) == ["o"]


def test_run_case_our_failure_is_raised(tmp_path):
    failing = Program(command=[sys.executable, "-c", "raise SystemExit('broken')"])
    with pytest.raises(BenchmarkError, match="exit code 1:\nbroken"):
        measured(tmp_path, {"o": failing})


def test_run_once_wall_time_and_output_path(tmp_path):
    # The program takes a time that the measured one must exceed.
    text = "import sys, time; open(sys.argv[1] + '.bin', 'x').close(); time.sleep(0.05)"
    found = measured(tmp_path, {"o": Program(command=[sys.executable, "-c", text, "{out}"])})
    assert min(found["programs"]["o"]["values"]) > 0.05
    assert list(tmp_path.iterdir()) == []


def test_summary_of_values_has_median_and_spread():
    assert summary_of([4.0, 1.0, 2.0]) == {
        "values": [4.0, 1.0, 2.0],
        "median": 2.0,
        "min": 1.0,
        "max": 4.0,
        "spread": 1.5,
    }


def test_markdown_has_machine_commit_and_every_program(tmp_path):
    lacking = Program(command=["none"], missing="not installed: none")
    entry = measured(tmp_path, {"o": printing("o", 1234.5), "p": printing("p", 617.25), "q": lacking})
    document = results.document([entry], command="bin/bench --quick", repeats=3)
    page = results.markdown(document)
    for part in (
        "`bin/bench --quick`",
        document["commit"],
        document["machine"]["cpu"],
        "| p | 617 s | 0% |",
        "| 0.50 |",
    ):
        assert part in page
    assert "| not installed: none |" in page
    assert results.figures(document).splitlines()[2:] == ["| A case | 1,234 s | p 617 | 0.50 |"]


def test_merged_keeps_cases_that_did_not_run(tmp_path):
    entry = measured(tmp_path, {"o": printing("o", 1.0)})
    old = results.document([entry, {**entry, "name": "b-case"}], command="first", repeats=3)
    old["commit"] = "before"
    new = results.merged(old, results.document([entry], command="second", repeats=3))
    assert [case["name"] for case in new["cases"]] == ["a-case", "b-case"]
    assert [case.get("commit") for case in new["cases"]] == [None, "before"]
    assert "From other runs: `b-case` at commit before on " in results.markdown(new)
    assert "From other runs" not in results.markdown(old)


def test_bench_runs_a_case_and_writes_both_files(tmp_path):
    command = [sys.executable, ROOT / "tests/benchmarks/suite/__main__.py", "--case", "plan-time", "--peers"]
    done = subprocess.run(
        [*map(str, command), "--repeats", "1", "--output", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert entry["programs"]["dynamic program in numpy"]["ratio"] > 1
    assert done.stdout == (tmp_path / "results.md").read_text()


def test_committed_results_have_every_case_and_the_page():
    committed = results.read(COMMITTED)
    assert [case["name"] for case in committed["cases"]] == [case.name for case in CASES]
    assert COMMITTED.with_suffix(".md").read_text(encoding="utf-8") == results.markdown(committed)
    repeatable = {case.name: case.repeatable for case in CASES}
    for case in committed["cases"]:
        for found in case["programs"].values():
            assert len(found["values"]) == (3 if repeatable[case["name"]] else 1)


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_figures_are_those_of_the_committed_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert results.with_figures(text, results.read(COMMITTED)) == text, (
        "run: bin/bench --readme --output tests/benchmarks"
    )


@pytest.mark.parametrize("words", ["--peers --output x", "--output x --peers", "--output=x --peers", "--peers"])
def test_command_line_leaves_out_the_output_folder(words):
    assert command_line(words.split()) == "bin/bench --peers"


def test_portable_command_names_places_instead_of_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("PEER_PYTHON", "/opt/peers/bin/python")
    monkeypatch.setenv("PEER_MEGATRON", "/opt/Megatron-LM")
    words = ["/opt/peers/bin/python", "/opt/Megatron-LM/tools/x.py", f"{tmp_path}/corpus.jsonl", "two words"]
    assert portable(words, tmp_path) == "$PEER_PYTHON $PEER_MEGATRON/tools/x.py DIR/corpus.jsonl 'two words'"
    ours = str(Path(sys.executable).parent / "dynmo-plan")
    assert portable([ours, "report"], tmp_path) == "dynmo-plan report"
    assert portable([sys.executable, str(ROOT / "tests" / "x.py")], tmp_path) == "python tests/x.py"
