"""Settings of gradient compression."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompressionSettings:
    """Gradient compression of a run; the default compresses nothing.

    Attributes:
        boundary_rank: Rank of the low-rank factors at stage boundaries; None sends gradients uncompressed.
        epilogue_only: Compress only microbatches whose backward follows the receiver's last forward of the step.
        feedback: Error feedback: add the compression error to the next gradient of the boundary or parameter.
        feedback_within_step: Reset the error of boundaries at each step.
        replica_rank: Rank of the factors between replicas (PowerSGD); None sums gradients uncompressed.
        replica_warmup_steps: Uncompressed steps at the start.
        replica_workers: Number of pipeline ranks, from the first one, that compress between replicas; None is all.
        choose_workers: ``dynmo-plan`` chooses that number; until then none compresses.
        fuse_ties: Sum a tied weight's gradients over replicas and copies in one exchange.
        check_error: Log the compression error.
        check_speed: Log compression and decompression time.
        check_ratio: Log the compression ratio.
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
        """Whether compression changes gradients."""
        return self.boundary_rank is not None or self.replica_rank is not None

    @property
    def checks(self) -> bool:
        """Whether anything is measured and logged."""
        return self.check_error or self.check_speed or self.check_ratio


NO_COMPRESSION = CompressionSettings()
