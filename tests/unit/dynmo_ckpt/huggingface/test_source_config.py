"""The kept ``config.json`` of a model that was trained afterwards."""

from dynmo_ckpt.huggingface.models import hf_config
from dynmo_ckpt.huggingface.source_config import export_config, source_of
from tests.unit.dynmo_ckpt import families


def test_export_config_ignores_how_experts_were_trained():
    """Losses and the capacity of experts are in the manifest of a run alone."""
    model = families.llama(num_experts=4, moe_top_k=2, moe_aux_loss_coeff=0.0)
    computed = hf_config(model, "float32", None)
    source = source_of({**computed, "x_note": "of the source"}, None)
    trained = {"moe_z_loss_coeff": 0.1, "moe_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
    assert export_config(source, {**model, **trained}, computed)["x_note"] == "of the source"
    assert "x_note" not in export_config(source, {**model, "moe_top_k": 1}, computed)
