"""Exported adapters of models whose modules have several projections: PEFT's logits on the same weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from dynmo_train._common.errors import UsageError
from dynmo_train.models.families.gpt import Gpt
from dynmo_train.models.families.llama import Llama
from dynmo_train.models.lora import LoraFamily, LoraSettings, is_adapter, merge_adapters
from dynmo_train.trainer.checkpoint.export_adapter import ADAPTER_NAME
from dynmo_train.trainer.checkpoint.peft_layout import layout_of, peft_config, peft_tensors
from tests.parity.item_stream import build_all, parameters, run
from tests.parity.test_decoder_shapes import LLAMA, SHAPES, hugging_face, models_of, renamed
from tests.parity.test_gpt2 import SHAPE as GPT2
from tests.parity.test_gpt2 import models_of_gpt2, regrouped

TARGETS = {
    "GPT-2": [("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "down_proj"), ("q_proj", "v_proj"), ("v_proj", "fc1")],
    "Phi3": [
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("k_proj", "up_proj"),
        ("o_proj", "gate_proj"),
    ],
}


def adapted(family, base, targets):
    """Items with the weights of ``base`` and random adapters."""
    wrapped = LoraFamily(family, LoraSettings(rank=3, alpha=5.0, targets=targets), seed=4)
    modules = build_all(wrapped)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for item, module in modules.items():
            module.load_state_dict(base[item].state_dict(), strict=False)
        for name, value in parameters(modules).items():
            if ".lora_B." in name:
                value.copy_(torch.randn(value.shape, generator=numbers) * 0.2)
    return wrapped, modules


def write_adapter(folder, family, modules):
    layout = layout_of(family.manifest(), None)
    adapters: dict[int, dict] = {}
    for name, value in parameters(modules).items():
        if is_adapter(name):
            found = ADAPTER_NAME.fullmatch(name)
            layer = adapters.setdefault(int(found["layer"]), {})
            layer.setdefault(found["projection"], {})[found["side"]] = value.detach()
    tensors = {}
    for layer, own in adapters.items():
        tensors |= peft_tensors(layout, family.settings, layer, own)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(layout, family.settings, None)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "targets"), [(name, each) for name, some in TARGETS.items() for each in some])
def test_exported_adapter_of_joined_modules_has_the_logits_of_peft(tmp_path, name, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed (an optional peer)")
    if name == "GPT-2":
        shape, family = GPT2, Gpt(GPT2)
        base, theirs = models_of_gpt2()
    else:
        shape = SHAPES[name]
        family, base, theirs = models_of(name)
    wrapped, modules = adapted(family, base, targets)
    tensors = write_adapter(tmp_path, wrapped, modules)
    ids = torch.randint(0, shape.vocab_size, (2, 13), generator=torch.Generator().manual_seed(3))
    found = run(wrapped, modules, {"ids": ids[:, :-1], "labels": ids[:, 1:]})
    logits = modules["head"].logits(found["before.hidden"])
    theirs = theirs.eval()
    plain = theirs(input_ids=ids[:, :-1]).logits
    loaded = peft.PeftModel.from_pretrained(theirs, str(tmp_path)).eval()
    expected = loaded(input_ids=ids[:, :-1]).logits
    assert not torch.allclose(plain, expected, atol=1e-2)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    # All tensors of the file are parameters of PEFT's model, and all of its adapters are in the file.
    own = {each.replace(".default", "") for each, _ in loaded.named_parameters() if "lora_" in each}
    assert own == set(tensors)


def changes_of_merged_weights(name, base, modules):
    """What merging adds to each weight, by the names and rows of transformers' modules."""
    before = {key: value.detach().clone() for key, value in parameters(base).items()}
    for module in modules.values():
        merge_adapters(module)
    change = {key: value.detach() - before[key] for key, value in parameters(modules).items()}
    if name != "GPT-2":
        shape = SHAPES[name]
        found = renamed(change, shape, dict(hugging_face(name, shape).named_parameters()))
        return {key.removesuffix(".weight"): value for key, value in found.items() if ".layers." in key}
    names = {"attention.dense": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    found = {}
    for layer in range(GPT2.num_layers):
        mine, theirs = f"layers.{layer}.", f"transformer.h.{layer}."
        found[f"{theirs}attn.c_attn"] = regrouped(change[f"{mine}attention.qkv.weight"])
        found |= {theirs + their: change[f"{mine}{our}.weight"] for our, their in names.items()}
    return found


@pytest.mark.parametrize(("name", "targets"), [(name, each) for name, some in TARGETS.items() for each in some])
def test_products_of_an_exported_adapter_are_the_changes_of_merged_weights(tmp_path, name, targets):
    family, base = (Gpt(GPT2), models_of_gpt2()[0]) if name == "GPT-2" else models_of(name)[:2]
    wrapped, modules = adapted(family, base, targets)
    tensors = write_adapter(tmp_path, wrapped, modules)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    changes = changes_of_merged_weights(name, base, modules)
    for module, change in changes.items():
        path = f"base_model.model.{module}"
        if f"{path}.lora_A.weight" not in tensors:
            assert not change.any()
            continue
        a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
        key = next(each for each in config["target_modules"] if module.endswith(f".{each}"))
        assert len(a) == config["rank_pattern"].get(key, config["r"])
        scale = config["alpha_pattern"].get(key, config["lora_alpha"]) / len(a)
        torch.testing.assert_close(scale * b @ a, change, rtol=0, atol=1e-5)
        assert change.any()


def test_layout_follows_the_architecture_of_the_export():
    llama, gpt = Llama(LLAMA).manifest(), Gpt(GPT2).manifest()
    assert "self_attn.q_proj" in layout_of(llama, None).modules
    assert "attn.c_attn" in layout_of(gpt, None).modules
    phi3 = {"config": {"model_type": "phi3"}}
    assert "self_attn.qkv_proj" in layout_of(llama, phi3).modules
    assert "self_attn.qkv_proj" in layout_of(Llama(SHAPES["Phi3"]).manifest(), None).modules
    with pytest.raises(UsageError, match="not gated"):
        layout_of(llama | {"activation": "gelu"}, None)
    with pytest.raises(UsageError, match="not gated"):
        layout_of(gpt | {"position_embedding": "rotary"}, None)
