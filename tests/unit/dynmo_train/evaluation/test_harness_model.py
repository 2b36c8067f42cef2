"""What the harness's model scores, and its generation options, without the harness."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.evaluation import harness_model
from dynmo_train.evaluation.harness_model import HarnessModel, before_first, generation_options
from dynmo_train.evaluation.scoring import Scores


class Positions(HarnessModel):
    """A model of eight positions, whose engine is not needed."""

    def __init__(self):
        self.max_length = 8
        self._inference = type("Inference", (), {"micro_batch_size": 2})
        self._scorer = object()


def test_log_likelihoods_score_the_continuation_within_the_positions(monkeypatch):
    scored = []

    def score(_engine, sequences, *, longest, micro_batch):
        scored.extend(sequences)
        assert (longest, micro_batch) == (8, 2)
        return Scores(losses=[1.5] * len(sequences), hits=[2] * len(sequences))

    monkeypatch.setattr(harness_model, "score", score)
    pairs = [([1], [2, 3]), (list(range(20)), [7, 8, 9]), ([1], []), ([5], list(range(12)))]
    found = Positions().log_likelihoods(pairs)
    assert found == [(-1.5, True), (-1.5, False), (0.0, True), (-1.5, False)]
    assert [each.tokens.tolist() for each in scored] == [
        [1, 2, 3],
        [14, 15, 16, 17, 18, 19, 7, 8, 9],
        list(range(3, 12)),
    ]
    assert [each.first_scored for each in scored] == [1, 6, 1]


def test_options_of_a_task_are_those_of_the_harness():
    assert generation_options({})[:2] == ((), 256)
    options = {"until": "\n", "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}
    stops, length, sampling = generation_options(options)
    assert (stops, length, sampling.temperature) == (("\n",), 3, 0.0)
    assert generation_options({"do_sample": True, "temperature": 0.7, "top_p": 0.5})[2].top_p == 0.5


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"max_gen_toks": 0}, {"until": [1]}, {"max_gen_toks": "x"}])
def test_option_that_is_not_supported_is_refused(options):
    with pytest.raises(UsageError, match="generation options"):
        generation_options(options)


def test_text_ends_before_the_first_stop():
    assert before_first("a b c", ["c", "b"]) == "a "
    assert before_first("a b c", ["x"]) == "a b c"
