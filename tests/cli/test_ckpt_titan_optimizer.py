"""Adam's state in torchtitan's checkpoints: AdamW and the flat names are torch's, the layouts facts of torchtitan.

``tests/parity/test_ckpt_torchtitan_optimizer.py`` has torchtitan's own models and optimizers, where it is installed.
"""

import json

import pytest

from tests.levels import complete_but
from tests.unit.dynmo_ckpt import titan_facts as facts
from tests.unit.dynmo_ckpt.titan_facts import MODELS, save_theirs, titan_state

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
PROGRESS = {"lr_scheduler": {"last_epoch": 7}, "train_state": {"step": 7, "ntokens_seen": 1234}}
FORMS = {"separate": lambda state: state, "fused": facts.fused, "0.2": facts.older}


def save(folder, weights, flat, **more):
    content = {name: tensor.contiguous() for name, tensor in weights.items()}
    dcp.save({**content, "optimizer": flat, **PROGRESS, **more}, checkpoint_id=folder, no_dist=True)


def native_tensors(folder, kind="model"):
    return safetensors.load_file(folder / f"{kind}-p000-t00.safetensors")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_bytes())


class Case:
    """A model with random weights and moments, under the names of transformers and of torchtitan."""

    def __init__(self, name, folder, form="separate"):
        self.theirs = save_theirs(name, folder / "hf")
        self.moments = {"exp_avg": facts.moments_of(self.theirs, 1), "exp_avg_sq": facts.moments_of(self.theirs, 2)}
        self.weights = titan_state(name, self.theirs)
        first, second = (titan_state(name, each) for each in self.moments.values())
        parts = [FORMS[form](facts.parameters_of(name, each)) for each in (self.weights, first, second)]
        self.parts = [{key: each.contiguous() for key, each in part.items()} for part in parts]
        # Hooks of fused modules keep the names of separate ones in the state dict of the weights.
        self.stored = facts.older(self.weights) if form == "0.2" else self.weights

    def flat(self, **changes):
        return facts.flat_state(*facts.trained(*self.parts, **changes))


@pytest.fixture
def llama(tmp_path):
    return Case("llama", tmp_path)


def to_native(ckpt, tmp_path, *more, code=0):
    config = ("--config", tmp_path / "hf", "--no-check-logits")
    return ckpt("convert", tmp_path / "titan", tmp_path / "native", "--to", "native", *config, *more, code=code)


@pytest.mark.parametrize("form", complete_but(FORMS, "fused"))
@pytest.mark.parametrize("name", complete_but(MODELS, "llama"))
def test_titan_moments_have_the_rows_of_their_weights(tmp_path, ckpt, name, form):
    """The same numbers as weights of transformers, through another reader, give the same tensors."""
    case = Case(name, tmp_path, form)
    save(tmp_path / "titan", case.stored, case.flat())
    to_native(ckpt, tmp_path, "--with-optimizer")
    found = native_tensors(tmp_path / "native", "optimizer")
    expected = {}
    for kind, tensors in case.moments.items():
        safetensors.save_file(tensors, tmp_path / "hf" / "model.safetensors")
        ckpt("convert", tmp_path / "hf", tmp_path / kind, "--to", "native", "--no-check-logits")
        own = native_tensors(tmp_path / kind)
        expected |= {f"{key}.{kind}": each for key, each in own.items() if "expert_bias" not in key}
    assert found.keys() == expected.keys()
    assert [key for key, each in expected.items() if not torch.equal(each, found[key])] == []


@pytest.mark.complete
@pytest.mark.parametrize("form", ["separate", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_titan_state_that_is_written_continues_bit_for_bit(tmp_path, ckpt, name, form):
    """Into another AdamW, with other moments and settings: a further step gives the weights of the original."""
    case = Case(name, tmp_path, form)
    model, optimizer = facts.trained(*case.parts)
    save(tmp_path / "titan", case.stored, facts.flat_state(model, optimizer))
    to_native(ckpt, tmp_path, "--with-optimizer")
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan", "--with-optimizer", "--no-check-logits")
    ones = {key: torch.ones_like(each) for key, each in case.parts[0].items()}
    other, resumed = facts.trained(case.parts[0], ones, ones, lr=9.0, betas=(0.1, 0.2), eps=1.0, weight_decay=0.7)
    state = {"optimizer": facts.flat_state(other, resumed), "train_state": {"step": 0, "ntokens_seen": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["train_state"] == PROGRESS["train_state"]
    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.state_dict.set_optimizer_state_dict(other, resumed, state["optimizer"], options=options)
    for module, each in ((model, optimizer), (other, resumed)):
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * number)
        each.step()
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    assert [key for (key, one), (_, two) in pairs if not torch.equal(one, two)] == []


@pytest.mark.complete
def test_titan_progress_and_settings_are_in_the_manifest(tmp_path, ckpt, llama):
    save(tmp_path / "titan", llama.weights, llama.flat(fused=True))
    to_native(ckpt, tmp_path, "--with-optimizer")
    found = manifest_of(tmp_path / "native")
    assert found["step"] == 7
    assert found["x_adam"] == {"beta1": 0.8, "beta2": 0.95, "eps": 1e-7}
    progress = {"lr": 2e-3, "implementation": "fused", "ntokens_seen": 1234, "last_epoch": 7}
    assert found["x_torchtitan"] == progress
    assert {group["weight_decay"] for group in found["optimizer"]["groups"]} == {0.1}
    assert set(found["optimizer"]["steps"].values()) == {7}


@pytest.mark.complete
def test_titan_groups_and_steps_are_by_parameter(tmp_path, ckpt, llama):
    """Norms without decay; a layer that was frozen for a while has done fewer steps."""
    flat = llama.flat()
    for key in flat:
        if "norm" in key and key.endswith(".weight_decay"):
            flat[key] = 0.0
        if key.startswith("state.layers.1.") and key.endswith(".step"):
            flat[key] = torch.tensor(3.0)
    save(tmp_path / "titan", llama.weights, flat)
    to_native(ckpt, tmp_path, "--with-optimizer")
    found = manifest_of(tmp_path / "native")["optimizer"]
    names = {group["name"]: group["parameters"] for group in found["groups"]}
    assert names["no_decay"] == [name for name in found["steps"] if "norm" in name]
    assert {step for name, step in found["steps"].items() if name.startswith("layers.1.")} == {3}
    assert {step for name, step in found["steps"].items() if not name.startswith("layers.1.")} == {7}
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan", "--with-optimizer", "--no-check-logits")
    state = {"optimizer": facts.flat_state(*facts.trained(*llama.parts))}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert {key: float(state["optimizer"][key]) for key in flat if key.endswith((".step", ".weight_decay"))} == {
        key: float(each) for key, each in flat.items() if key.endswith((".step", ".weight_decay"))
    }


@pytest.mark.complete
@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7), torch.tensor([7], dtype=torch.int32)], ids=str)
def test_titan_step_is_a_number_or_a_tensor(tmp_path, ckpt, llama, step):
    flat = {key: step if key.endswith(".step") else each for key, each in llama.flat().items()}
    flat |= {key: torch.tensor(0.5) for key in flat if key.endswith(".lr")}
    save(tmp_path / "titan", llama.weights, flat, train_state={"step": torch.tensor(9, dtype=torch.int32)})
    to_native(ckpt, tmp_path, "--with-optimizer")
    found = manifest_of(tmp_path / "native")
    assert set(found["optimizer"]["steps"].values()) == {7}
    assert (found["step"], found["x_torchtitan"]["lr"]) == (9, 0.5)


@pytest.mark.complete
def test_titan_bfloat16_moments_stay_bfloat16(tmp_path, ckpt, llama):
    """torchtitan's ``fused_opt_states_bf16``."""
    flat = {key: each.bfloat16() if ".exp_avg" in key else each for key, each in llama.flat().items()}
    save(tmp_path / "titan", llama.weights, flat)
    to_native(ckpt, tmp_path, "--with-optimizer")
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan", "--with-optimizer", "--no-check-logits")
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    state = {key: torch.zeros_like(each) for key, each in flat.items() if ".exp_avg" in key}
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [key for key in state if not torch.equal(state[key], flat[key])] == []
    assert metadata["optimizer.state.norm.weight.exp_avg"].properties.dtype == torch.bfloat16


def changed(key, value):
    def change(flat):
        flat[key] = value(flat[key]) if callable(value) else value

    return change


def removed(*parts):
    def change(flat):
        for key in [key for key in flat if all(part in key for part in parts)]:
            del flat[key]

    return change


NORM, QUERIES = "norm.weight", "layers.1.attention.qkv_linear.wq.weight"
HOSTILE = {
    "a moment is missing": (removed(f"state.{QUERIES}.exp_avg_sq"), 5, f"have no exp_avg_sq: {QUERIES}"),
    "a parameter without state": (removed(f"state.{NORM}."), 5, f"have no exp_avg: {NORM}"),
    "no step": (removed(f"state.{NORM}.step"), 5, f"records no step of {NORM}"),
    "no settings": (removed("param_groups."), 5, "records no lr of"),
    "no weight decay": (removed(f"groups.{NORM}.weight_decay"), 5, f"records no weight_decay of {NORM}"),
    "transposed": (changed(f"state.{QUERIES}.exp_avg", lambda t: t.T.contiguous()), 5, "wq.weight"),
    "another shape": (changed(f"state.{NORM}.exp_avg", torch.ones(47)), 5, NORM),
    "half": (changed(f"state.{NORM}.exp_avg", lambda t: t.half()), 5, f"exp_avg of {NORM}: F16"),
    "a moment that is a number": (changed(f"state.{NORM}.exp_avg", 0.5), 4, "must be tensors"),
    "parts with other steps": (changed(f"state.{QUERIES}.step", torch.tensor(6.0)), 4, "differ in step"),
    "a broken step": (changed(f"state.{NORM}.step", torch.tensor(6.5)), 4, "must be a number of steps"),
    "a step without a value": (changed(f"state.{NORM}.step", torch.tensor(float("nan"))), 4, "number of steps"),
    "a step of two numbers": (changed(f"state.{NORM}.step", torch.ones(2)), 4, "number of steps"),
    "parts with other decays": (changed(f"param_groups.{QUERIES}.weight_decay", 0.5), 4, "differ in weight_decay"),
    "two learning rates": (changed(f"param_groups.{NORM}.lr", 0.5), 5, "parameters differ in lr"),
    "two betas": (changed(f"param_groups.{NORM}.betas", (0.5, 0.5)), 5, "parameters differ in betas"),
    "betas that are none": (changed(f"param_groups.{NORM}.betas", (0.5, "x")), 5, f"{NORM}.betas is"),
    "amsgrad": (changed(f"param_groups.{NORM}.amsgrad", True), 5, f"{NORM}.amsgrad is true"),
    "maximize": (changed(f"param_groups.{NORM}.maximize", True), 5, f"{NORM}.maximize is true"),
    "adam": (changed(f"param_groups.{NORM}.decoupled_weight_decay", False), 5, "AdamW is supported"),
    "muon": (changed(f"state.{NORM}.momentum_buffer", torch.ones(48)), 5, "momentum_buffer, which AdamW has not"),
    "unknown": (changed("state.layers.9.norm.weight.exp_avg", torch.ones(48)), 5, "layers.9.norm.weight"),
}


@pytest.mark.parametrize("case", complete_but(HOSTILE, "parts with other steps", *list(HOSTILE)[:3]))
def test_titan_state_that_does_not_fit_is_refused_by_name(tmp_path, ckpt, llama, case):
    change, code, message = HOSTILE[case]
    flat = llama.flat()
    change(flat)
    save(tmp_path / "titan", llama.weights, flat)
    result = to_native(ckpt, tmp_path, "--with-optimizer", code=code)
    assert message in result.stderr
    assert not (tmp_path / "native").exists()
    to_native(ckpt, tmp_path, "--no-optimizer")


@pytest.mark.complete
@pytest.mark.parametrize("kind", ["another shape", "both, and they differ"])
def test_titan_fused_moments_that_do_not_fit_are_refused(tmp_path, ckpt, kind):
    case = Case("llama", tmp_path, "fused")
    flat, name = case.flat(), "layers.1.attention.qkv_linear.wqkv.weight"
    if kind == "another shape":
        flat[f"state.{name}.exp_avg"] = flat[f"state.{name}.exp_avg"][16:].clone()
        code, message = 5, f"{name} has the shape [144, 48]"
    else:
        flat[f"state.{QUERIES}.exp_avg"] = torch.ones(96, 48)
        code, message = 4, f"the moments of {QUERIES}, separate and fused, differ"
    save(tmp_path / "titan", case.weights, flat)
    assert message in to_native(ckpt, tmp_path, "--with-optimizer", code=code).stderr


@pytest.mark.complete
def test_titan_gate_and_up_of_a_fused_mlp_are_split(tmp_path, ckpt):
    """torchtitan's override ``fused_swiglu``: ``[hidden, 2, width]``, and ``[experts, hidden, 2, width]``."""
    case = Case("qwen3 experts", tmp_path)
    flat = case.flat()
    save(tmp_path / "titan", case.weights, flat)
    to_native(ckpt, tmp_path, "--with-optimizer")
    expected = native_tensors(tmp_path / "native", "optimizer")
    joined = dict(flat)
    pairs = [("layers.0.feed_forward", "w1.weight", "w3.weight", 1)]
    pairs += [(f"layers.{i}.moe.routed_experts.inner_experts", "w1_EFD", "w3_EFD", 2) for i in (1, 2)]
    for module, gate, up, dim in pairs:
        for kind in ("state", "param_groups"):
            for key in [key for key in joined if key.startswith(f"{kind}.{module}.{gate}.")]:
                value, other = joined.pop(key), joined.pop(key.replace(gate, up))
                is_moment = ".exp_avg" in key
                joined[key.replace(gate, "w13")] = torch.stack([value, other], dim) if is_moment else value
    save(tmp_path / "joined", case.weights, joined)
    more = ("--to", "native", "--with-optimizer", "--config", tmp_path / "hf", "--no-check-logits")
    ckpt("convert", tmp_path / "joined", tmp_path / "other", *more)
    found = native_tensors(tmp_path / "other", "optimizer")
    assert found.keys() == expected.keys()
    assert [key for key, each in expected.items() if not torch.equal(each, found[key])] == []


@pytest.mark.complete
@pytest.mark.parametrize("has_moments", [False, True], ids=["once", "twice"])
def test_titan_tied_head_has_the_moments_of_the_embedding(tmp_path, ckpt, has_moments):
    case = Case("qwen3", tmp_path)
    flat = case.flat()
    if has_moments:
        flat["state.lm_head.weight.exp_avg"] = flat["state.tok_embeddings.weight.exp_avg"] + 1
    save(tmp_path / "titan", case.weights, flat)
    result = to_native(ckpt, tmp_path, "--with-optimizer", code=4 if has_moments else 0)
    if has_moments:
        assert "exp_avg of lm_head.weight and tok_embeddings.weight differ" in result.stderr
        return
    ckpt("convert", tmp_path / "native", tmp_path / "out", "--to", "titan", "--with-optimizer", "--no-check-logits")
    names = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert [name for name in names if "lm_head" in name] == ["lm_head.weight"]


@pytest.mark.complete
def test_titan_names_of_wrappers_are_removed_from_the_state(tmp_path, ckpt, llama):
    flat = {
        key.replace("layers.1.", "layers.1._checkpoint_wrapped_module."): each for key, each in llama.flat().items()
    }
    save(tmp_path / "titan", llama.weights, flat)
    to_native(ckpt, tmp_path, "--with-optimizer")


@pytest.mark.complete
def test_titan_without_state_is_refused_or_converted_without(tmp_path, ckpt, llama):
    dcp.save({key: each.contiguous() for key, each in llama.weights.items()}, checkpoint_id=tmp_path / "titan")
    result = to_native(ckpt, tmp_path, "--with-optimizer", code=5)
    assert "has no optimizer state; convert the weights alone with --no-optimizer" in result.stderr
    to_native(ckpt, tmp_path, "--with-optimizer-if-present")
    more = ("--to", "titan", "--no-check-logits")
    result = ckpt("convert", tmp_path / "native", tmp_path / "out", *more, "--with-optimizer", code=5)
    assert "has no optimizer state; use --no-optimizer" in result.stderr


@pytest.mark.complete
def test_titan_state_needs_the_type_of_its_masters(tmp_path, ckpt, llama):
    save(tmp_path / "titan", llama.weights, llama.flat())
    to_native(ckpt, tmp_path, "--with-optimizer")
    more = ("--to", "titan", "--no-check-logits", "--dtype", "bf16")
    result = ckpt("convert", tmp_path / "native", tmp_path / "out", *more, "--with-optimizer", code=2)
    assert "--dtype must keep their type, F32" in result.stderr
    ckpt("convert", tmp_path / "native", tmp_path / "out", *more)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["llama", "qwen3 experts", "gpt-oss"])
def test_titan_large_tensors_are_written_in_chunks(tmp_path, ckpt, monkeypatch, name):
    """A storage of the zip format has at most 4 GiB: less than the experts of a large model, and their moments."""
    case = Case(name, tmp_path)
    flat = case.flat()
    save(tmp_path / "titan", case.weights, flat)
    to_native(ckpt, tmp_path, "--with-optimizer")
    more = ("--to", "titan", "--with-optimizer", "--no-check-logits")
    monkeypatch.setattr("dynmo_ckpt.torch_save.distributed.MAX_CHUNK_BYTES", 2000)
    ckpt("convert", tmp_path / "native", tmp_path / "out", *more)
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert len(metadata["tok_embeddings.weight"].chunks) == 7  # 10 of 61 rows each have 1,920 bytes
    expected = {"optimizer": {key: each for key, each in flat.items() if ".exp_avg" in key}, **case.weights}
    state = {"optimizer": {key: torch.zeros_like(each) for key, each in expected["optimizer"].items()}}
    state |= {key: torch.zeros_like(each, memory_format=torch.contiguous_format) for key, each in case.weights.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [key for key, each in expected["optimizer"].items() if not torch.equal(state["optimizer"][key], each)] == []
    assert [key for key, each in case.weights.items() if not torch.equal(state[key], each)] == []
    more = ("--to", "native", "--with-optimizer", "--no-check-logits")
    ckpt("convert", tmp_path / "out", tmp_path / "back", *more)
    for kind in ("model", "optimizer"):
        written, back = (native_tensors(tmp_path / folder, kind) for folder in ("native", "back"))
        assert [key for key, each in written.items() if not torch.equal(back[key], each)] == []


@pytest.mark.complete
@pytest.mark.parametrize("form", ["legacy", "dcp", "deepspeed"])
def test_titan_state_passes_to_formats_of_megatron(tmp_path, ckpt, llama, form):
    save(tmp_path / "titan", llama.weights, llama.flat())
    to_native(ckpt, tmp_path, "--with-optimizer")
    expected = native_tensors(tmp_path / "native", "optimizer")
    more = ("--with-optimizer", "--no-check-logits")
    ckpt("convert", tmp_path / "titan", tmp_path / "out", "--to", form, "--config", tmp_path / "hf", *more)
    ckpt("convert", tmp_path / "out", tmp_path / "back", "--to", "native", *more)
    found = native_tensors(tmp_path / "back", "optimizer")
    assert found.keys() == expected.keys()
    assert [key for key, each in expected.items() if not torch.equal(each, found[key])] == []
    assert set(manifest_of(tmp_path / "back")["optimizer"]["steps"].values()) == {7}
    assert manifest_of(tmp_path / "back")["x_adam"] == {"beta1": 0.8, "beta2": 0.95, "eps": 1e-7}
