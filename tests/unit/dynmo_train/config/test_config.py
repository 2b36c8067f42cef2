"""Options are declared once: flag, TOML key, ``run.json`` and help agree."""

from __future__ import annotations

import json
from functools import cache

import pytest
import typer

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.config import DefaultContext, config_document, config_of, option_specs, resolve, validate
from dynmo_train.config.command import with_options
from dynmo_train.config.parse import parse_freeze_schedule, parse_split
from dynmo_train.config.resolve import parse_config_file, read_config_file
from tests.tables import table
from tests.unit.dynmo_train.config.small_config import SMALL

FLAGS = {name: spec for name, spec in option_specs().items() if spec.is_flag}


def other_value(spec):
    """A value of the option that is not its default."""
    if spec.kind is bool:
        return not spec.default
    if spec.choices:
        return next((choice for choice in spec.choices if choice != spec.default), spec.choices[0])
    if spec.kind is str:
        return {"split": "8,1,1", "freeze_schedule": "10:1,20:2"}.get(spec.name, f"some-{spec.name}")
    if spec.kind is int:
        return min(7, spec.declaration.maximum or 7)
    return 2.5 if spec.name == "rotary_scaling_factor" else 0.5


@cache
def probe():
    """A command with every option, and the values of its last call; building it takes a tenth of a second."""
    received = {}
    app = typer.Typer()

    @app.command()
    @with_options
    def call(**flags):
        received.update(flags)

    return typer.main.get_command(app), received


def received_flags(arguments):
    """What the command function receives for these arguments."""
    command, received = probe()
    received.clear()
    command.main(arguments, standalone_mode=False)
    return dict(received)


def toml_value(value):
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


@table("name", FLAGS)
def test_flag_file_and_run_json_agree(name):
    spec = FLAGS[name]
    value = other_value(spec)
    words = [spec.flag if value else f"--no-{spec.flag[2:]}"] if spec.kind is bool else [spec.flag, str(value)]
    by_flag = resolve(flags=SMALL | {key: got for key, got in received_flags(words).items() if got is not None})
    text = f"[{spec.concern}]\n{name} = {toml_value(value)}\n"
    rest = {key: given for key, given in SMALL.items() if key != name}
    by_file = resolve(flags=rest, file=parse_config_file(text, "c.toml"))
    assert by_flag == by_file
    assert getattr(by_file.concern(spec.concern), name) == value
    assert by_flag.sources[name] == "flag"
    assert by_file.sources[name] == "file"
    document = json.loads(json.dumps(config_document(by_file), allow_nan=False))
    assert document["config"][spec.concern][name] == value
    assert document["config_sources"][spec.concern][name] == "file"


def test_config_document_resolves_to_the_same_config():
    config = config_of(**SMALL, sparsify=True, freeze_schedule="3:1")
    tables = json.loads(json.dumps(config_document(config)))["config"]
    flat = {name: value for table in tables.values() for name, value in table.items() if name in FLAGS}
    assert resolve(flags=flat) == config


def test_options_have_a_flag_and_a_help_of_at_most_12_words():
    specs = option_specs()
    assert specs["num_layers"].flag == "--num-layers"
    helps = {spec.name: spec.declaration.help for spec in specs.values()}
    assert [name for name, text in helps.items() if not text.endswith(".") or len(text.split()) > 12] == []
    assert [spec.name for spec in specs.values() if not spec.is_flag] == ["family", "data_parallel_size"]


def test_with_options_missing_flags_are_none():
    assert set(received_flags([]).values()) == {None}


def test_resolve_flags_override_the_file():
    config = resolve(flags=SMALL | {"seed": 2}, file={"seed": 3, "clip_grad": 0.5})
    assert (config.training.seed, config.optimizer.clip_grad) == (2, 0.5)
    assert (config.sources["seed"], config.sources["clip_grad"]) == ("flag", "file")


def test_resolve_derived_defaults_follow_other_values():
    config = config_of(DefaultContext(world_size=2), **SMALL, schedule="interleaved-1f1b")
    assert config.model.ffn_hidden_size == 256
    assert config.model.max_position_embeddings == 32
    assert config.training.global_batch_size == 2
    assert config.optimizer.lr_decay_iters == config.pruning.pruning_end_iter == 50
    assert config.parallel.pipeline_model_parallel_size == 2
    assert config.num_stages == 4
    assert config.padded_vocab_size == 1024
    assert config.sources["ffn_hidden_size"] == "derived"
    assert config.sources["weight_decay"] == "default"


@pytest.mark.parametrize(
    ("blocks", "layers", "workers", "schedule", "virtual"),
    [(3, 24, 4, "interleaved-1f1b", 2), (1, 8, 2, "interleaved-1f1b", 4), (4, 8, 2, "1f1b", 1)],
)
def test_resolve_virtual_stages_follow_from_blocks(blocks, layers, workers, schedule, virtual):
    given = {"num_layers_per_virtual_pipeline_stage": blocks, "num_layers": layers, "global_batch_size": 16}
    config = config_of(DefaultContext(world_size=workers), **SMALL | given)
    assert validate(config, workers) == []
    assert (config.parallel.schedule, config.parallel.virtual_stages_per_worker) == (schedule, virtual)


def test_resolve_data_parallel_size_follows_from_world_size():
    config = config_of(DefaultContext(world_size=4), **SMALL, pipeline_model_parallel_size=2)
    assert config.parallel.data_parallel_size == 2
    assert config.training.global_batch_size == 4
    assert config.microbatches == 1


@pytest.mark.parametrize(
    ("given", "pipeline", "replicas"),
    [
        ({}, 4, 1),
        ({"tensor_model_parallel_size": 1}, 1, 4),
        ({"tensor_model_parallel_size": 2}, 1, 2),
        ({"DDP_impl": "torch"}, 1, 4),
        ({"zero_stage": 2}, 1, 4),
        ({"zero_stage": 0}, 4, 1),
        ({"zero_stage": 2, "pipeline_model_parallel_size": 2}, 2, 2),
    ],
)
def test_resolve_megatron_parallel_options_imply_replicas(given, pipeline, replicas):
    """Megatron has no pipeline by default; without these options all processes are pipeline ranks."""
    parallel = config_of(DefaultContext(world_size=4), **SMALL, **given).parallel
    assert (parallel.pipeline_model_parallel_size, parallel.data_parallel_size) == (pipeline, replicas)


def test_resolve_vocab_size_comes_from_the_tokenizer():
    context = DefaultContext(tokenizer_vocab_size=lambda values: {"t.json": 300}.get(values["tokenizer_model"]))
    without = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    assert config_of(context, **without, tokenizer_model="t.json").model.vocab_size == 300
    with pytest.raises(DocumentError, match="--vocab-size: is required"):
        config_of(context, **without)


def test_warmup_samples_from_steps_or_fraction():
    assert config_of(**SMALL, global_batch_size=8, lr_warmup_iters=5).warmup_samples == 40
    assert config_of(**SMALL, lr_warmup_fraction=0.1, global_batch_size=8, lr_decay_iters=40).warmup_samples == 32


def test_resolve_reports_every_invalid_value():
    bad = SMALL | {"num_layers": 0, "lr": float("nan"), "schedule": "2f2b", "seed": 1.5, "nonsense": 1}
    del bad["hidden_size"]
    with pytest.raises(DocumentError) as caught:
        config_of(**bad)
    assert {(problem.path, problem.kind) for problem in caught.value.problems} == {
        ("--hidden-size", "missing"),
        ("--num-layers", "range"),
        ("--lr", "range"),
        ("--schedule", "choice"),
        ("--seed", "type"),
        ("nonsense", "unknown"),
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_dropout", 1.0, "below 1"),
        ("final_sparsity", -0.1, "at least 0"),
        ("lr", 0, "above 0"),
        ("lr_warmup_fraction", 1.5, "at most 1"),
        ("adam_eps", float("inf"), "finite"),
        ("run_dir", "", "empty"),
    ],
)
def test_resolve_value_out_of_bounds_is_refused(name, value, words):
    with pytest.raises(DocumentError, match=words):
        config_of(**SMALL | {name: value})


def test_address_in_place_of_a_path_is_refused():
    """s3://bucket/run would be a folder "s3:" of this machine, and a missing checkpoint."""
    names = [spec.name for spec in option_specs().values() if spec.declaration.refers_to != "value"]
    assert {"load", "save", "run_dir", "data_path", "tokenizer_model", "bert_load", "tensorboard_dir"} <= set(names)
    for name in names:
        for text in ("s3://b/x", "hf://a/b", "0.3 a 0.7 gs://b/c"):
            _, problem = option_specs()[name].convert(text)
            assert "must be a local path" in problem.message
        assert option_specs()[name].convert("runs/a:b") == ("runs/a:b", None)
    assert "dynmo-ckpt convert" in option_specs()["load"].convert("s3://b/x")[1].message
    assert option_specs()["mlflow_tracking_uri"].convert("https://h/x")[1] is None


def test_convert_integer_is_a_number_but_true_is_not():
    assert config_of(**SMALL | {"clip_grad": 2}).optimizer.clip_grad == 2.0
    with pytest.raises(DocumentError, match="must be an integer, is True"):
        config_of(**SMALL | {"seed": True})


@pytest.mark.parametrize(
    ("text", "path", "kind"),
    [
        ("num_layer = 3", "num_layer", "unknown"),
        ("[model]\nlr = 0.1", "model.lr", "place"),
        ("[models]\nnum_layers = 1", "models", "unknown"),
        ("family = 'gpt'", "family", "unknown"),
        ("num_layers = 1\n[model]\nnum_layers = 2", "model.num_layers", "repeated"),
        ("num_layers = ", "", "toml"),
    ],
)
def test_parse_config_file_invalid_file_is_refused(text, path, kind):
    with pytest.raises(DocumentError) as caught:
        parse_config_file(text, "c.toml")
    assert [(problem.path, problem.kind) for problem in caught.value.problems] == [(path, kind)]


def test_read_config_file_misspelled_key_gets_a_suggestion(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("num-layer = 3\n")
    with pytest.raises(DocumentError, match="did you mean num_layers"):
        read_config_file(file)


@pytest.mark.parametrize(("name", "words"), [("none.toml", "no such file"), (".", "is a folder, not a file")])
def test_read_config_file_missing_file_is_refused(tmp_path, name, words):
    with pytest.raises(UsageError) as error:
        read_config_file(tmp_path / name)
    assert str(error.value) == f"--config {tmp_path / name}: {words}; give the path of a TOML file"


def test_parse_split_is_normalized():
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("8, 2") == (0.8, 0.2, 0.0)
    assert parse_split("1") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1"])
def test_parse_split_invalid_split_is_refused(text):
    with pytest.raises(UsageError, match="--split"):
        parse_split(text)


def test_parse_freeze_schedule_returns_pairs():
    assert parse_freeze_schedule("100:2, 300:4") == ((100, 2), (300, 4))
    assert config_of(**SMALL).freezing.freeze_steps == ()


@pytest.mark.parametrize("text", ["100", "a:1", "1:-1", "5:1,5:2", "5:2,6:1", "5:1,"])
def test_parse_freeze_schedule_invalid_schedule_is_refused(text):
    with pytest.raises(UsageError, match="--freeze-schedule"):
        parse_freeze_schedule(text)
