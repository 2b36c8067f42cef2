"""What a forked process is to others: its arguments, its parent, and its end with that.

``ps`` and ``/proc/PID/environ`` show the arguments and the environment with which a program was executed. A forked
process has those of its parent, without its rank. Linux lets a process point these views to other memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_KEEP_EXECUTABLE = 0xFFFFFFFF
# Numbers of the fields in proc(5), /proc/PID/stat; the text behind the name begins with field 3.
_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of prctl(2)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def _copied_block(libc: ctypes.CDLL, words: Sequence[bytes]) -> tuple[int, int]:
    """Begin and end of a copy of ``words``, each with a final zero byte, that is never freed."""
    block = b"".join(word + b"\0" for word in words)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    begin = int(libc.malloc(len(block) + 1))
    ctypes.memmove(begin, block + b"\0", len(block) + 1)
    return begin, begin + len(block)


def show_program(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Let ``ps`` and ``/proc`` show these arguments and this environment; they have no effect on the process itself.

    Returns:
        Whether the kernel allowed it. Some sandboxes do not; the process then keeps the view of its parent.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    found = _MemoryMap(exe_fd=_KEEP_EXECUTABLE, **{name: int(stat[number - 3]) for name, number in _FIELDS.items()})
    words = [word.encode(errors="surrogateescape") for word in arguments]
    variables = [f"{name}={value}".encode(errors="surrogateescape") for name, value in environment.items()]
    found.arg_start, found.arg_end = _copied_block(libc, words)
    found.env_start, found.env_end = _copied_block(libc, variables)
    size = ctypes.c_ulong(ctypes.sizeof(found))
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    # Last: the kernel takes over the end of the heap, too, which any allocation may move.
    found.brk = libc.sbrk(0)
    option, zero = ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.c_ulong(0)
    return bool(libc.prctl(_PR_SET_MM, option, ctypes.byref(found), size, zero) == 0)


def set_subreaper(*, is_subreaper: bool) -> bool | None:
    """Set whether orphaned descendants become children of this process, as they do of process 1.

    Returns:
        The former value; None where the kernel does not support it.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    before, zero = ctypes.c_int(0), ctypes.c_ulong(0)
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), zero, zero, zero):
        return None
    value = ctypes.c_ulong(int(is_subreaper))
    return None if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, zero, zero, zero) else bool(before.value)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends; no effect where it cannot.

    A process that waits for a pipe or a lock, of which it has both ends by the fork, would wait for ever.

    Args:
        parent: process id of the parent. If another one is the parent already, this process ends at once.
    """
    if sys.platform != "linux":
        return
    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), zero, zero, zero)
    if os.getppid() != parent:
        os._exit(1)
