"""torchtitan's own training state: its models train, its manager saves and loads, and a further step is bit-identical.

PyTorch has no backward pass of flex attention on the CPU, so attention is computed in plain PyTorch here.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_mask

from tests.parity import test_ckpt_torchtitan as models
from tests.parity.test_ckpt_torchtitan import CASES, DIM, HEADS, IDS, INIT, TOKENS, convert, randomize, theirs, titan

checkpointer, pytestmark = models.checkpointer, models.pytestmark
if checkpointer is not None:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    ADAPTERS = {"Llama": Llama3StateDictAdapter, "GptOss": GptOssStateDictAdapter, "Qwen3": Qwen3StateDictAdapter}
    ADAPTERS |= {"Qwen3Moe": Qwen3StateDictAdapter} | dict.fromkeys(
        ("DeepseekV2", "DeepseekV3"), DeepSeekV3StateDictAdapter
    )

float32_on_the_cpu = models.float32_on_the_cpu
LR, STEPS = 1e-3, 3


@pytest.fixture(autouse=True)
def attention_with_gradients(float32_on_the_cpu, monkeypatch):
    def attend(q, k, v, *, block_mask, scale=None, **_):
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        scores = scores.masked_fill(~mask, float("-inf"))
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp() @ v, SimpleNamespace(lse=lse)

    monkeypatch.setattr(models.attention.FlexAttention, "compiled_flex_attn", staticmethod(attend), raising=False)


def titan_llama_fused():
    """A Llama with one matrix of queries, keys and values, as torchtitan's own configurations have it."""
    config = CASES["llama"][2]()
    sizes = {name: HEADS[name] for name in ("dim", "n_heads", "n_kv_heads", "head_dim")}
    for layer in config.layers:
        layer.attention = models.utils.make_gqa_config(
            **sizes,
            wqkv_param_init=INIT,
            wo_param_init=INIT,
            inner_attention=layer.attention.inner_attention,
            rope=layer.attention.rope,
            fuse_qkv=True,
        )
    return config


BUILDS = {name: (name, case[2]) for name, case in CASES.items()}
BUILDS["llama, fused"] = ("llama", titan_llama_fused)


class Data:
    """A data loader with a position, which is not converted."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Progress:
    """The state of torchtitan's trainer."""

    def __init__(self):
        self.step = self.tokens = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state):
        self.step, self.tokens = state["step"], state["ntokens_seen"]


class Run:
    """A model of torchtitan with its optimizers, its schedule and its checkpoint manager."""

    def __init__(self, build, folder, implementation, **options):
        self.model = titan(build).train()
        kwargs = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8}
        groups = [
            ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**kwargs, "weight_decay": weight_decay}
            )
            for pattern, weight_decay in ((r"norm", 0.0), (r".*", 0.1))
        ]
        config = OptimizersContainer.Config(param_groups=groups, implementation=implementation)
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.progress, self.data = Progress(), Data()
        self.manager = checkpointer.CheckpointManager(
            checkpointer.CheckpointManager.Config(
                enable=True, folder=str(folder), interval=STEPS, keep_latest_k=0, **options
            ),
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def train(self, steps):
        positions = torch.arange(TOKENS)[None]
        for _ in range(steps):
            masks = self.model.get_attention_masks(positions)
            logits = self.model(IDS, positions=positions, attention_masks=masks)[0]
            torch.nn.functional.cross_entropy(logits, IDS[0].roll(-1)).backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.progress.step += 1
            self.progress.tokens += TOKENS
            self.data.position += 1

    def weights(self):
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def adapted(kind, build, moments):
    """Moments by parameter under the names of transformers, by torchtitan's hooks of fused modules and its adapter."""
    model = titan(build)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(moments[name])
    state = {name: each for name, each in model.state_dict().items() if "expert_bias" not in name}
    found = ADAPTERS[kind](build(), None).to_hf(dict(state))
    if kind == "GptOss":
        # Its adapter leaves the experts out.
        for name, tensor in state.items():
            layer, _, inner = name.partition(".moe.routed_experts.inner_experts.")
            if inner:
                part = {"mlp1": "gate_up_proj", "mlp2": "down_proj"}[inner[:4]]
                suffix, content = ("_bias", tensor) if "bias" in inner else ("", tensor.transpose(1, 2))
                found[f"model.{layer}.mlp.experts.{part}{suffix}"] = content
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("name", BUILDS)
def test_torchtitan_state_is_read_and_written_bit_for_bit(tmp_path, name):
    case, build = BUILDS[name]
    kind, changes, _ = CASES[case]
    theirs(kind, changes, tmp_path / "like")
    implementation = "fused" if name == "qwen3" else "foreach" if name == "qwen3, yarn" else "for-loop"
    run = Run(build, tmp_path / "checkpoint", implementation)
    randomize(run.model.named_parameters())
    run.train(STEPS)
    assert run.manager.save(STEPS)
    more = ("--with-optimizer", "--no-check-logits")
    source = tmp_path / "checkpoint" / f"step-{STEPS}"
    convert(source, tmp_path / "native", "--to", "native", "--config", tmp_path / "like", *more)
    found = load_file(tmp_path / "native" / "optimizer-p000-t00.safetensors")
    flat, expected = run.optimizers.state_dict(), {}
    for moment in ("exp_avg", "exp_avg_sq"):
        own = {key: flat[f"state.{key}.{moment}"] for key in run.weights()}
        folder = tmp_path / moment
        folder.mkdir()
        (folder / "config.json").write_bytes((tmp_path / "like" / "config.json").read_bytes())
        tensors = adapted(kind, build, own)
        if kind == "DeepseekV3":
            # A buffer, of which there is no moment.
            like = load_file(tmp_path / "like" / "model.safetensors")
            tensors |= {key: each for key, each in like.items() if "e_score_correction_bias" in key}
        if changes.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors")
        convert(folder, tmp_path / f"{moment}-native", "--to", "native", "--no-check-logits")
        stored = load_file(tmp_path / f"{moment}-native" / "model-p000-t00.safetensors")
        expected |= {f"{key}.{moment}": each for key, each in stored.items() if "expert_bias" not in key}
    assert found.keys() == expected.keys()
    assert [key for key, each in expected.items() if not torch.equal(found[key], each)] == []
    document = json.loads((tmp_path / "native" / "manifest.json").read_bytes())
    assert set(document["optimizer"]["steps"].values()) == {STEPS}
    recorded = document["x_torchtitan"]
    assert (document["step"], recorded["ntokens_seen"], recorded["last_epoch"]) == (STEPS, STEPS * TOKENS, STEPS)
    assert (recorded["initial_lr"], recorded["implementation"]) == (LR, implementation)
    assert recorded["lr"] == run.optimizers.optimizers[0].param_groups[0]["lr"]

    convert(tmp_path / "native", tmp_path / "back", "--to", "titan", *more)
    options = {"initial_load_path": str(tmp_path / "back"), "initial_load_model_only": False}
    other = Run(build, tmp_path / "resumed", implementation, exclude_from_loading=["dataloader"], **options)
    assert other.manager.load()
    assert other.progress.state_dict() == run.progress.state_dict()
    loaded = other.optimizers.state_dict()
    assert loaded.keys() == flat.keys()
    unlike = [key for key, each in flat.items() if not torch.equal(torch.as_tensor(each), torch.as_tensor(loaded[key]))]
    assert unlike == []
    for each in (run, other):
        each.train(2)
    ours, own = other.weights(), run.weights()
    assert [key for key, each in own.items() if not torch.equal(ours[key], each)] == []
    assert own["norm.weight"].shape == (DIM,)
