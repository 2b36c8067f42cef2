"""``exit_process``: no output is lost, and the interpreter is not finalized."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynmo_train.launch.worker import LAUNCHER_PID_VARIABLE

SCRIPT = """
import atexit, threading, time
from dynmo_train.launch.worker import exit_process

class Finalized:
    def __del__(self):
        print("finalized")

finalized = Finalized()
atexit.register(print, "at exit")
ending = threading.Event()
class Late(threading.Thread):
    def join(self, *timeout):
        ending.set()  # the process is about to end
        super().join(*timeout)
Late(target=lambda: (ending.wait(), print("thread"))).start()
exit_process({code}, {{"{variable}": "1"}} if {launched} else {{}})
print("returned")
ending.set()
"""


@pytest.mark.parametrize(
    ("code", "launched", "expected"),
    [
        ("75", True, (75, ["thread", "at exit"])),
        ("None", True, (0, ["thread", "at exit"])),
        ("0", False, (0, ["thread", "at exit"])),
        ("2", True, (2, ["thread", "at exit"])),
        ("2", False, (2, ["thread", "at exit"])),
        ("'message'", True, (0, ["returned", "thread", "at exit", "finalized"])),
    ],
)
def test_exit_process_flushes_output_without_finalization(code, launched, expected):
    script = SCRIPT.format(code=code, variable=LAUNCHER_PID_VARIABLE, launched=launched)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:-1], done.stderr) == (*expected, "")
