"""Losses on validation and test data: the validation data is read on, the test data once, after the last step."""

from __future__ import annotations

from .._common.console import print_message
from ..config import Config
from ..data.sample_format import Split
from ..launch.watch.heartbeat import Phase
from .monitoring.training_log import TrainingLog
from .setup import InitialState


class Evaluations:
    """Evaluates a model and logs the losses. Every rank calls all methods.

    Args:
        config: configuration of the run.
        start: engine, data, writer of the metrics, and where the validation data continues.
        log: training log.

    Attributes:
        consumed: number of consumed validation samples; checkpoints contain it.
    """

    def __init__(self, config: Config, start: InitialState, log: TrainingLog) -> None:
        self.consumed = start.consumed_valid_samples
        self._config, self._engine, self._data = config, start.engine, start.data
        self._logger, self._log = start.logger, log

    def validate(self, step: int) -> None:
        """Evaluate on the next validation samples; no effect without validation data.

        Args:
            step: number of completed steps.
        """
        if self._data.valid is not None:
            self._evaluate("valid", "validation", step, self.consumed, f"iteration {step}")
            self.consumed += self._config.training.eval_iters * self._config.training.global_batch_size

    def test(self, step: int) -> None:
        """Evaluate on the test data; no effect without test data.

        Args:
            step: number of completed steps.
        """
        if self._data.test is not None:
            self._evaluate("test", "test", step, 0, "the end of training for test data")

    def warn_without_test_data(self) -> None:
        """Report why a split has no test data."""
        if self._data.no_test is not None and self._engine.world.is_rank0:
            print_message(f"warning: no evaluation on test data: {self._data.no_test}")

    def _evaluate(self, split: Split, name: str, step: int, consumed: int, place: str) -> None:
        size, count = self._config.training.global_batch_size, self._config.training.eval_iters
        batches = (self._data.eval_batch(split, consumed + number * size, step) for number in range(count))
        losses = self._engine.evaluate_losses(batches)
        self._engine.heartbeat.enter(Phase.BOUNDARY)
        loss = losses.pop("loss")
        fields = {f"{name}_loss": loss, **{f"{name}_{key}": value for key, value in losses.items()}}
        self._logger.log_metrics(step=step, **fields)
        self._log.log_evaluation(step, {"lm_loss": loss} | losses, place, name)
