"""The engine as it would be without a line of compression: what "off" is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from dynmo_train.pipeline import schedule
from dynmo_train.pipeline.pipeline_stage import ItemStage
from dynmo_train.trainer.engine import Engine


class PlainStage(ItemStage):
    """``ItemStage`` whose gradients go straight through torch's stage."""

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return PipelineStage.get_bwd_recv_ops(self, bwd_chunk_id) if self.needs_backward else []

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return PipelineStage._retrieve_recv_grads(self, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.sends_gradients:
            self.bwd_cache.pop(bwd_chunk_id, None)
            return []
        return PipelineStage.get_bwd_send_ops(self, bwd_chunk_id)


class PlainEngine(Engine):
    """An engine that asks nobody what compression did."""

    def _compression(self) -> dict[str, Any]:
        return {}

    def pipeline(self) -> schedule.Pipeline:
        with without_compression():
            return super().pipeline()


@contextmanager
def without_compression() -> Iterator[None]:
    """Pipelines that are built here have plain stages."""
    before = schedule.ItemStage
    schedule.ItemStage = PlainStage  # type: ignore[misc]
    try:
        yield
    finally:
        schedule.ItemStage = before  # type: ignore[misc]
