"""torchtitan's names and layouts, against facts read from its code; what it does not compute is refused by name.

``tests/parity/test_ckpt_torchtitan.py`` has torchtitan's own models, where it is installed.
"""

import json

import pytest

from tests.tables import table
from tests.unit.dynmo_ckpt.titan_facts import MODELS, older, same_elements, save_theirs, titan_state

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def loaded(folder):
    """The tensors of a distributed checkpoint, by torch's own reader."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def save_titan(state, folder):
    dcp.save({name: tensor.contiguous() for name, tensor in state.items()}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("name", MODELS)
def test_titan_output_has_the_names_and_elements_of_torchtitan(tmp_path, ckpt, name):
    expected = titan_state(name, save_theirs(name, tmp_path / "hf"))
    ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "titan", "--no-check-logits")
    found = loaded(tmp_path / "out")
    assert set(found) == set(expected)
    assert [key for key in expected if not same_elements(found[key], expected[key])] == []


@pytest.mark.parametrize("is_older", [False, True], ids=["0.3", "0.2"])
@pytest.mark.parametrize("name", MODELS)
def test_titan_input_has_each_tensor_of_transformers(tmp_path, ckpt, name, is_older):
    theirs = save_theirs(name, tmp_path / "hf")
    state = titan_state(name, theirs)
    # What torchtitan's trainer has next to the weights.
    state = (older(state) if is_older else state) | {"optimizer.state.norm.weight.step": torch.ones(())}
    save_titan(state, tmp_path / "titan")
    ckpt("convert", tmp_path / "titan", tmp_path / "out", "--to", "hf", "--config", tmp_path / "hf")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(theirs)
    assert [key for key in theirs if not same_elements(found[key], theirs[key])] == []


def test_titan_bias_of_balancing_stays_float32_in_a_bfloat16_model(tmp_path, ckpt):
    theirs = save_theirs("deepseek", tmp_path / "hf", dtype=torch.bfloat16)
    ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "titan", "--no-check-logits")
    found = loaded(tmp_path / "out")
    bias = found.pop("layers.1.moe.expert_bias_E")
    assert bias.dtype == torch.float32
    assert same_elements(bias, theirs["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert {tensor.dtype for key, tensor in found.items() if "expert_bias" not in key} == {torch.bfloat16}


def test_titan_input_without_balancing_has_a_bias_of_zeros(tmp_path, ckpt):
    state = titan_state("deepseek", save_theirs("deepseek", tmp_path / "hf"))
    save_titan({key: each for key, each in state.items() if "expert_bias" not in key}, tmp_path / "titan")
    ckpt("convert", tmp_path / "titan", tmp_path / "out", "--to", "hf", "--config", tmp_path / "hf")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert not found["model.layers.2.mlp.gate.e_score_correction_bias"].any()


@pytest.mark.parametrize("name", ["qwen3 experts", "gpt-oss", "deepseek v2"])
def test_titan_input_with_a_bias_that_the_model_lacks_is_refused(tmp_path, ckpt, name):
    state = titan_state(name, save_theirs(name, tmp_path / "hf"))
    state["layers.1.moe.expert_bias_E"][2] = 1e-3
    save_titan(state, tmp_path / "titan")
    more = ("--to", "native", "--config", tmp_path / "hf")
    result = ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, code=5)
    assert "layers.1.moe.expert_bias_E: is not zero" in result.stderr
    ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, "--drop", "*.expert_bias_E", "--no-check-logits")


def test_titan_input_with_prediction_layers_is_refused_with_a_remedy(tmp_path, ckpt):
    state = titan_state("deepseek", save_theirs("deepseek", tmp_path / "hf"))
    inner = {key: each for key, each in state.items() if key.startswith("layers.2.")}
    state |= {key.replace("layers.2.", "mtp_layers.0."): each for key, each in inner.items()}
    state |= {f"mtp_layers.0.{key}.weight": torch.ones(48) for key in ("enorm", "hnorm", "mtp_norm")}
    save_titan(state | {"mtp_layers.0.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "titan")
    more = ("--to", "native", "--config", tmp_path / "hf", "--no-check-logits")
    result = ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, code=5)
    assert "--drop 'mtp_layers.*'" in result.stderr
    ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, "--drop", "mtp_layers.*")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED = {
    "window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window"),
    "biases": ("qwen3", {"attention_bias": True}, "attention_bias"),
    "biases of a llama": ("llama", {"mlp_bias": True}, "mlp_bias"),
    "no biases": ("gpt-oss", {"attention_bias": False}, "attention_bias"),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary_scaling"),
    "llama 3's scaling": (
        "qwen3",
        {"rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "rotary_scaling",
    ),
    "yarn that scales": ("qwen3", {"rope_parameters": YARN}, "rotary_scaling"),
    "yarn, less than 1": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.0, "factor": 0.5}},
        "the factor 0.5",
    ),
    "yarn, one mscale": ("deepseek", {"rope_parameters": YARN | {"mscale": 1.0}}, "rotary_scaling"),
    "yarn, a factor": ("gpt-oss", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "rotary_scaling"),
    "halves": ("deepseek", {"rope_interleave": False}, "rotary_interleaved"),
    "groups by the best": (
        "deepseek v2",
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        "moe_router_num_groups",
    ),
}


@table("case", REFUSED)
def test_titan_refuses_by_name_what_torchtitan_does_not_compute(tmp_path, ckpt, case):
    name, changes, field = REFUSED[case]
    save_theirs(name, tmp_path / "hf", **changes)
    result = ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "titan", "--no-check-logits", code=5)
    assert field in result.stderr
    assert not (tmp_path / "out").exists()


@table("change", ["transposed", "missing", "unknown", "other model"])
@table("name", ["qwen3 experts", "deepseek", "gpt-oss"])
def test_titan_input_that_does_not_fit_is_refused(tmp_path, ckpt, name, change):
    state = titan_state(name, save_theirs(name, tmp_path / "hf"))
    stacked = next(key for key in state if "inner_experts" in key and state[key].ndim == 3)
    if change == "transposed":
        state[stacked] = state[stacked].transpose(1, 2)
    elif change == "missing":
        del state[stacked]
    elif change == "unknown":
        state["layers.0.moe.router.scale"] = torch.ones(1)
    else:
        save_theirs("llama", tmp_path / "hf")
    save_titan(state, tmp_path / "titan")
    ckpt("convert", tmp_path / "titan", tmp_path / "out", "--to", "native", "--config", tmp_path / "hf", code=5)


def test_titan_leaves_prediction_layers_out_and_counts_them(tmp_path, ckpt):
    theirs = save_theirs("deepseek", tmp_path / "hf")
    kind = "model.layers.3"
    further = {key.replace("layers.2", "layers.3"): each.clone() for key, each in theirs.items() if "layers.2." in key}
    further |= {f"{kind}.{key}.weight": torch.ones(48) for key in ("enorm", "hnorm", "shared_head.norm")}
    further |= {f"{kind}.eh_proj.weight": torch.ones(48, 96)}
    further |= {f"{kind}.embed_tokens.weight": theirs["model.embed_tokens.weight"].clone()}
    further |= {f"{kind}.shared_head.head.weight": theirs["lm_head.weight"].clone()}
    safetensors.save_file(theirs | further, tmp_path / "hf" / "model.safetensors")
    ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "titan", "--no-check-logits")
    assert set(loaded(tmp_path / "out")) == set(titan_state("deepseek", theirs))
    assert json.loads((tmp_path / "out" / "conversion.json").read_bytes())["decisions"]["prediction_tensors_left_out"]


def test_titan_input_with_a_tensor_under_two_names_is_refused(tmp_path, ckpt):
    state = titan_state("qwen3", save_theirs("qwen3", tmp_path / "hf"))
    save_titan(state | {"output.weight": state["lm_head.weight"] + 1}, tmp_path / "titan")
    more = ("--to", "native", "--config", tmp_path / "hf")
    result = ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, code=4)
    assert "lm_head.weight twice" in result.stderr


def test_titan_head_that_differs_from_the_embedding_is_not_tied(tmp_path, ckpt):
    """The configuration of a small Qwen3 ties the head; torchtitan may train it without."""
    state = titan_state("qwen3", save_theirs("qwen3", tmp_path / "hf"))
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save_titan(state, tmp_path / "titan")
    ckpt("convert", tmp_path / "titan", tmp_path / "out", "--to", "hf", "--config", tmp_path / "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["tie_word_embeddings"] is False
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert same_elements(found["lm_head.weight"], state["lm_head.weight"])


def test_titan_input_with_a_faulty_config_names_the_file_that_was_read(tmp_path, ckpt):
    state = titan_state("llama", save_theirs("llama", tmp_path / "hf"))
    save_titan(state, tmp_path / "titan")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": "small"}))
    more = ("--to", "native", "--config", tmp_path / "hf")
    result = ckpt("convert", tmp_path / "titan", tmp_path / "out", *more, code=4)
    assert str(path) in result.stderr
    assert str(tmp_path / "titan" / "config.json") not in result.stderr
