"""Parallel sizes of the run of a launch, on node 0, and the request by which it restarts with nodes that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..._common.console import print_message
from ..._common.document import write_whole
from ..._common.errors import UsageError
from ...formats.run import encode_join_request, read_join_request, read_run, refused_join_file
from ..signal_files import remove_file
from .membership import Incarnation, join_ranks
from .restart import Layout, fitting_nodes, join_layout

if TYPE_CHECKING:
    from .coordinator import Round


@dataclass
class RunLayout:
    """What node 0 knows of the sizes of a run.

    Attributes:
        launch_file: file in which rank 0 records the run directory.
        join_file: join request to rank 0.
        layout: parallel sizes of the largest round; those of other rounds follow from it, so that a run which shrank
            returns to the sizes that it had.
        refused: numbers of processes which the trainer refused.
    """

    launch_file: Path
    join_file: Path
    layout: Layout | None = None
    refused: set[int] = field(default_factory=set)

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None before rank 0 has created it."""
        return Path(self.launch_file.read_text(encoding="utf-8")) if self.launch_file.exists() else None

    def read(self, processes: int) -> None:
        """Record the parallel sizes of the run, if they are the largest ones; without ``run.json`` of ``processes``."""
        if self.run_dir is None:
            return
        try:
            document = read_run(self.run_dir / "run.json")
            sources = document["config_sources"].get("parallel", {})
            is_derived = sources.get("pipeline_model_parallel_size") == "derived"
            found = Layout(config=document["config"], processes=document["world_size"], is_derived=is_derived)
        except UsageError:  # without run.json each process is a pipeline rank
            sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": processes}
            found = Layout(config={"parallel": sizes}, processes=processes, is_derived=True)
        if self.layout is None or found.processes >= self.layout.processes:
            self.layout = found

    def makes_copies(self, current: Round) -> bool:
        """Whether the run makes copies in memory, as far as its directory shows; True before that exists."""
        if self.run_dir is None:
            return True
        self.read(current.world_size or sum(current.processes))
        run = self.layout.config.get("run", {}) if self.layout is not None else {}
        return run.get("peer_checkpoint_interval") is not None

    def read_refusal(self) -> None:
        """Record a number of processes that the trainer refused: no later round may have it."""
        path = refused_join_file(self.join_file)
        if path.exists():
            self.refused.add(read_join_request(path)[0])
            remove_file(path)

    def request_join(self, members: Sequence[Incarnation], nodes: Sequence[Incarnation]) -> None:
        """Ask rank 0 to save and exit, so that nodes join; no effect before it has a run directory.

        Args:
            members: members of the round.
            nodes: nodes that wait.
        """
        self.read_refusal()
        if self.join_file.exists() or self.run_dir is None:
            return
        before = sum(node.processes for node in members)
        if self.layout is None:
            self.read(before)
        counts = [node.processes for node in sorted((*members, *nodes), key=lambda node: node.rank)]
        count = fitting_nodes(self.layout, counts, len(members) + 1, self.refused)
        processes = sum(counts[:count])
        if processes <= before or processes in self.refused:
            return
        workers = join_layout(self.layout, processes) if self.layout is not None else None
        write_whole(self.join_file, encode_join_request(processes, workers))
        print_message(
            f"dynmo-train: node {join_ranks(node.rank for node in nodes)} joins after the next save"
            f" | processes: {before} -> {processes}"
        )
