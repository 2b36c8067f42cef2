"""dynmo-ckpt between formats, split, reshard and diff, from the outside."""

import json
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.cli_files import torch_tree
from tests.unit.dynmo_ckpt import native_checkpoints


def test_convert_to_hf_and_back_is_equal(ckpt, native, tmp_path):
    directory, m, p = native
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf", "--max-shard-size", "10KB")
    ckpt("convert", tmp_path / "hf", tmp_path / "back", "--to", "native", "--make-vocab-size-divisible-by", 16)
    manifest = json.loads((tmp_path / "back" / "manifest.json").read_text())
    assert manifest["model"] == m
    back = load_file(tmp_path / "back" / "model-p000-t00.safetensors")
    expected = native_checkpoints.true_rows(m["vocab_size"], p)
    assert back.keys() == expected.keys()
    assert all(np.array_equal(back[name], value) for name, value in expected.items())
    ckpt("convert", tmp_path / "back", tmp_path / "hf2", "--to", "hf", "--max-shard-size", "10KB")
    first = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir() if path.name != "conversion.json"}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "hf2").iterdir() if path.name in first}
    assert "no tensor differs" in ckpt("diff", directory, tmp_path / "hf").stdout
    assert "ok" in ckpt("verify", tmp_path / "back", "--against", directory).stdout


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model_type": "unheard"}, 5, "model_type 'unheard': must be one of gpt2"),
        ({"scale_attn_by_inverse_layer_idx": True}, 5, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "swish"}, 5, "'swish'"),
        ({"n_head": 0}, 4, "n_head must be a positive integer"),
        ({"n_layer": 4}, 5, "the input lacks 12 tensors"),
        ({"n_embd": 32}, 5, "has the shape"),
        ({"vocab_size": "many"}, 4, "vocab_size must be a positive integer"),
        ({"n_inner": -1}, 4, "impossible sizes"),
    ],
)
def test_convert_unfitting_config_is_refused(ckpt, native, tmp_path, change, code, message):
    directory, _, _ = native
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "native", code=code).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change", [{"model_type": None}, {"n_head": 0}, {"fork": 1}, {"quantization_config": {"quant_method": "other"}}]
)
def test_messages_name_the_configuration_of_one_side(ckpt, native, tmp_path, change):
    directory, _, _ = native
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    messages = ckpt("diff", directory, tmp_path / "hf", code=4 if "n_head" in change else 5).stderr
    assert f"{path}: {next(iter(change)) if 'fork' not in change else 'no rule for fork'}" in messages


def test_read_tensors_index_outside_directory_is_refused(ckpt, native, tmp_path):
    directory, _, _ = native
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    index = {"weight_map": {"x": "../native/model-p000-t00.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in ckpt("convert", tmp_path / "hf", tmp_path / "out", "--to", "native", code=4).stderr


def test_split_and_reshard_keep_all_tensors(ckpt, native, tmp_path):
    directory, _, p = native
    ckpt("split", directory, tmp_path / "s", "--tp", 4, "--pp", 3, "--partition", "0,2,1")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["topology"]["partition"] == [["embedding"], ["layers.0", "layers.1"], ["layers.2", "head"]]
    assert manifest["topology"]["world_size"] == 12
    assert "ok" in ckpt("verify", tmp_path / "s").stdout
    assert "no tensor differs" in ckpt("diff", directory, tmp_path / "s", "--with-optimizer").stdout
    ckpt("reshard", tmp_path / "s", tmp_path / "r", "--pp", 2, "--dp", 2, "--no-optimizer")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["topology"]["data_parallel_size"] == 2
    assert not list((tmp_path / "r").glob("optimizer*"))
    found = json.loads(ckpt("diff", directory, tmp_path / "r", "--with-optimizer", "--format", "json", code=1).stdout)
    assert {each["kind"] for each in found["differences"]} == {"only-left"}
    assert len(found["differences"]) == 2 * len(p)


def test_model_of_reads_sizes_under_other_names(ckpt, native, tmp_path):
    directory, _, _ = native
    ckpt("split", directory, tmp_path / "s", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    assert len(list((tmp_path / "s").glob("model-*"))) == 4


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tp", 3], 5, "num_attention_heads 4 cannot be split over 3"),
        (["--pp", 2, "--partition", "1,1"], 2, "must add up to the model's 3 layers"),
        (["--pp", 2, "--partition", "3"], 2, "must be 2 numbers"),
        (["--pp", 2, "--partition", "4,-1"], 2, "must be 2 numbers"),
        (["--tp", 0], 2, ""),
    ],
)
def test_convert_impossible_topology_is_refused(ckpt, native, tmp_path, options, code, message):
    assert message in ckpt("reshard", native[0], tmp_path / "out", *options, code=code).stderr
    assert not (tmp_path / "out").exists()


def test_diff_and_verify_against_report_differences(ckpt, native, tmp_path):
    directory, m, p = native
    q = {name: value.copy() for name, value in p.items()}
    q["layers.1.attention.qkv.bias"][4] += 0.25
    native_checkpoints.save(tmp_path / "other", q, m)
    text = ckpt("diff", directory, tmp_path / "other", code=1).stdout
    assert "layers.1.attention.qkv.bias: 1 of 48 elements differ by more than 0, by at most 0.25" in text
    assert "\n1 tensor differs" in text
    assert "qkv.bias" in ckpt("verify", directory, "--against", tmp_path / "other", code=1).stdout
    assert "no tensor differs" in ckpt("diff", directory, tmp_path / "other", "--atol", 0.3).stdout


def test_open_unknown_format_names_the_known_ones(ckpt, tmp_path):
    assert "no checkpoint here" in ckpt("convert", tmp_path, tmp_path / "o", "--to", "native", code=4).stderr
    assert (
        "--step"
        in ckpt("convert", tmp_path, tmp_path / "o", "--to", "native", "--from", "hf", "--step", 1, code=2).stderr
    )


def test_info_imports_neither_torch_nor_numpy(native, legacy_save, tmp_path):
    """``info`` is fast: numpy is imported only where bytes are read."""
    directory, m, p = native
    legacy_save(tmp_path / "megatron", p, m, tp=2, stages=[2, 1])
    program = "import sys\nfrom dynmo_ckpt.cli import main\ntry:\n    main()\nexcept SystemExit as stop:\n"
    program += "    print(stop.code, [name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    for path in (directory, tmp_path / "megatron"):
        command = [sys.executable, "-c", program, "info", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] in ("0 []", "None []")


def test_verify_of_other_formats_finds_an_altered_byte(ckpt, native, legacy_save, tmp_path):
    directory, m, p = native
    legacy_save(tmp_path / "megatron", p, m, tp=2, stages=[1, 2])
    for level in ("header", "replicas", "full"):
        assert f"ok ({level})" in ckpt("verify", tmp_path / "megatron", "--level", level).stdout
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf")
    done = ckpt("verify", tmp_path / "megatron", "--step", 300, "--against", tmp_path / "hf", "--format", "json")
    assert json.loads(done.stdout)["ok"] is True
    done = ckpt("verify", tmp_path / "hf", "--hf-logits", tmp_path / "hf", "--format", "json")
    assert json.loads(done.stdout)["logits"]["max_abs"] <= 5e-6
    assert "40 of 40 arrays have no recorded checksum" in done.stderr
    # An altered byte of a matrix is found by the zip file's checksum, and by nothing else.
    path = tmp_path / "megatron" / "iter_0000300" / "mp_rank_01_001" / "model_optim_rng.pt"
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda entry: entry.file_size if "/data/" in entry.filename else 0)
    payload = bytearray(path.read_bytes())
    at = payload.index(info.filename.encode()) + len(info.filename) + info.file_size // 2 + 64
    payload[at] ^= 4
    path.write_bytes(payload)
    assert "ok" in ckpt("verify", tmp_path / "megatron", "--level", "header").stdout
    assert f"{path}: {info.filename}: CRC-32 is" in ckpt("verify", tmp_path / "megatron", code=1).stdout
    # Replicas that differ are found where replicas are looked at.
    other = {**p, "layers.0.attention.norm.weight": p["layers.0.attention.norm.weight"] + 1}
    legacy_save(tmp_path / "other", other, m, tp=2, stages=[1, 2])
    at = ("mp_rank_01_000", "iter_0000300")
    (tmp_path / "other" / at[1] / at[0] / path.name).replace(tmp_path / "megatron" / at[1] / at[0] / path.name)
    assert "ok" in ckpt("verify", tmp_path / "megatron", "--level", "header").stdout
    found = ckpt("verify", tmp_path / "megatron", "--level", "replicas", code=1).stdout
    assert "of tensor-parallel ranks 0 and 1 differ; replicas must be equal" in found
    assert "known formats are native" in ckpt("verify", tmp_path / "nothing", code=4).stderr


def test_convert_plan_reports_the_memory_of_the_command(ckpt, native, tmp_path):
    """Copies need small buffers for any model size; transpositions need the size of a few matrices."""
    sizes = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 4, "ffn_hidden_size": 2048}
    m = native_checkpoints.model(**sizes)
    native_checkpoints.save(tmp_path / "wide", native_checkpoints.parameters(m), m, tp=2)

    def memory(*args):
        return json.loads(ckpt(*args, "--plan", "--format", "json").stdout)["memory_bytes_at_most"]

    copies = memory("merge", tmp_path / "wide", tmp_path / "out")
    turned = memory("convert", tmp_path / "wide", tmp_path / "out", "--to", "hf")
    assert memory("merge", native[0], tmp_path / "out") <= copies < 72e6 < turned < 320e6


def test_convert_dtype_casts_weights(ckpt, native, tmp_path):
    import torch
    from safetensors.torch import load_file as load_tensors

    directory, _, p = native
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        ckpt("convert", directory, tmp_path / name, "--to", "hf", "--dtype", name)
        found = load_tensors(tmp_path / name / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
        assert torch.equal(found, torch.from_numpy(p["layers.1.mlp.fc1.weight"]).to(dtype).T)
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == str(dtype).split(".")[1]
        ckpt("convert", tmp_path / name, tmp_path / f"{name}-n", "--to", "native", "--dtype", "fp32")
        assert "ok" in ckpt("verify", tmp_path / f"{name}-n").stdout
        back = load_file(tmp_path / f"{name}-n" / "model-p000-t00.safetensors")["layers.1.mlp.fc1.weight"]
        assert np.array_equal(back, torch.from_numpy(p["layers.1.mlp.fc1.weight"]).to(dtype).float().numpy())
    ckpt("convert", directory, tmp_path / "l", "--to", "legacy", "--dtype", "bf16", "--pp", 2)
    stored = torch_tree(tmp_path / "l" / "iter_0000008" / "mp_rank_00_001" / "model_optim_rng.pt")["model"]
    assert stored["word_embeddings_for_head"]["weight"].dtype == torch.bfloat16


def test_cast_every_number_rounds_as_torch():
    import torch

    from dynmo_ckpt.tensors.tiled_copy import cast

    words = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    words[:6] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        ours = torch.from_numpy(cast(words, "F32", name).view(np.int16)).view(dtype)
        theirs = torch.from_numpy(words.view(np.float32)).to(dtype)
        assert torch.equal(ours.nan_to_num(1e4), theirs.nan_to_num(1e4))
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_convert_compression_memory_to_native_only(ckpt, tmp_path, monkeypatch):
    own = native_checkpoints.role_of
    monkeypatch.setitem(
        native_checkpoints.save.__globals__, "role_of", lambda name: "buffer" if ".memory." in name else own(name)
    )
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    memories = {"layers.1.mlp.memory.hidden.error": np.ones((2, 5, 16), np.float32)}
    native_checkpoints.save(tmp_path / "in", p | memories, m, tp=2)
    native_checkpoints.save(tmp_path / "plain", p, m, tp=2)
    ckpt("reshard", tmp_path / "in", tmp_path / "r", "--tp", 4, "--pp", 3)
    assert "no tensor differs" in ckpt("diff", tmp_path / "in", tmp_path / "r").stdout
    assert "2x5x16" in ckpt("info", tmp_path / "r", "--tensors", "*memory*").stdout
    for name in ("in", "plain"):
        ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
        ckpt("convert", tmp_path / name, tmp_path / f"{name}-legacy", "--to", "legacy", "--tp", 2)
    exported = [(tmp_path / f"{name}-hf" / "model.safetensors").read_bytes() for name in ("in", "plain")]
    assert exported[0] == exported[1]
    assert "no tensor differs" in ckpt("diff", tmp_path / "in-legacy", tmp_path / "plain-legacy").stdout


def with_tokenizer(directory):
    """A Hugging Face directory with a tokenizer, and ids that its vocabulary does not show."""
    document = {"model": {"vocab": {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 1], "bos_token_id": None}))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 1], "top_p": 0.5}')
    return directory


def test_way_back_from_every_format_keeps_tokenizer_and_configuration(ckpt, native, tmp_path):
    ckpt("convert", native[0], tmp_path / "in", "--to", "hf")
    with_tokenizer(tmp_path / "in")
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in ("dcp", "legacy", "deepspeed"):
        ckpt("convert", tmp_path / "in", tmp_path / name, "--to", name)
        ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
        for each in names:
            found = [json.loads((tmp_path / place / each).read_text()) for place in ("in", f"{name}-hf")]
            assert found[0] == found[1], (name, each)
        row = ckpt("info", tmp_path / name).stdout
        assert name in row
        assert "written" not in row


def test_megatron_core_without_arguments_takes_those_of_the_configuration(ckpt, native, tmp_path):
    """As Megatron-Bridge writes it; a configuration of another model is reported."""
    import torch

    ckpt("convert", native[0], tmp_path / "in", "--to", "hf")
    ckpt("convert", native[0], tmp_path / "core", "--to", "dcp")
    recorded = ("convert", tmp_path / "core", tmp_path / "x", "--to", "native", "--config", tmp_path / "other")
    shutil.copytree(with_tokenizer(tmp_path / "in"), tmp_path / "other")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "n_head": config["n_head"] // 2}))
    assert "the arguments of the checkpoint decide" in ckpt(*recorded).stderr
    common = next((tmp_path / "core").glob("iter_*")) / "common.pt"
    torch.save({"iteration": 8}, common)
    bare = ("convert", tmp_path / "core", tmp_path / "out", "--to", "hf")
    assert "--config" in ckpt(*bare, code=2).stderr
    # Every command that reads has the option to which its message refers; the other side has no use for it.
    given = ("--config", tmp_path / "in")
    for command in (("info", tmp_path / "core"), ("verify", tmp_path / "core", "--against", tmp_path / "in")):
        assert "--config" in ckpt(*command, code=2).stderr
        ckpt(*command, *given)
    assert "no tensor differs" in ckpt("diff", tmp_path / "core", tmp_path / "in", *given).stdout
    assert "--config: has no effect" in ckpt("diff", tmp_path / "in", tmp_path / "in", *given, code=2).stderr
    assert "--config: has no effect" in ckpt("info", native[0], *given, code=2).stderr
    assert "--tokenizer DIR" in ckpt(*bare, "--config", tmp_path / "in").stderr
    assert "no tensor differs" in ckpt("diff", tmp_path / "in", tmp_path / "out").stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [2, 1]


def test_options_without_effect_are_refused_and_untie_separates_the_head(ckpt, native, tmp_path):
    ckpt("convert", native[0], tmp_path / "in", "--to", "hf")
    convert = ("convert", tmp_path / "in", tmp_path / "out", "--to", "native")
    for option in (["--config", tmp_path / "in"], ["--vocab-size", "5"], ["--replicas", "first"], ["--sparse"]):
        assert f"{option[0]}" in ckpt(*convert, *option, code=2).stderr
    ckpt(*convert, "--untie")
    stored = load_file(next((tmp_path / "out").glob("model-*.safetensors")))
    assert np.array_equal(stored["head.weight"], stored["embedding.word.weight"])
    assert "hf, GPT2LMHeadModel" in ckpt("info", tmp_path / "in").stdout


def test_names_of_wrappers_several_types_and_aliases_are_converted(ckpt, native, tmp_path):
    """The logits are compared by the reference model: transformers reads other names."""
    from safetensors.numpy import save_file

    ckpt("convert", native[0], tmp_path / "in", "--to", "hf")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for wrapped in ("module.", "_orig_mod.", "module._orig_mod."):
        save_file({f"{wrapped}{name}": value for name, value in stored.items()}, tmp_path / "in" / "model.safetensors")
        assert "logits of input" in ckpt("convert", tmp_path / "in", tmp_path / wrapped, "--to", "native").stderr
        assert "no tensor differs" in ckpt("diff", tmp_path / wrapped, native[0]).stdout
    mixed = {name: value.astype(np.float16) if "mlp" in name else value for name, value in stored.items()}
    save_file(mixed, tmp_path / "in" / "model.safetensors")
    assert "types: F32, F16" in ckpt("convert", tmp_path / "in", tmp_path / "mixed", "--to", "hf").stderr
    found = load_file(tmp_path / "mixed" / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in mixed.items()}


def deepspeed_of_transformers(directory, folder, stored, stage, ranks=2):
    """The files of DeepSpeed for a model of transformers: the module, or shards of its float32 masters (ZeRO 3)."""
    import torch

    tensors = {name: torch.from_numpy(value) for name, value in stored.items()}
    shapes = [{name: value.shape for name, value in tensors.items()}]
    (directory / folder).mkdir(parents=True)
    (directory / "latest").write_text(folder)
    model = {"module": tensors, "param_shapes": shapes, "global_steps": 4, "ds_version": "0.18.0"}
    if stage == 3:
        model["module"] = {name: torch.zeros(0) for name in tensors}
        for rank in range(ranks):
            parts = []
            for value in tensors.values():
                size = -(-value.numel() // ranks)
                flat = torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
                parts.append(flat[rank * size : (rank + 1) * size])
            flat = torch.cat(parts)
            adam = {"state": {0: {"step": 4, "exp_avg": flat, "exp_avg_sq": flat}}, "param_groups": []}
            state = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [flat]}
            shard = {"optimizer_state_dict": {**state, "optimizer_state_dict": adam}}
            torch.save(shard, directory / folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(model, directory / folder / f"{name}_model_states.pt")


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_of_the_trainer_and_of_accelerate_is_converted(ckpt, native, tmp_path, stage):
    """The first one has the configuration next to it, the second one needs ``--config``."""
    ckpt("convert", native[0], tmp_path / "in", "--to", "hf")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    deepspeed_of_transformers(tmp_path / "trainer", "global_step4", stored, stage)
    deepspeed_of_transformers(tmp_path / "accelerate", "pytorch_model", stored, stage)
    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "trainer")
    with_tokenizer(tmp_path / "trainer")
    ckpt("convert", tmp_path / "trainer", tmp_path / "one", "--to", "hf")
    assert "no tensor differs" in ckpt("diff", tmp_path / "one", tmp_path / "in").stdout
    assert (tmp_path / "one" / "tokenizer.json").exists()
    convert = ("convert", tmp_path / "accelerate", tmp_path / "two", "--to", "native")
    assert "give its directory with --config" in ckpt(*convert, code=2).stderr
    ckpt(*convert, "--config", tmp_path / "in")
    assert "no tensor differs" in ckpt("diff", tmp_path / "two", tmp_path / "in").stdout
    assert "--no-optimizer" in ckpt(*convert, "--config", tmp_path / "in", "--with-optimizer", code=5).stderr
