"""dynmo-ckpt from and to Megatron's legacy checkpoints, and the command lines of the older tools."""

import itertools
import json
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.cli_files import torch_tree
from tests.unit.dynmo_ckpt import families, legacy_families, native_checkpoints


@pytest.mark.complete
def test_convert_every_legacy_version_gives_equal_bytes(ckpt, native, legacy_save, tmp_path):
    directory, m, p = native
    ckpt("convert", directory, tmp_path / "expected", "--to", "hf")
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    for version in (0, 1.0, 2.0, 3.0):
        for tp, stages in ((1, None), (2, [1, 2]), (4, [2, 0, 1])):
            name = f"v{version}-{tp}"
            legacy_save(tmp_path / name, p, m, version=version, tp=tp, stages=stages)
            ckpt("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
            assert (tmp_path / f"{name}-hf" / "model.safetensors").read_bytes() == expected
            assert "no tensor differs" in ckpt("diff", tmp_path / name, directory).stdout


def test_a_rank_file_or_its_archive_is_a_checkpoint(ckpt, native, legacy_save, tmp_path):
    _, m, p = native
    legacy_save(tmp_path / "run", p, m)
    [file] = (tmp_path / "run").rglob("model_optim_rng.pt")
    (tmp_path / "alone.pt").write_bytes(file.read_bytes())
    with zipfile.ZipFile(tmp_path / "published.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "release/mp_rank_00/model_optim_rng.pt")
        archive.writestr("release/latest_checkpointed_iteration.txt", "release")
    for name in ("alone.pt", "published.zip", file.relative_to(tmp_path)):
        assert "no tensor differs" in ckpt("diff", tmp_path / name, tmp_path / "run").stdout
    # Of several ranks the file of one stands for all.
    legacy_save(tmp_path / "ranks", p, m, tp=2)
    one = next((tmp_path / "ranks").rglob("mp_rank_00/model_optim_rng.pt"))
    assert "no tensor differs" in ckpt("diff", one, tmp_path / "run").stdout
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.write(file, "iter_0000001/mp_rank_00/model_optim_rng.pt")
        archive.write(file, "iter_0000002/mp_rank_00/model_optim_rng.pt")
    assert "more than one iteration" in ckpt("info", tmp_path / "two.zip", code=4).stderr
    (tmp_path / "two.zip").write_bytes((tmp_path / "two.zip").read_bytes()[:500])
    assert "is a damaged archive" in ckpt("info", tmp_path / "two.zip", code=4).stderr


def test_open_gpt_neox_is_refused_with_the_remedy(ckpt, tmp_path):
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
        refused = " ".join(ckpt(command, tmp_path / "neox", *rest, code=5).stderr.split())
        assert "a checkpoint of GPT-NeoX" in refused
        assert "tools/ckpts/convert_neox_to_hf.py --architecture llama" in refused
    assert not (tmp_path / "out").exists()


def test_convert_legacy_file_with_unsafe_pickle_is_refused(ckpt, native, legacy_save, tmp_path):
    import os

    import torch

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'marker'}",)

    _, m, p = native
    iteration = legacy_save(tmp_path / "legacy", p, m)
    torch.save({"model": {}, "args": Evil()}, iteration / "mp_rank_00" / "model_optim_rng.pt")
    done = ckpt("convert", tmp_path / "legacy", tmp_path / "out", "--to", "hf", code=3)
    assert "system" in done.stderr
    assert "model_optim_rng.pt" in done.stderr
    assert not (tmp_path / "marker").exists()


def test_convert_altered_legacy_tensor_is_refused(ckpt, native, legacy_save, tmp_path):
    _, m, p = native
    iteration = legacy_save(tmp_path / "legacy", p, m)
    path = iteration / "mp_rank_00" / "model_optim_rng.pt"
    payload = bytearray(path.read_bytes())
    at = payload.index(p["layers.1.mlp.fc2.weight"].tobytes())
    payload[at + 5] ^= 1
    path.write_bytes(payload)
    assert (
        "the bytes were altered" in ckpt("convert", tmp_path / "legacy", tmp_path / "out", "--to", "hf", code=4).stderr
    )
    assert not (tmp_path / "out").exists()


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: inner for key, part in value.items() for name, inner in flat(part, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("tp", "stages", "virtual"), [(1, [3], 1), (2, [1, 2], 1), (4, [1, 0, 1, 1], 2)])
def test_convert_to_legacy_equals_megatron(ckpt, native, legacy_save, tmp_path, version, tp, stages, virtual):
    """Against the writer of the tests, which follows Megatron's definition and torch.save."""
    directory, m, p = native
    expected = legacy_save(tmp_path / "expected", p, m, version=version, tp=tp, stages=stages, virtual=virtual)
    sizes = ("--tp", tp, "--pp", len(stages) // virtual, "--vpp", virtual, "--partition", ",".join(map(str, stages)))
    ckpt("convert", directory, tmp_path / "out", "--to", "legacy", "--checkpoint-version", version, *sizes)
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
    assert "no tensor differs" in ckpt("diff", tmp_path / "out", directory).stdout


def torch_tree_of_megatron(path):
    import torch

    return torch.load(path, weights_only=False)


def renamed_attention(state):
    if not isinstance(state, dict):
        return state
    return {key.replace(".self_attention.", ".attention."): renamed_attention(value) for key, value in state.items()}


def test_convert_hf_to_native_to_legacy_to_hf_is_byte_identical(ckpt, native, tmp_path):
    directory, _, _ = native
    ckpt("convert", directory, tmp_path / "hf", "--to", "hf")
    ckpt("convert", tmp_path / "hf", tmp_path / "n", "--to", "native", "--make-vocab-size-divisible-by", 8)
    ckpt("convert", tmp_path / "n", tmp_path / "l", "--to", "legacy", "--tp", 2, "--pp", 3, "--checkpoint-version", 1)
    ckpt("convert", tmp_path / "l", tmp_path / "hf2", "--to", "hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "hf2" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize(
    "sizes", [(), ("--tp", 2, "--pp", 3), ("--tp", 2, "--pp", 2, "--vpp", 2, "--partition", "1,0,1,1")]
)
def test_convert_optimizer_state_to_legacy_and_back_is_equal(ckpt, tmp_path, dtype, sizes):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    if dtype == "bf16":
        p = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in p.items()}
    native_checkpoints.save(tmp_path / "native", p | native_checkpoints.optimizer_state(p), m)
    ckpt("convert", tmp_path / "native", tmp_path / "l", "--to", "legacy", "--with-optimizer", "--dtype", dtype, *sizes)
    file = min((tmp_path / "l" / "iter_0000008").iterdir()) / "model_optim_rng.pt"
    stored = torch_tree(file)["optimizer"]
    assert ("fp32_from_fp16_params" in stored) is (dtype == "bf16")
    groups = stored.get("optimizer", stored)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    ckpt("convert", tmp_path / "l", tmp_path / "back", "--to", "native", "--with-optimizer")
    assert "no tensor differs" in ckpt("diff", tmp_path / "native", tmp_path / "back", "--with-optimizer").stdout


def test_convert_absent_optimizer_state_is_refused(ckpt, tmp_path):
    m = native_checkpoints.model()
    native_checkpoints.save(tmp_path / "native", native_checkpoints.parameters(m), m)
    error = ckpt("convert", tmp_path / "native", tmp_path / "l", "--to", "legacy", "--with-optimizer", code=5).stderr
    assert "has no optimizer state" in error
    ckpt("convert", tmp_path / "native", tmp_path / "hf", "--to", "hf", "--with-optimizer", code=2)


def test_convert_pruned_weights_to_legacy_are_zero(ckpt, tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    native_checkpoints.save(tmp_path / "in", p | native_checkpoints.masks(p), m)
    ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "legacy", "--tp", 4, "--checkpoint-version", 0)
    assert "no tensor differs" in ckpt("diff", tmp_path / "out", tmp_path / "in").stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "legacy", "--checkpoint-version", 4], 2, "--checkpoint-version"),
        (["--to", "legacy", "--tp", 3], 5, "cannot be split over 3"),
        (["--to", "hf", "--tp", 2], 2, "does not apply to --to hf"),
        (["--to", "legacy", "--pp", 2, "--partition", "4"], 2, "must be 2 numbers"),
    ],
)
def test_convert_impossible_legacy_target_is_refused(ckpt, native, tmp_path, options, code, message):
    assert message in ckpt("convert", native[0], tmp_path / "out", *options, code=code).stderr


def seeds_arguments(m, tp, pp, tmp_path):
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps({f"t{i}": i for i in range(m["vocab_size"])}))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    sizes = ["--num-layers", m["num_layers"], "--hidden-size", m["hidden_size"], "--seq-length", 12]
    sizes += ["--num-attention-heads", m["num_attention_heads"], "--max-position-embeddings", 12]
    files = ["--vocab-file", tmp_path / "gpt2-vocab.json", "--merge-file", tmp_path / "gpt2-merges.txt"]
    grid = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    return [*grid, "--target-pipeline-model-parallel-size", 1, *files, *sizes]


def test_megatron_tools_arguments_are_accepted(ckpt, native, legacy_save, tmp_path):
    """As the command lines of Megatron's merge_mp_partitions.py and Optimus-CC's ckpt_convert.py are written."""
    directory, m, p = native
    legacy_save(tmp_path / "in", p, m, tp=2, stages=[1, 2])
    common = seeds_arguments(m, 2, 2, tmp_path)
    more = ["--experiment_name", "merge_baseline", "--tokenizer-type", "GPT2BPETokenizer", "--data-impl", "mmap"]
    more += ["--activations-checkpoint-method", "uniform", "--DDP-impl", "local", "-i_g", 1, "-p", 1]
    places = ["--load", tmp_path / "in", "--save", tmp_path / "unused", "-i", tmp_path / "in" / "iter_0000300"]
    ckpt("ckpt_convert", "--model-type", "GPT", *common, *places, *more, "-o", tmp_path / "a")
    ckpt("merge_mp_partitions", "--model-type", "GPT", *common, "--load", tmp_path / "in", "--save", tmp_path / "b")
    for name in ("a", "b"):
        assert [path.name for path in (tmp_path / name / "iter_0000300").iterdir()] == ["mp_rank_00"]
        assert "no tensor differs" in ckpt("diff", tmp_path / name, directory).stdout
        assert (tmp_path / name / "vocab.json").read_bytes() == (tmp_path / "gpt2-vocab.json").read_bytes()
    assert not (tmp_path / "unused").exists()
    ckpt(
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
def test_megatron_tools_published_command_lines_run(ckpt, legacy_save, tmp_path, monkeypatch, family, folders):
    m = native_checkpoints.model() if family == "gpt" else families.bert()
    vocab = [f"t{i}" for i in range(m["vocab_size"])]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocab)}))
    (tmp_path / "bert-vocab.txt").write_text("\n".join(vocab))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    monkeypatch.chdir(tmp_path)
    if family == "gpt":
        legacy_save(tmp_path / "in", native_checkpoints.parameters(m), m, tp=2, stages=[1, 1, 1])
    else:
        legacy_families.save(tmp_path / "in", families.parameters(m), m, tp=2, stages=[(range(3), range(0))])
    ckpt(*LINES[family].split())
    written = [path.parent for path in (tmp_path / "in" / "merged").rglob("model_optim_rng.pt")]
    assert len(written) == folders
    assert "no tensor differs" in ckpt("diff", tmp_path / "in", tmp_path / "in" / "merged").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-type", "BERT"], "is a gpt"),
        (["--model-type", "GPT", "--num-layers", 24], "has 3"),
        (["--model-type", "GPT", "--seq-length", 512], "has 12 positions"),
        (["--model-type", "GPT", "--tensor-model-parallel-size", 4], "has 2"),
        (["--model-type", "GPT", "--vocab-file", "missing.json"], "missing.json"),
    ],
)
def test_megatron_tools_contradicting_arguments_are_refused(ckpt, native, legacy_save, tmp_path, options, message):
    _, m, p = native
    legacy_save(tmp_path / "in", p, m, tp=2)
    places = ["--load", tmp_path / "in", "--save", tmp_path / "out"]
    assert message in ckpt("merge_mp_partitions", *options, *places, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_convert_differing_replicas_and_unknown_tensors_need_options(ckpt, native, legacy_save, tmp_path):
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
    assert "extra.weight" in ckpt("convert", tmp_path / "l", tmp_path / "o", *to, code=5).stderr
    run_drop = ("convert", tmp_path / "l", tmp_path / "o", *to, "--drop", "extra.*")
    assert "--replicas first" in ckpt(*run_drop, code=4).stderr
    messages = ckpt(*run_drop, "--replicas", "first").stderr
    assert "extra.weight: left out" in messages
    assert "final_layernorm.bias of tensor-parallel ranks 0 and 1 differ; the first one is used" in messages
    assert "no tensor differs" in ckpt("diff", tmp_path / "o", directory).stdout
    ckpt("convert", tmp_path / "l", tmp_path / "u", *to, "--drop", "extra.*", "--replicas", "first", "--untie")
    head = load_file(tmp_path / "u" / "model-p000-t00.safetensors")["head.weight"]
    half, rows = m["padded_vocab_size"] // 2, m["vocab_size"]
    assert np.array_equal(head[:half], p["embedding.word.weight"][:half])
    assert np.array_equal(head[half:], p["embedding.word.weight"][half:rows] + 1)
    assert (
        "--drop: has no effect on native checkpoints"
        in ckpt("convert", directory, tmp_path / "x", *to, "--drop", "a", code=2).stderr
    )


def test_convert_experts_to_legacy_is_refused(ckpt, tmp_path):
    m = families.llama(num_experts=4, moe_top_k=2)
    native_checkpoints.save(tmp_path / "in", families.parameters(m), m)
    error = ckpt("convert", tmp_path / "in", tmp_path / "out", "--to", "legacy", code=5).stderr
    assert "its SwitchMLP routes each token to one expert (here 2)" in error
    assert not (tmp_path / "out").exists()


def test_reshard_vocabulary_without_divisor_keeps_all_rows(ckpt, legacy_save, tmp_path):
    """50,257 rows are shared by 1, 2 and 4 ranks without a divisor; legacy files get the rows that Megatron expects."""
    m = native_checkpoints.model(
        num_layers=1, hidden_size=8, ffn_hidden_size=12, vocab_size=50257, padded_vocab_size=50304
    )
    p = native_checkpoints.parameters(m)
    p["embedding.word.weight"][50257:] = 0
    native_checkpoints.save(tmp_path / "old", p, m)
    true = native_checkpoints.true_rows(m["vocab_size"], p)
    for before, after in itertools.product((1, 2, 4), (1, 2, 4)):
        one, two = tmp_path / f"{before}", tmp_path / f"{before}-{after}"
        if not one.exists():
            ckpt("reshard", tmp_path / "old", one, "--tp", before)
        ckpt("reshard", one, two, "--tp", after)
        assert "no tensor differs" in ckpt("diff", two, tmp_path / "old").stdout
        parts = [load_file(two / f"model-p000-t{rank:02d}.safetensors") for rank in range(after)]
        words = np.concatenate([part["embedding.word.weight"] for part in parts])
        assert np.array_equal(words, true["embedding.word.weight"])
    for ranks, rows in ((1, 50304), (2, 50432), (4, 50688)):
        legacy, back = tmp_path / f"legacy-{ranks}", tmp_path / f"back-{ranks}"
        ckpt("convert", tmp_path / "1", legacy, "--to", "legacy", "--tp", ranks)
        folder = legacy / "iter_0000008" / "mp_rank_00"
        word = torch_tree(folder / "model_optim_rng.pt")["model"]["language_model"]["embedding"]["word_embeddings"]
        assert word["weight"].shape[0] == rows // ranks
        ckpt("convert", legacy, back, "--to", "native")
        assert "no tensor differs" in ckpt("diff", back, tmp_path / "old").stdout
