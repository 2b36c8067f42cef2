"""Errors of a rank that have a known cause, in a few words instead of a stack, and errors that all ranks raise."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from .._common.errors import DynmoError
from ..data.sample_format import SampleError
from ..parallel.process_groups import World, all_gather_objects

# In messages of torch's allocator on the CPU; that on CUDA has an error of its own.
FAILED_ALLOCATION = ("DefaultCPUAllocator", "std::bad_alloc")
# In messages of gloo and NCCL where another process of the group has ended or does not answer.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
    "Timed out waiting",
    "ncclRemoteError",
)


# torch's message where a process that builds batches has ended, with its signal if there was one.
LOST_BATCH_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: ([\w ]+)\.)?")


class LostRankError(DynmoError):
    """Another rank has ended or does not answer; its own failure came first."""


def out_of_memory(error: BaseException | None) -> str | None:
    """A message with the remedy if ``error``, or what caused it, is a failed allocation; else None."""
    while error is not None:
        text = str(error).splitlines()[0] if str(error) else ""
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FAILED_ALLOCATION):
            return (
                f"{text[:300]}. Lower --micro-batch-size or --seq-length, give --recompute-granularity full or"
                " --zero-stage, or use more pipeline or tensor ranks; pretrain --dry-run predicts the memory"
            )
        error = error.__cause__ or error.__context__
    return None


def lost_connection(error: BaseException | None) -> str | None:
    """The reason in a few words if ``error``, or what caused it, is that another process ended or hangs; else None."""
    while error is not None:
        for words in LOST_CONNECTION:
            if words in str(error):
                return words.lower()
        error = error.__cause__ or error.__context__
    return None


def lost_batch_worker(error: BaseException | None) -> str | None:
    """A message if ``error``, or what caused it, is the end of a process that builds batches; else None."""
    problem = None
    while error is not None:
        if found := LOST_BATCH_WORKER.search(str(error)):
            ending = f"was killed: {found[2].lower()}" if found[2] else "has ended"
            problem = f"a process that builds batches (--num-workers), pid {found[1]}, {ending}"
        # The cause, where there is one, has the signal.
        error = error.__cause__ or error.__context__
    return problem


@contextlib.contextmanager
def naming_causes(rank: int, host: str) -> Iterator[None]:
    """Raise errors with a known cause as a message in a few words.

    Args:
        rank: this rank.
        host: name of its host.

    Raises:
        LostRankError: another rank has ended or hangs.
        DynmoError: this rank is out of memory, or lost a process that builds batches.
    """
    try:
        yield
    except RuntimeError as error:
        if (problem := out_of_memory(error)) is not None:
            raise DynmoError(f"rank {rank} on {host} ran out of memory: {problem}") from error
        if (problem := lost_connection(error)) is not None:
            raise LostRankError(f"rank {rank} on {host} lost another rank: {problem}") from error
        if (problem := lost_batch_worker(error)) is not None:
            raise DynmoError(f"rank {rank} on {host}: {problem}") from error
        raise


def lost_another_rank(error: BaseException) -> bool:
    """Whether an error shows that another rank failed first."""
    return isinstance(error, LostRankError) or (isinstance(error, RuntimeError) and lost_connection(error) is not None)


def raise_together(world: World, problem: str | None) -> None:
    """Raise on every rank if any rank has a problem with its data. Every rank calls this.

    Raises:
        SampleError: with the problem of the first rank that has one.
    """
    problems = [each for each in all_gather_objects(world, problem) if each is not None]
    if problems:
        raise SampleError(problems[0])
