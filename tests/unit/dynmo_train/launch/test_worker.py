"""How a process ends, a launcher's worker or not: nothing lost, and the interpreter is not torn down."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynmo_train.launch.worker import LAUNCHER_PID_VARIABLE

SCRIPT = """
import atexit, threading, time
from dynmo_train.launch.worker import end

class TornDown:
    def __del__(self):
        print("torn down")

kept = TornDown()
atexit.register(print, "at exit")
ending = threading.Event()
class Late(threading.Thread):
    def join(self, *timeout):
        ending.set()  # the process is about to end
        super().join(*timeout)
Late(target=lambda: (ending.wait(), print("thread"))).start()
end({code}, {{"{variable}": "1"}} if {launched} else {{}})
print("goes on")
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
        ("'told'", True, (0, ["goes on", "thread", "at exit", "torn down"])),
    ],
)
def test_a_process_ends_with_all_its_words_and_no_tear_down(code, launched, expected):
    script = SCRIPT.format(code=code, variable=LAUNCHER_PID_VARIABLE, launched=launched)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:-1], done.stderr) == (*expected, "")
