"""A light worker for tests of membership: integers instead of a model, real sockets between the ranks.

It behaves as the trainer does towards its launcher: it records its run directory, saves every ten steps, after SIGTERM
(exit code 143) and after a join request (75), and resumes from what it saved. Its state depends on every step, on every
rank and on the number of ranks, so that one lost or repeated step, or a rank of another round, changes all later bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

SAVE_INTERVAL, STEP_S = 10, 0.02
TERMINATE, RELAUNCH, FINISH = 1, 2, 4
MESSAGE = struct.Struct("<QB")
EXIT_CODES = ((TERMINATE, 143), (RELAUNCH, 75), (FINISH, 0))


def digest(*parts: int) -> int:
    """A 64-bit number that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(parts)}Q", *parts), digest_size=8).digest(), "little")


def next_state(state: int, step: int, world: int, contributions: list[int]) -> int:
    """The state after a step, from the contributions of all ranks."""
    return digest(state, step, world, sum(contributions) % 2**64)


def undisturbed(state: int, first: int, last: int, world: int) -> int:
    """The state after the steps ``first + 1`` to ``last``, computed without processes."""
    for step in range(first + 1, last + 1):
        state = next_state(state, step, world, [digest(state, step, rank, world) for rank in range(world)])
    return state


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes.

    Raises:
        ConnectionError: the peer closed the connection.
    """
    found = b""
    while len(found) < size:
        part = peer.recv(size - len(found))
        if not part:
            raise ConnectionError("a rank has gone")
        found += part
    return found


def connect(rank: int, world: int, host: str, port: int) -> list[socket.socket]:
    """Connections to the other ranks on rank 0, by rank; on the others, the one to rank 0."""
    if rank == 0:
        server = socket.create_server(("", port), backlog=world)
        peers: dict[int, socket.socket] = {}
        while len(peers) < world - 1:
            peer, _ = server.accept()
            peers[receive(peer, 1)[0]] = peer
        return [peers[other] for other in range(1, world)]
    for _ in range(600):
        try:
            peer = socket.create_connection((host, port), timeout=5)
        except OSError:
            time.sleep(0.05)
            continue
        peer.settimeout(None)
        peer.sendall(bytes([rank]))
        return [peer]
    raise ConnectionError("rank 0 does not answer")


def put(path: Path, text: str) -> None:
    """Write a whole file or none."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def main(folder: Path) -> int:
    """Train until the file ``finish`` exists; the exit code."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(TERMINATE))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = int(os.environ["TORCHELASTIC_RUN_ID"].removeprefix("round-"))
    # Another port for each round, as for the trainer: a rank of an earlier round may still try to connect.
    port = 9000 + int(os.environ["MASTER_PORT"]) % 20_000
    peers = connect(rank, world, os.environ["MASTER_ADDR"], port)
    run, checkpoint = folder / "run", folder / "checkpoint.json"
    (run / "requests").mkdir(parents=True, exist_ok=True)
    step, state = json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0)
    own = os.environ["DYNMO_TEST_HOST"].encode()
    if rank == 0:
        hosts = [own.decode(), *(receive(peer, 1).decode() for peer in peers)]
        for peer in peers:
            peer.sendall(MESSAGE.pack(state, 0) + MESSAGE.pack(step, 0))
        put(Path(os.environ["DYNMO_LAUNCH_FILE"]), str(run))
        with open(folder / "history.jsonl", "a") as history:
            history.write(json.dumps({"step": step, "state": state, "hosts": hosts, "round": number}) + "\n")
    else:
        peers[0].sendall(own)
        state, _ = MESSAGE.unpack(receive(peers[0], MESSAGE.size))
        step, _ = MESSAGE.unpack(receive(peers[0], MESSAGE.size))
    while True:
        step += 1
        flags = TERMINATE if received else 0
        own_part = digest(state, step, rank, world)
        if rank == 0:
            flags |= RELAUNCH * os.path.exists(os.environ["DYNMO_JOIN_FILE"]) | FINISH * (folder / "finish").exists()
            parts = [MESSAGE.unpack(receive(peer, MESSAGE.size)) for peer in peers]
            for _, flag in parts:
                flags |= flag
            total = (own_part + sum(part for part, _ in parts)) % 2**64
            for peer in peers:
                peer.sendall(MESSAGE.pack(total, flags))
        else:
            peers[0].sendall(MESSAGE.pack(own_part, flags))
            total, flags = MESSAGE.unpack(receive(peers[0], MESSAGE.size))
        state = next_state(state, step, world, [total])
        if rank == 0 and (flags or step % SAVE_INTERVAL == 0):
            put(checkpoint, json.dumps([step, state]))
        if flags:
            return next(code for flag, code in EXIT_CODES if flags & flag)
        time.sleep(STEP_S)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from dynmo_train.launch.worker import exit_process, watch_launcher

    watch_launcher(os.environ)
    exit_process(main(Path(sys.argv[2])), os.environ)
