"""The kept ``config.json`` of a model that was trained afterwards."""

import pytest

from dynmo_ckpt.huggingface.models import hf_config, hf_model
from dynmo_ckpt.huggingface.source_config import export_config, source_of
from tests.unit.dynmo_ckpt import families
from tests.unit.dynmo_ckpt.huggingface.test_published_decoders import PUBLISHED, QWEN_3_MOE


def test_export_config_ignores_how_experts_were_trained():
    """Losses and the capacity of experts are in the manifest of a run alone."""
    model = families.llama(num_experts=4, moe_top_k=2, moe_aux_loss_coeff=0.0)
    computed = hf_config(model, "float32", None)
    source = source_of({**computed, "x_note": "of the source"}, None)
    trained = {"moe_z_loss_coeff": 0.1, "moe_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
    assert export_config(source, {**model, **trained}, computed)["x_note"] == "of the source"
    assert "x_note" not in export_config(source, {**model, "moe_top_k": 1}, computed)


@pytest.mark.parametrize(
    "published", [*PUBLISHED, QWEN_3_MOE | {"num_experts": 64}], ids=lambda each: each["model_type"]
)
def test_export_config_of_a_published_decoder_is_that_of_its_publisher(published):
    """Second names of keys count as well: Qwen's files state ``num_experts``, transformers' ``num_local_experts``."""
    model = hf_model(published, 1)
    computed = hf_config(model, "bfloat16", None, published["model_type"])
    expected = {key: value for key, value in published.items() if key != "auto_map"}
    assert export_config(source_of(published, None), model, computed) == expected
    assert hf_model(published, 1, ignored=("*",)) == model


def test_export_config_names_the_router_of_deepseek_v3():
    """vLLM reads these keys; a configuration that transformers has saved does not have them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 64, "model_type": "deepseek_v3"}
    model = hf_model(sizes | {"architectures": ["DeepseekV3ForCausalLM"]}, 96)
    computed = hf_config(model, "float32", None, "deepseek_v3")
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    saved = {key: value for key, value in computed.items() if key not in router}
    assert export_config(source_of(saved, None), model, computed) == {**saved, **router}
