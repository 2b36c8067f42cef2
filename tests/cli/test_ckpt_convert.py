"""dynmo-ckpt between formats, split, reshard and diff, from the outside."""

import itertools
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from dynmo_ckpt.cli import main

build = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ckpt" / "build.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line in this process as the console script does; checks its exit code."""

    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done.out + done.err
        return SimpleNamespace(stdout=done.out, stderr=done.err)

    return call


@pytest.fixture
def native(tmp_path):
    """A native checkpoint on two stages and two tensor ranks; its directory, model and parameters."""
    m = build["model"]()
    p = build["parameters"](m)
    # Rows of padding are zero in what is written, as in no checkpoint of ours.
    p["embedding.word.weight"][m["vocab_size"] :] = 0
    build["save"](tmp_path / "native", p | build["optimizer_state"](p), m, tp=2)
    return tmp_path / "native", m, p


def test_to_hf_and_back(run, native, tmp_path):
    directory, m, p = native
    run("convert", directory, tmp_path / "hf", "--to", "hf", "--max-shard-size", "10KB")
    run("convert", tmp_path / "hf", tmp_path / "back", "--to", "native", "--make-vocab-size-divisible-by", 16)
    manifest = json.loads((tmp_path / "back" / "manifest.json").read_text())
    assert manifest["model"] == m
    back = load_file(tmp_path / "back" / "model-p000-t00.safetensors")
    expected = build["true_rows"](m["vocab_size"], p)
    assert back.keys() == expected.keys()
    assert all(np.array_equal(back[name], value) for name, value in expected.items())
    run("convert", tmp_path / "back", tmp_path / "hf2", "--to", "hf", "--max-shard-size", "10KB")
    first = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir() if path.name != "conversion.json"}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "hf2").iterdir() if path.name in first}
    assert "no tensor differs" in run("diff", directory, tmp_path / "hf").stdout
    assert "ok" in run("verify", tmp_path / "back", "--against", directory).stdout


def test_hf_to_hf(run, native, tmp_path):
    directory, _, _ = native
    run("convert", directory, tmp_path / "a", "--to", "hf")
    run("convert", tmp_path / "a", tmp_path / "b", "--to", "hf", "--from", "hf")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model_type": "qwen2"}, 5, "model_type 'qwen2': known are gpt2"),
        ({"scale_attn_by_inverse_layer_idx": True}, 5, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "swish"}, 5, "'swish'"),
        ({"n_head": 0}, 4, "n_head must be an integer"),
        ({"n_layer": 4}, 5, "the input lacks 12 tensors"),
        ({"n_embd": 32}, 5, "the shape is"),
        ({"vocab_size": "many"}, 4, "vocab_size must be an integer"),
        ({"n_inner": -1}, 4, "impossible sizes"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(run, native, tmp_path, change, code, message):
    directory, _, _ = native
    run("convert", directory, tmp_path / "hf", "--to", "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in run("convert", tmp_path / "hf", tmp_path / "out", "--to", "native", code=code).stderr
    assert not (tmp_path / "out").exists()


def test_an_index_that_leads_outside_is_refused(run, native, tmp_path):
    directory, _, _ = native
    run("convert", directory, tmp_path / "hf", "--to", "hf")
    index = {"weight_map": {"x": "../native/model-p000-t00.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in run("convert", tmp_path / "hf", tmp_path / "out", "--to", "native", code=4).stderr


def test_split_and_reshard(run, native, tmp_path):
    directory, _, p = native
    run("split", directory, tmp_path / "s", "--tp", 4, "--pp", 3, "--partition", "0,2,1")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["topology"]["partition"] == [["embedding"], ["layers.0", "layers.1"], ["layers.2", "head"]]
    assert manifest["topology"]["world_size"] == 12
    assert "ok" in run("verify", tmp_path / "s").stdout
    assert "no tensor differs" in run("diff", directory, tmp_path / "s", "--with-optimizer").stdout
    run("reshard", tmp_path / "s", tmp_path / "r", "--pp", 2, "--dp", 2, "--no-optimizer")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["topology"]["data_parallel_size"] == 2
    assert not list((tmp_path / "r").glob("optimizer*"))
    found = json.loads(run("diff", directory, tmp_path / "r", "--with-optimizer", "--format", "json", code=1).stdout)
    assert {each["kind"] for each in found["differences"]} == {"only-left"}
    assert len(found["differences"]) == 2 * len(p)


def test_megatrons_names_of_the_sizes(run, native, tmp_path):
    directory, _, _ = native
    run("split", directory, tmp_path / "s", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    assert len(list((tmp_path / "s").glob("model-*"))) == 4


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tp", 3], 5, "num_attention_heads 4 cannot be cut into 3"),
        (["--pp", 2, "--partition", "1,1"], 2, "must add up to the model's 3 layers"),
        (["--pp", 2, "--partition", "3"], 2, "must be 2 numbers"),
        (["--pp", 2, "--partition", "4,-1"], 2, "must be 2 numbers"),
        (["--tp", 0], 2, ""),
    ],
)
def test_topologies_that_cannot_be(run, native, tmp_path, options, code, message):
    assert message in run("reshard", native[0], tmp_path / "out", *options, code=code).stderr
    assert not (tmp_path / "out").exists()


def test_diff_and_verify_against_tell_what_differs(run, native, tmp_path):
    directory, m, p = native
    q = {name: value.copy() for name, value in p.items()}
    q["layers.1.attention.qkv.bias"][4] += 0.25
    build["save"](tmp_path / "other", q, m)
    text = run("diff", directory, tmp_path / "other", code=1).stdout
    assert "layers.1.attention.qkv.bias: 1 of 48 elements differ by more than 0, at most by 0.25" in text
    assert "1 tensors differ" in text
    assert "qkv.bias" in run("verify", directory, "--against", tmp_path / "other", code=1).stdout
    assert "no tensor differs" in run("diff", directory, tmp_path / "other", "--atol", 0.3).stdout


def test_an_input_of_no_known_format(run, tmp_path):
    assert "no checkpoint here" in run("convert", tmp_path, tmp_path / "o", "--to", "native", code=4).stderr
    assert (
        "--step"
        in run("convert", tmp_path, tmp_path / "o", "--to", "native", "--from", "hf", "--step", 1, code=2).stderr
    )


@pytest.fixture
def legacy_save(monkeypatch):
    """The writer of legacy checkpoints, with a module under Megatron's name for the enumeration that it pickles."""
    legacy = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ckpt" / "legacy_build.py"))
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = legacy["ModelType"]
    return legacy["save"]


def test_legacy_versions_give_the_bytes_of_the_native_export(run, native, legacy_save, tmp_path):
    directory, m, p = native
    run("convert", directory, tmp_path / "expected", "--to", "hf")
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    for version in (0, 1.0, 2.0, 3.0):
        for tp, stages in ((1, None), (2, [1, 2]), (4, [2, 0, 1])):
            name = f"v{version}-{tp}"
            legacy_save(tmp_path / name, p, m, version=version, tp=tp, stages=stages)
            run("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
            assert (tmp_path / f"{name}-hf" / "model.safetensors").read_bytes() == expected
            assert "no tensor differs" in run("diff", tmp_path / name, directory).stdout


def test_a_look_loads_neither_torch_nor_numpy(native, legacy_save, tmp_path):
    """``info`` answers at once: what computes is imported where bytes are read."""
    directory, m, p = native
    legacy_save(tmp_path / "megatron", p, m, tp=2, stages=[2, 1])
    program = "import sys\nfrom dynmo_ckpt.cli import main\ntry:\n    main()\nexcept SystemExit as stop:\n"
    program += "    print(stop.code, [name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    for path in (directory, tmp_path / "megatron"):
        command = [sys.executable, "-c", program, "info", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] in ("0 []", "None []")


def test_legacy_to_native(run, native, legacy_save, tmp_path):
    directory, m, p = native
    legacy_save(tmp_path / "legacy", p, m, version=0, tp=2, stages=[1, 2])
    assert "300" in run("info", tmp_path / "legacy").stdout
    run("convert", tmp_path / "legacy", tmp_path / "out", "--to", "native")
    assert "ok" in run("verify", tmp_path / "out", "--against", directory).stdout
    back = load_file(tmp_path / "out" / "model-p000-t00.safetensors")
    assert all(np.array_equal(back[name], value) for name, value in build["true_rows"](m["vocab_size"], p).items())
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["step"] == 300


def test_checkpoint_of_gpt_neox_is_refused_by_name_with_the_remedy(run, tmp_path):
    import random

    import torch

    # As save_ds_checkpoint and DeepSpeed's pipeline write it: a file for each layer, one for each rank of the model.
    step = tmp_path / "neox" / "global_step8"
    step.mkdir(parents=True)
    (tmp_path / "neox" / "latest").write_text("global_step8")
    args = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": 128,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": 1,
    }
    states = {"module": None, "global_steps": 8, "iteration": 8, "args": args, "random_rng_state": random.getstate()}
    torch.save(states | {"torch_rng_state": torch.get_rng_state()}, step / "mp_rank_00_model_states.pt")
    torch.save({"word_embeddings.weight": torch.zeros(128, 8)}, step / "layer_00-model_00-model_states.pt")
    for command, *rest in (("info",), ("convert", tmp_path / "out", "--to", "hf")):
        refused = " ".join(run(command, tmp_path / "neox", *rest, code=5).stderr.split())
        assert "a checkpoint of GPT-NeoX" in refused
        assert "tools/ckpts/convert_neox_to_hf.py --architecture llama" in refused
    assert not (tmp_path / "out").exists()


def test_a_legacy_file_that_would_run_something_is_refused(run, native, legacy_save, tmp_path):
    import os

    import torch

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'marker'}",)

    _, m, p = native
    iteration = legacy_save(tmp_path / "legacy", p, m)
    torch.save({"model": {}, "args": Evil()}, iteration / "mp_rank_00" / "model_optim_rng.pt")
    done = run("convert", tmp_path / "legacy", tmp_path / "out", "--to", "hf", code=3)
    assert "system" in done.stderr
    assert "model_optim_rng.pt" in done.stderr
    assert not (tmp_path / "marker").exists()


def test_verify_of_other_formats(run, native, legacy_save, tmp_path):
    directory, m, p = native
    legacy_save(tmp_path / "megatron", p, m, tp=2, stages=[1, 2])
    for level in ("header", "replicas", "full"):
        assert f"ok ({level})" in run("verify", tmp_path / "megatron", "--level", level).stdout
    run("convert", directory, tmp_path / "hf", "--to", "hf")
    told = run("verify", tmp_path / "megatron", "--step", 300, "--against", tmp_path / "hf", "--format", "json")
    assert json.loads(told.stdout)["ok"] is True
    told = run("verify", tmp_path / "hf", "--hf-logits", tmp_path / "hf", "--format", "json")
    assert json.loads(told.stdout)["logits"]["max_abs"] <= 5e-6
    assert "40 of 40 arrays have no checksum to compare" in told.stderr
    # An altered byte of a matrix is found by the zip file's checksum, and by nothing else.
    path = tmp_path / "megatron" / "iter_0000300" / "mp_rank_01_001" / "model_optim_rng.pt"
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda entry: entry.file_size if "/data/" in entry.filename else 0)
    payload = bytearray(path.read_bytes())
    at = payload.index(info.filename.encode()) + len(info.filename) + info.file_size // 2 + 64
    payload[at] ^= 4
    path.write_bytes(payload)
    assert "ok" in run("verify", tmp_path / "megatron", "--level", "header").stdout
    assert f"{path}: {info.filename}: CRC-32 is" in run("verify", tmp_path / "megatron", code=1).stdout
    # Replicas that differ are found where replicas are looked at.
    other = {**p, "layers.0.attention.norm.weight": p["layers.0.attention.norm.weight"] + 1}
    legacy_save(tmp_path / "other", other, m, tp=2, stages=[1, 2])
    at = ("mp_rank_01_000", "iter_0000300")
    (tmp_path / "other" / at[1] / at[0] / path.name).replace(tmp_path / "megatron" / at[1] / at[0] / path.name)
    assert "ok" in run("verify", tmp_path / "megatron", "--level", "header").stdout
    found = run("verify", tmp_path / "megatron", "--level", "replicas", code=1).stdout
    assert "of tensor ranks 0 and 1 differ, where they must be equal" in found
    assert "known are native ones" in run("verify", tmp_path / "nothing", code=4).stderr


def test_a_plan_tells_the_memory_of_what_it_does(run, native, tmp_path):
    """Copies need small buffers whatever the model's size; what turns matrices around needs some matrices' worth."""
    sizes = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 4, "ffn_hidden_size": 2048}
    m = build["model"](**sizes)
    build["save"](tmp_path / "wide", build["parameters"](m), m, tp=2)

    def memory(*args):
        return json.loads(run(*args, "--plan", "--format", "json").stdout)["memory_bytes_at_most"]

    copies = memory("merge", tmp_path / "wide", tmp_path / "out")
    turned = memory("convert", tmp_path / "wide", tmp_path / "out", "--to", "hf")
    assert memory("merge", native[0], tmp_path / "out") <= copies < 72e6 < turned < 320e6


def test_a_legacy_file_altered_in_a_tensor_is_refused(run, native, legacy_save, tmp_path):
    _, m, p = native
    iteration = legacy_save(tmp_path / "legacy", p, m)
    path = iteration / "mp_rank_00" / "model_optim_rng.pt"
    payload = bytearray(path.read_bytes())
    at = payload.index(p["layers.1.mlp.fc2.weight"].tobytes())
    payload[at + 5] ^= 1
    path.write_bytes(payload)
    assert (
        "the bytes were altered" in run("convert", tmp_path / "legacy", tmp_path / "out", "--to", "hf", code=4).stderr
    )
    assert not (tmp_path / "out").exists()


def torch_tree(path):
    import argparse

    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: inner for key, part in value.items() for name, inner in flat(part, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("tp", "stages", "virtual"), [(1, [3], 1), (2, [1, 2], 1), (4, [1, 0, 1, 1], 2)])
def test_to_legacy_is_what_megatron_would_have_written(
    run, native, legacy_save, tmp_path, version, tp, stages, virtual
):
    """Against the writer of the tests, which follows Megatron's definition and torch.save."""
    directory, m, p = native
    expected = legacy_save(tmp_path / "expected", p, m, version=version, tp=tp, stages=stages, virtual=virtual)
    sizes = ("--tp", tp, "--pp", len(stages) // virtual, "--vpp", virtual, "--partition", ",".join(map(str, stages)))
    run("convert", directory, tmp_path / "out", "--to", "legacy", "--checkpoint-version", version, *sizes)
    written = tmp_path / "out" / "iter_0000008"
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in written.iterdir():
        ours = torch_tree(path / "model_optim_rng.pt")
        theirs = torch_tree_of_megatron(expected / path.name / "model_optim_rng.pt")
        for key in theirs:
            if key.startswith("model"):
                if version < 3:
                    theirs[key] = renamed_attention(theirs[key])
                left, right = flat(ours[key]), flat(theirs[key])
                assert left.keys() == right.keys()
                assert all(np.array_equal(left[name].numpy(), right[name].numpy()) for name in left)
        assert ours["args"].num_attention_heads == 4
        assert ours["checkpoint_version"] == version
        with zipfile.ZipFile(path / "model_optim_rng.pt") as archive:
            assert archive.testzip() is None
    assert "no tensor differs" in run("diff", tmp_path / "out", directory).stdout


def torch_tree_of_megatron(path):
    import torch

    return torch.load(path, weights_only=False)


def renamed_attention(state):
    if not isinstance(state, dict):
        return state
    return {key.replace(".self_attention.", ".attention."): renamed_attention(value) for key, value in state.items()}


def test_hf_native_legacy_hf_is_byte_identical(run, native, tmp_path):
    directory, _, _ = native
    run("convert", directory, tmp_path / "hf", "--to", "hf")
    run("convert", tmp_path / "hf", tmp_path / "n", "--to", "native", "--make-vocab-size-divisible-by", 8)
    run("convert", tmp_path / "n", tmp_path / "l", "--to", "legacy", "--tp", 2, "--pp", 3, "--checkpoint-version", 1)
    run("convert", tmp_path / "l", tmp_path / "hf2", "--to", "hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "hf2" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize(
    "sizes", [(), ("--tp", 2, "--pp", 3), ("--tp", 2, "--pp", 2, "--vpp", 2, "--partition", "1,0,1,1")]
)
def test_optimizer_state_to_legacy_and_back(run, tmp_path, dtype, sizes):
    m = build["model"]()
    p = build["parameters"](m)
    if dtype == "bf16":
        p = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in p.items()}
    build["save"](tmp_path / "native", p | build["optimizer_state"](p), m)
    run("convert", tmp_path / "native", tmp_path / "l", "--to", "legacy", "--with-optimizer", "--dtype", dtype, *sizes)
    file = min((tmp_path / "l" / "iter_0000008").iterdir()) / "model_optim_rng.pt"
    held = torch_tree(file)["optimizer"]
    assert ("fp32_from_fp16_params" in held) is (dtype == "bf16")
    groups = held.get("optimizer", held)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    run("convert", tmp_path / "l", tmp_path / "back", "--to", "native", "--with-optimizer")
    assert "no tensor differs" in run("diff", tmp_path / "native", tmp_path / "back", "--with-optimizer").stdout


def test_optimizer_state_that_is_not_there_cannot_be_written(run, tmp_path):
    m = build["model"]()
    build["save"](tmp_path / "native", build["parameters"](m), m)
    error = run("convert", tmp_path / "native", tmp_path / "l", "--to", "legacy", "--with-optimizer", code=5).stderr
    assert "has no optimizer state" in error
    run("convert", tmp_path / "native", tmp_path / "hf", "--to", "hf", "--with-optimizer", code=2)


def test_pruned_weights_are_zero_in_a_legacy_checkpoint(run, tmp_path):
    m = build["model"]()
    p = build["parameters"](m)
    build["save"](tmp_path / "in", p | build["masks"](p), m)
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "legacy", "--tp", 4, "--checkpoint-version", 0)
    assert "no tensor differs" in run("diff", tmp_path / "out", tmp_path / "in").stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "legacy", "--checkpoint-version", 4], 2, "--checkpoint-version"),
        (["--to", "legacy", "--tp", 3], 5, "cannot be cut into 3"),
        (["--to", "hf", "--tp", 2], 2, "hf has one topology"),
        (["--to", "legacy", "--pp", 2, "--partition", "4"], 2, "must be 2 numbers"),
    ],
)
def test_legacy_targets_that_cannot_be(run, native, tmp_path, options, code, message):
    assert message in run("convert", native[0], tmp_path / "out", *options, code=code).stderr


def seeds_arguments(m, tp, pp, tmp_path):
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps({f"t{i}": i for i in range(m["vocab_size"])}))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    sizes = ["--num-layers", m["num_layers"], "--hidden-size", m["hidden_size"], "--seq-length", 12]
    sizes += ["--num-attention-heads", m["num_attention_heads"], "--max-position-embeddings", 12]
    files = ["--vocab-file", tmp_path / "gpt2-vocab.json", "--merge-file", tmp_path / "gpt2-merges.txt"]
    grid = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    return [*grid, "--target-pipeline-model-parallel-size", 1, *files, *sizes]


def test_the_arguments_of_the_old_tools(run, native, legacy_save, tmp_path):
    """As the command lines of Megatron's merge_mp_partitions.py and Optimus-CC's ckpt_convert.py are written."""
    directory, m, p = native
    legacy_save(tmp_path / "in", p, m, tp=2, stages=[1, 2])
    common = seeds_arguments(m, 2, 2, tmp_path)
    more = ["--experiment_name", "merge_baseline", "--tokenizer-type", "GPT2BPETokenizer", "--data-impl", "mmap"]
    more += ["--activations-checkpoint-method", "uniform", "--DDP-impl", "local", "-i_g", 1, "-p", 1]
    places = ["--load", tmp_path / "in", "--save", tmp_path / "unused", "-i", tmp_path / "in" / "iter_0000300"]
    run("ckpt_convert", "--model-type", "GPT", *common, *places, *more, "-o", tmp_path / "a")
    run("merge_mp_partitions", "--model-type", "GPT", *common, "--load", tmp_path / "in", "--save", tmp_path / "b")
    for name in ("a", "b"):
        assert [path.name for path in (tmp_path / name / "iter_0000300").iterdir()] == ["mp_rank_00"]
        assert "no tensor differs" in run("diff", tmp_path / name, directory).stdout
        assert (tmp_path / name / "vocab.json").read_bytes() == (tmp_path / "gpt2-vocab.json").read_bytes()
    assert not (tmp_path / "unused").exists()
    run(
        "merge_mp_partitions",
        "--model-type",
        "GPT",
        "--target-pipeline-model-parallel-size",
        3,
        "--load",
        tmp_path / "in",
        "--save",
        tmp_path / "c",
    )
    assert len(list((tmp_path / "c" / "iter_0000300").iterdir())) == 3


LINES = {
    # Megatron's README: a BERT of two tensor ranks for two stages, the output inside the input's directory.
    "bert": """merge_mp_partitions --model-type BERT --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1
        --target-pipeline-model-parallel-size 2 --tokenizer-type BertWordPieceLowerCase --vocab-file bert-vocab.txt
        --num-layers 3 --hidden-size 16 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12
        --load in --save in/merged""",
    # Optimus-CC's README: a GPT of eight tensor ranks and four stages; here of two and three.
    "gpt": """ckpt_convert --model-type GPT --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3
        --target-pipeline-model-parallel-size 1 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --num-layers 3
        --hidden-size 16 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12
        --load in/ --save in/merge/ --experiment_name merge_baseline --tokenizer-type GPT2BPETokenizer
        --activations-checkpoint-method uniform --data-impl mmap --DDP-impl local
        -i in/iter_0000300/ -o in/merged/ -i_g 1 -p 1""",
}


@pytest.mark.parametrize(("family", "folders"), [("bert", 2), ("gpt", 1)])
def test_the_command_lines_of_the_seeds(run, legacy_save, tmp_path, monkeypatch, family, folders):
    unit = Path(__file__).parents[1] / "unit" / "ckpt"
    families = runpy.run_path(str(unit / "families.py"))
    writer = runpy.run_path(str(unit / "legacy_families.py"))
    m = build["model"]() if family == "gpt" else families["bert"]()
    vocab = [f"t{i}" for i in range(m["vocab_size"])]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocab)}))
    (tmp_path / "bert-vocab.txt").write_text("\n".join(vocab))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    monkeypatch.chdir(tmp_path)
    if family == "gpt":
        legacy_save(tmp_path / "in", build["parameters"](m), m, tp=2, stages=[1, 1, 1])
    else:
        writer["save"](tmp_path / "in", families["parameters"](m), m, tp=2, stages=[(range(3), range(0))])
    run(*LINES[family].split())
    written = [path.parent for path in (tmp_path / "in" / "merged").rglob("model_optim_rng.pt")]
    assert len(written) == folders
    assert "no tensor differs" in run("diff", tmp_path / "in", tmp_path / "in" / "merged").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-type", "BERT"], "holds a gpt"),
        (["--model-type", "GPT", "--num-layers", 24], "a model with 3"),
        (["--model-type", "GPT", "--seq-length", 512], "has 12 positions"),
        (["--model-type", "GPT", "--tensor-model-parallel-size", 4], "has 2"),
        (["--model-type", "GPT", "--vocab-file", "missing.json"], "missing.json"),
    ],
)
def test_arguments_of_the_old_tools_that_contradict_the_files(run, native, legacy_save, tmp_path, options, message):
    _, m, p = native
    legacy_save(tmp_path / "in", p, m, tp=2)
    places = ["--load", tmp_path / "in", "--save", tmp_path / "out"]
    assert message in run("merge_mp_partitions", *options, *places, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_the_type_of_the_weights(run, native, tmp_path):
    import torch
    from safetensors.torch import load_file as load_tensors

    directory, _, p = native
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        run("convert", directory, tmp_path / name, "--to", "hf", "--dtype", name)
        found = load_tensors(tmp_path / name / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
        assert torch.equal(found, torch.from_numpy(p["layers.1.mlp.fc1.weight"]).to(dtype).T)
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == str(dtype).split(".")[1]
        run("convert", tmp_path / name, tmp_path / f"{name}-n", "--to", "native", "--dtype", "fp32")
        assert "ok" in run("verify", tmp_path / f"{name}-n").stdout
        back = load_file(tmp_path / f"{name}-n" / "model-p000-t00.safetensors")["layers.1.mlp.fc1.weight"]
        assert np.array_equal(back, torch.from_numpy(p["layers.1.mlp.fc1.weight"]).to(dtype).float().numpy())
    run("convert", directory, tmp_path / "l", "--to", "legacy", "--dtype", "bf16", "--pp", 2)
    stored = torch_tree(tmp_path / "l" / "iter_0000008" / "mp_rank_00_001" / "model_optim_rng.pt")["model"]
    assert stored["word_embeddings_for_head"]["weight"].dtype == torch.bfloat16


def test_every_number_is_rounded_as_torch_rounds():
    import torch

    from dynmo_ckpt.panels import cast

    words = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    words[:6] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        ours = torch.from_numpy(cast(words, "F32", name).view(np.int16)).view(dtype)
        theirs = torch.from_numpy(words.view(np.float32)).to(dtype)
        assert torch.equal(ours.nan_to_num(1e4), theirs.nan_to_num(1e4))
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_copies_that_differ_and_tensors_to_leave_out(run, native, legacy_save, tmp_path):
    import torch

    directory, m, p = native
    iteration = legacy_save(tmp_path / "l", p, m, tp=2, stages=[1, 2])
    path = iteration / "mp_rank_01_001" / "model_optim_rng.pt"
    document = torch.load(path, weights_only=False)
    document["model"]["language_model"]["encoder"]["final_layernorm.bias"] += 1
    document["model"]["word_embeddings_for_head"]["weight"] += 1
    document["model"]["extra"] = {"weight": torch.zeros(2)}
    other = torch.load(iteration / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)
    other["model"]["extra"] = {"weight": torch.zeros(2)}
    torch.save(document, path)
    torch.save(other, iteration / "mp_rank_00_001" / "model_optim_rng.pt")
    to = ("--to", "native")
    assert "extra.weight" in run("convert", tmp_path / "l", tmp_path / "o", *to, code=5).stderr
    run_drop = ("convert", tmp_path / "l", tmp_path / "o", *to, "--drop", "extra.*")
    assert "--replicas first" in run(*run_drop, code=4).stderr
    said = run(*run_drop, "--replicas", "first").stderr
    assert "extra.weight: left out" in said
    assert "final_layernorm.bias of tensor ranks 0 and 1 differ; the first is taken" in said
    assert "no tensor differs" in run("diff", tmp_path / "o", directory).stdout
    run("convert", tmp_path / "l", tmp_path / "u", *to, "--drop", "extra.*", "--replicas", "first", "--untie")
    head = load_file(tmp_path / "u" / "model-p000-t00.safetensors")["head.weight"]
    half, rows = m["padded_vocab_size"] // 2, m["vocab_size"]
    assert np.array_equal(head[:half], p["embedding.word.weight"][:half])
    assert np.array_equal(head[half:], p["embedding.word.weight"][half:rows] + 1)
    assert "not a native" in run("convert", directory, tmp_path / "x", *to, "--drop", "a", code=2).stderr


def test_experts_have_no_form_in_legacy_files(run, tmp_path):
    families = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "ckpt" / "families.py"))
    m = families["llama"](num_experts=4, moe_top_k=2)
    build["save"](tmp_path / "in", families["parameters"](m), m)
    told = run("convert", tmp_path / "in", tmp_path / "out", "--to", "legacy", code=5).stderr
    assert "its SwitchMLP gives each token one expert (here 2)" in told
    assert not (tmp_path / "out").exists()


def test_what_compression_remembers_goes_along_or_stays_behind(run, tmp_path, monkeypatch):
    own = build["role_of"]
    monkeypatch.setitem(
        build["save"].__globals__, "role_of", lambda name: "buffer" if ".memory." in name else own(name)
    )
    m = build["model"]()
    p = build["parameters"](m)
    memories = {"layers.1.mlp.memory.hidden.error": np.ones((2, 5, 16), np.float32)}
    build["save"](tmp_path / "in", p | memories, m, tp=2)
    build["save"](tmp_path / "plain", p, m, tp=2)
    run("reshard", tmp_path / "in", tmp_path / "r", "--tp", 4, "--pp", 3)
    assert "no tensor differs" in run("diff", tmp_path / "in", tmp_path / "r").stdout
    assert "2x5x16" in run("info", tmp_path / "r", "--tensors", "*memory*").stdout
    for name in ("in", "plain"):
        run("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
        run("convert", tmp_path / name, tmp_path / f"{name}-legacy", "--to", "legacy", "--tp", 2)
    exported = [(tmp_path / f"{name}-hf" / "model.safetensors").read_bytes() for name in ("in", "plain")]
    assert exported[0] == exported[1]
    assert "no tensor differs" in run("diff", tmp_path / "in-legacy", tmp_path / "plain-legacy").stdout


def test_gpt2s_vocabulary_goes_to_every_tensor_parallel_size(run, legacy_save, tmp_path):
    """50,257 rows are shared by 1, 2 and 4 ranks without a divisor; legacy files get the rows that Megatron expects."""
    m = build["model"](num_layers=1, hidden_size=8, ffn_hidden_size=12, vocab_size=50257, padded_vocab_size=50304)
    p = build["parameters"](m)
    p["embedding.word.weight"][50257:] = 0
    build["save"](tmp_path / "old", p, m)
    true = build["true_rows"](m["vocab_size"], p)
    for before, after in itertools.product((1, 2, 4), (1, 2, 4)):
        one, two = tmp_path / f"{before}", tmp_path / f"{before}-{after}"
        if not one.exists():
            run("reshard", tmp_path / "old", one, "--tp", before)
        run("reshard", one, two, "--tp", after)
        assert "no tensor differs" in run("diff", two, tmp_path / "old").stdout
        parts = [load_file(two / f"model-p000-t{rank:02d}.safetensors") for rank in range(after)]
        words = np.concatenate([part["embedding.word.weight"] for part in parts])
        assert np.array_equal(words, true["embedding.word.weight"])
    for ranks, rows in ((1, 50304), (2, 50432), (4, 50688)):
        legacy, back = tmp_path / f"legacy-{ranks}", tmp_path / f"back-{ranks}"
        run("convert", tmp_path / "1", legacy, "--to", "legacy", "--tp", ranks)
        folder = legacy / "iter_0000008" / "mp_rank_00"
        word = torch_tree(folder / "model_optim_rng.pt")["model"]["language_model"]["embedding"]["word_embeddings"]
        assert word["weight"].shape[0] == rows // ranks
        run("convert", legacy, back, "--to", "native")
        assert "no tensor differs" in run("diff", back, tmp_path / "old").stdout
