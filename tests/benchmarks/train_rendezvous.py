"""Rendezvous of up to 4,096 nodes: records, requests, bytes and processor time of node 0.

    python tests/benchmarks/train_rendezvous.py --nodes 64 512 4096

The coordinator and the membership are those of a launch; the store is a dictionary that counts requests, and the other
nodes are simulated by their requests. With ``--store`` the coordinator uses torch's store over loopback. Times are
processor times of this process, minima of three repetitions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynmo_train.launch.elastic.coordinator import Coordinator, append_record, decode_round
from dynmo_train.launch.elastic.membership import Limits, NodeState, Record, RecordKind


@dataclass
class CountingStore:
    """The operations of a store on a dictionary, which counts requests and bytes."""

    values: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    num_bytes: int = 0

    def add(self, key: str, amount: int) -> int:
        """Increment a counter."""
        self.num_requests += 1
        self.num_bytes += len(key) + 8
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.num_requests += 1
        self.num_bytes += len(key) + len(value)
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """The value of a key."""
        self.num_requests += 1
        self.num_bytes += len(key) + len(self.values[key])
        return bytes(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        self.num_requests += 1
        self.num_bytes += sum(map(len, keys)) + 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, in one request."""
        self.num_requests += 1
        self.num_bytes += sum(len(key) + len(self.values[key]) for key in keys)
        return [self.values[key] for key in keys]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Costs of a phase: records and requests of all nodes, their bytes, processor time of this process."""

    name: str
    records: int
    requests: int
    num_bytes: int
    cpu_s: float


class Simulation:
    """A launch of ``count`` nodes in which all records are written by this process."""

    def __init__(self, count: int, store: Any) -> None:
        self.count, self.store = count, store
        limits = Limits(min_nodes=count - 1, max_nodes=count, node_timeout_s=1e9, rejoin_s=0.0)
        self.coordinator = Coordinator(store, limits, "n0", lambda _: None)
        self.phases: list[Phase] = []

    def _measure(self, name: str, action: Any) -> None:
        store, before = self.store, (getattr(self.store, "num_requests", 0), getattr(self.store, "num_bytes", 0))
        records, start_s = store.add("log", 0), time.process_time()
        action()
        cpu_s = time.process_time() - start_s
        after = (getattr(store, "num_requests", 0), getattr(store, "num_bytes", 0))
        records = store.add("log", 0) - records
        requests, num_bytes = after[0] - before[0] - 1, after[1] - before[1] - 11
        phase = Phase(name=name, records=records, requests=requests, num_bytes=num_bytes, cpu_s=cpu_s)
        self.phases.append(phase)

    def join(self) -> None:
        """All nodes join, the round begins, and every node reads it."""
        for node in range(self.count):
            self.store.set(f"beat/n{node}", "0")
            record = Record(kind=RecordKind.JOINED, name=f"n{node}", rank=node, processes=8)
            append_record(self.store, record)
        self._begin()

    def _begin(self) -> None:
        members = self.coordinator.wait_for_members(0.0)
        if members is None:
            raise RuntimeError("too few nodes joined")
        current = self.coordinator.open_round(members, 1, ())
        for node in current.members[1:]:
            # What a node reads when ``changes`` grew.
            self.store.add("changes", 0)
            self.store.check(["end"])
            self.store.check([f"gone/n{node}"])
            number = self.store.add("round", 0)
            found = decode_round(self.store.get(f"round/{number}"))
            if found != current:
                raise RuntimeError("nodes disagree on the members")

    def beat(self) -> None:
        """One heartbeat of every node, and one reading of all of them."""
        for node in range(1, self.count):
            self.store.set(f"beat/n{node}", "1")
            self.store.add("changes", 0)
        self.coordinator.poll()

    def drain(self) -> None:
        """The last node is drained; the others end the round, and the next one begins."""
        last = f"n{self.count - 1}"
        append_record(self.store, Record(kind=RecordKind.LEFT, name=last, state=NodeState.DRAINED))
        self.coordinator.poll()
        for node in range(self.count - 1):
            self.store.check(["stop/1"])
            self.store.get("stop/1")
            append_record(self.store, Record(kind=RecordKind.ENDED, name=f"n{node}", round=1))
        self.coordinator.end_round(0.0)
        self._begin()

    def run(self) -> list[Phase]:
        """All phases."""
        self._measure("join", self.join)
        self._measure("heartbeat", self.beat)
        self._measure("drain", self.drain)
        return self.phases


def simulate(count: int, store: Any = None) -> list[Phase]:
    """Costs of the phases of a launch of ``count`` nodes."""
    return Simulation(count, CountingStore() if store is None else store).run()


def _torch_store() -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 512, 4096], help="Numbers of nodes.")
    parser.add_argument("--store", action="store_true", help="Use torch's store over loopback.")
    given = parser.parse_args()
    sys.stdout.write("| nodes | phase | records | requests | per node | MB | cpu s |\n|---|---|---|---|---|---|---|\n")
    for count in given.nodes:
        runs = [simulate(count, _torch_store() if given.store else None) for _ in range(3)]
        for phases in zip(*runs, strict=True):
            phase, cpu_s = phases[0], min(each.cpu_s for each in phases)
            cells = (
                f"{phase.records:,} | {phase.requests:,} | {phase.requests / count:.1f} | {phase.num_bytes / 1e6:.1f}"
            )
            sys.stdout.write(f"| {count:,} | {phase.name} | {cells} | {cpu_s:.3f} |\n")


if __name__ == "__main__":
    main()
