"""Every decoder family of transformers: the options of ``pretrain`` are the model that conversion reads."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo_ckpt.huggingface.models import hf_model
from dynmo_train.models.registry import family_of, family_of_manifest
from tests.distributed.decoder_options import COMMON, FAMILIES
from tests.distributed.option_runs import resolved

pytestmark = pytest.mark.complete

RUN: dict[str, Any] = {
    **COMMON,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 4,
    "lr": 3e-3,
    "lr_warmup_fraction": 0.0,
    "clip_grad": 0.3,
    "mock_data": True,
    "num_threads": 1,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_family_train_what_conversion_reads(family):
    config = FAMILIES[family].hugging_face
    converted = family_of_manifest(hf_model(config, 1)).manifest()
    trained = family_of(resolved(RUN | FAMILIES[family].options)).manifest()
    # A checkpoint has the further predictions only where it has their tensors.
    assert trained.pop("mtp_num_layers", 0) == config.get("num_nextn_predict_layers", 0)
    assert trained == converted
