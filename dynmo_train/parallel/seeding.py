"""Seeds of torch's generators that depend on what is computed, never on where.

Items draw from streams without a generator (``random_stream.py``). Where an item uses attention with dropout, or has
modules of other packages, the device's default generator is saved and seeded with a stable hash of (seed, step, global
microbatch index, item name) before it runs, and restored after it: attention accepts no other generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit hash of ``parts`` that is the same in every process, on every machine, in every version."""
    # Not Python's hash(), which differs by process. A separator, so that ("a", "bc") and ("ab", "c") differ; 63 bits,
    # because a seed is a signed 64-bit integer.
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ``F.dropout`` draws from on ``device``."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


@contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Run the body with the default generator of ``device`` seeded by ``parts``, and restore its state after."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(stable_seed(*parts))
    try:
        yield
    finally:
        generator.set_state(state)
