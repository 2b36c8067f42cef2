"""dynmo-prep: every step killed at random points, and run again, gives the bytes of a run that nobody killed.

A run counts the calls that Python makes, and those of the file system apart; half of the points are among the latter.
``DYNMO_KILLS`` is the number of points a step: 2 by default, 20 for the whole check.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from dynmo_tools import cli
from tests.cli.prep_steps import DERIVED_INPUTS, STEPS, outputs, write_inputs

pytestmark = pytest.mark.complete

KILLS = int(os.environ.get("DYNMO_KILLS", "2"))

# Forked, so that what is imported once serves every run; nothing here has started a thread before.
DRIVER = """
import importlib, json, os, pkgutil, random, signal, sys
import dynmo_tools
from dynmo_tools import cli
from dynmo_tools.dedup import minhash
from dynmo_tools.extract import sample_corpus
from dynmo_tools.filters import clean
for module in pkgutil.walk_packages(dynmo_tools.__path__, "dynmo_tools."):
    if module.name not in ("dynmo_tools.__main__", "dynmo_tools.runner.ray"):
        importlib.import_module(module.name)
import ftfy, mwparserfromhell, orjson, tokenizers, zstandard
folder, kills, *arguments = sys.argv[1:]
library = sample_corpus.stdlib_folder() / "email"  # the whole library takes a profiled run half a minute
sample_corpus.stdlib_folder = lambda: library
if arguments[0] in ("clean", "fix"):
    clean.language_detector(0)
if "dup" in arguments[0]:
    minhash.permutations(100, 1234)

def touches_files(function):
    return function.__module__ == "posix" or type(function.__self__).__module__ == "_io"

def run(name, kind, kill_at):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.makedirs(name, exist_ok=True)
    os.chdir(name)
    log = os.open("../log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    calls = {"any": 0, "files": 0}
    def count(frame, event, function):
        calls["any"] += 1
        if event == "c_call" and touches_files(function):
            calls["files"] += 1
        if calls[kind] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.argv = ["dynmo-prep", *arguments]
    code = 1
    sys.setprofile(count)
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.setprofile(None)
        with open("../calls.json", "w") as handle:
            json.dump(calls, handle)
        os._exit(code)

os.chdir(folder)
codes = [["whole", run("whole", "any", 0)]]
totals = json.load(open("calls.json"))
draw = random.Random(arguments[0])
for number in range(int(kills)):
    kind = ("files", "any")[number % 2]
    point = draw.randrange(1, max(2, totals[kind] * 9 // 10))
    codes.append([f"{kind} {point}", run(f"killed-{number}", kind, point), run(f"killed-{number}", "any", 0)])
print(json.dumps(codes))
"""


def call(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["dynmo-prep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert not stop.value.code, arguments


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        payload = f"<html><head><title>{self.path}</title></head><body>Page {self.path}</body></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with an input for every step, and a server of the pages to fetch."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (folder / "pages.txt").write_text("".join(f"http://127.0.0.1:{server.server_port}/{n}\n" for n in range(6)))
    for words in DERIVED_INPUTS:
        call(*(word.replace("{in}", str(folder)) for word in words))
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("step", STEPS)
def test_step_killed_at_random_points_resumes_to_the_same_bytes(inputs, tmp_path, step):
    arguments = [word.replace("{in}", str(inputs)) for word in STEPS[step]]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, tmp_path, str(KILLS), step, *arguments],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (_, code), *kills = json.loads(done.stdout)
    log = (tmp_path / "log.txt").read_text()
    assert code == 0, log
    whole = outputs(tmp_path / "whole")
    assert whole
    for number, (point, first, second) in enumerate(kills):
        assert (first, second) == (-9, 0), (point, log)
        assert outputs(tmp_path / f"killed-{number}") == whole, point
