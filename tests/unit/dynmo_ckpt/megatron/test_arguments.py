"""Every Megatron argument of a checkpoint is mapped, known to change no logit, or refused by name."""

import sys
import types

import pytest

from dynmo_ckpt.cli import main
from dynmo_ckpt.huggingface.config_keys import irrelevant_keys
from dynmo_ckpt.io.errors import UnsupportedError
from dynmo_ckpt.megatron.arguments import argument_table, check_args, needed_values, read_args
from dynmo_ckpt.megatron.model_sizes import legacy_args, llama_sizes
from dynmo_ckpt.megatron.training_progress import UNKNOWN_PROGRESS, megatron_args
from dynmo_ckpt.torch_save.pickles import GlobalName, OpaquePickle
from tests.tables import table
from tests.unit.dynmo_ckpt import legacy_gpt, native_checkpoints

TABLE = argument_table()
NEEDS = [(family, name) for family in ("gpt", "llama") for name in needed_values(family)]
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}


def args_of(family):
    return dict(LLAMA) if family == "llama" else {}


def test_argument_table_lists_each_argument_once():
    lists = [*TABLE["irrelevant"].values(), TABLE["mapped"], list(TABLE["needs"]), list(TABLE["families"]["llama"])]
    names = [name for each in lists for name in each]
    assert len(names) == len(set(names)) > 1400
    assert not set(TABLE["families"]["others"]) & (set(TABLE["mapped"]) | set(irrelevant_keys(TABLE)))


@table(("family", "name"), NEEDS)
def test_check_args_unsupported_value_is_refused(family, name):
    values = needed_values(family)[name]
    for value in (v for v in values if v is not None):
        assert check_args("IN", family, args_of(family) | {name: value}) is not None
    # A type of rotary positions turns the flag on, whatever it was.
    base = {k: v for k, v in args_of(family).items() if k != "position_embedding_type"}
    other = True if values == [False, None] else "another"
    with pytest.raises(UnsupportedError, match=f"trained with {name} = {other}; .* --ignore-config {name}"):
        check_args("IN", family, base | {name: other})
    assert name not in check_args("IN", family, base | {name: other}, [name])


@table(
    ("family", "args", "message"),
    [
        ("gpt", {"use_rotary_position_embeddings": True}, "use_rotary_position_embeddings = True"),
        ("gpt", {"position_embedding_type": "alibi"}, "position_embedding_type = alibi"),
        ("gpt", {"position_embedding_type": ("alibi", 3)}, r"PositionEmbeddingType\(3\)"),
        ("gpt", {"num_experts": [4]}, r"num_experts = \[4\]"),
        ("llama", {"position_embedding_type": "yarn"}, "position_embedding_type = yarn"),
        ("llama", {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": False}, "= False"),
        ("llama", {"rotary_seq_len_interpolation_factor": 4}, "rotary_seq_len_interpolation_factor = 4"),
        ("llama", {"window_size": (128, 0)}, "window_size"),
        ("bert", {"squared_relu": True}, "squared_relu = True"),
    ],
)
def test_open_legacy_arguments_that_change_logits_are_refused(family, args, message):
    """The second is a member of an enumeration, as BigScience's Megatron-DeepSpeed stores it."""
    if isinstance(args.get("position_embedding_type"), tuple):
        enum = GlobalName("megatron.enums", "PositionEmbeddingType")
        args = {"position_embedding_type": OpaquePickle(type=enum, arguments=(3,))}
    with pytest.raises(UnsupportedError, match=message):
        check_args("IN", family, args_of(family) | args)


@pytest.mark.parametrize(("family", "value"), [("llama", "rmsnorm"), ("gpt", "layernorm"), ("t5", "layernorm")])
def test_check_args_lower_case_normalization_is_accepted(family, value):
    """As Megatron-DeepSpeed stores it."""
    assert check_args("IN", family, args_of(family) | {"normalization": value})["normalization"] == value


@pytest.mark.parametrize(("family", "value"), [("llama", "layernorm"), ("gpt", "rmsnorm"), ("bert", "LAYERNORM")])
def test_check_args_other_normalization_is_refused(family, value):
    with pytest.raises(UnsupportedError, match=f"normalization = {value}"):
        check_args("IN", family, args_of(family) | {"normalization": value})


def test_check_args_irrelevant_values_are_accepted():
    """DeepSpeed's number of experts without experts, and values that only another family reads."""
    enum = OpaquePickle(type=GlobalName("megatron.enums", "PositionEmbeddingType"), arguments=(2,))
    check_args("IN", "gpt", {"num_experts": [1], "position_embedding_type": enum, "rotary_percent": 0.5})
    found = check_args("IN", "llama", {**LLAMA, "window_size": (-1, -1), "use_rotary_position_embeddings": False})
    assert found["use_rotary_position_embeddings"] is True


def test_read_args_without_namespace_is_refused():
    assert read_args({"model": {}}, "IN") == {}
    assert read_args({"args": OpaquePickle(type=GlobalName("argparse", "Namespace"), attributes={"lr": 1})}, "IN") == {
        "lr": 1
    }
    with pytest.raises(UnsupportedError, match="its args are a dict"):
        read_args({"args": {"qk_layernorm": True}}, "IN")
    with pytest.raises(UnsupportedError, match="its args are a dict; they must"):
        read_args({"args": {}}, "IN")


@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "llama"])
@pytest.mark.parametrize("version", [2.0, 3.0])
def test_argument_table_has_arguments_of_exports(family, version):
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 16, "padded_vocab_size": 32, "vocab_size": 30, "layernorm_epsilon": 1e-5}
    activation = "swiglu" if family == "llama" else "gelu_tanh"
    made = {**sizes, "family": family, "activation": activation, "tied_embeddings": True, "num_decoder_layers": 2}
    args = legacy_args(made, 1, 1, version, None) | megatron_args(UNKNOWN_PROGRESS)
    args |= {"use_dist_ckpt": True, "dist_ckpt_format": "torch_dist", "ckpt_format": "torch_dist"}
    assert args.keys() <= check_args("IN", family, args).keys()


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["dynmo-ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done.out + done.err
        return done.out + done.err

    return call


def test_convert_unknown_argument_is_refused_unless_ignored(run, tmp_path, monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = legacy_gpt.ModelType
    m = native_checkpoints.model()
    legacy_gpt.save(tmp_path / "in", native_checkpoints.parameters(m), m, twisted_gelu=True)
    messages = run("convert", tmp_path / "in", tmp_path / "out", "--to", "native", code=5)
    assert "no rule for the argument twisted_gelu" in messages
    assert "--ignore-config NAME" in messages
    assert not (tmp_path / "out").exists()
    ignore = ("--ignore-config", "twisted_*")
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "native", *ignore)
    for command in (["info"], ["verify"], ["diff", tmp_path / "out"], ["merge", tmp_path / "merged"]):
        name, *more = command
        assert "twisted_gelu" in run(name, tmp_path / "in", *more, code=5)
        run(name, tmp_path / "in", *more, *ignore)
    run("reshard", tmp_path / "in", tmp_path / "two", "--tp", "2", *ignore)
    run("split", tmp_path / "in", tmp_path / "split", "--tp", "2", *ignore)
    run("verify", tmp_path / "split", "--against", tmp_path / "in", *ignore)


def test_llama_sizes_from_names_of_megatron_deepspeed():
    model = {"num_attention_heads": 4, "hidden_size": 16}
    args = {**LLAMA, "rope_theta": 500000, "num_key_value_heads": 2, "max_position_embeddings": 8}
    found = llama_sizes("IN", check_args("IN", "llama", args), (4 + 2 * 2) * 4, model)
    assert (found["rotary_base"], found["num_key_value_heads"]) == (500000.0, 2)


@pytest.mark.parametrize("value", ["r" * 10_000_000, ["r" * 10_000_000] * 9])
def test_check_args_large_value_is_shortened_in_message(value):
    for args in ({"normalization": value}, {"n" * 10_000_000: 1}):
        with pytest.raises(UnsupportedError) as error:
            check_args("IN", "gpt", args)
        assert len(str(error.value)) < 1000
