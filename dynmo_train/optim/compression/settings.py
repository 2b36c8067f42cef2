"""What is compressed, as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompressionSettings:
    """Compression of a run; the default compresses nothing.

    Attributes:
        boundary_rank: rank of the gradients that stages send back; None sends them whole.
        epilogue_only: compress only those that the receiving worker gets behind its last forward of a step.
        feedback: add what was lost to the next one that is compressed: of a boundary, and of a parameter.
        feedback_within_step: what a boundary lost is not carried from a step to the next.
        replica_rank: rank of the replicas' gradients of matrices; None adds them whole.
        replica_warmup_steps: steps at the start in which they are added whole.
        replica_workers: how many workers, from the first one on, compress them; None is all.
        choose_workers: ``dynmo-plan`` says how many; nobody compresses until it has.
        fuse_ties: add a tied weight's gradients over the replicas and over its copies in one exchange.
        check_error, check_speed, check_ratio: what is measured and told.
    """

    boundary_rank: int | None = None
    epilogue_only: bool = False
    feedback: bool = False
    feedback_within_step: bool = False
    replica_rank: int | None = None
    replica_warmup_steps: int = 0
    replica_workers: int | None = None
    choose_workers: bool = False
    fuse_ties: bool = False
    check_error: bool = False
    check_speed: bool = False
    check_ratio: bool = False

    @property
    def is_lossy(self) -> bool:
        """Whether gradients are not what they would be without."""
        return self.boundary_rank is not None or self.replica_rank is not None

    @property
    def checks(self) -> bool:
        """Whether anything is measured."""
        return self.check_error or self.check_speed or self.check_ratio


NO_COMPRESSION = CompressionSettings()
