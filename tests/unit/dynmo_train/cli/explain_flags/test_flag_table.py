"""Rows of the page of flags: the real parser does what each row states."""

from __future__ import annotations

import tomllib

import pytest
import typer

from dynmo_train._common.document import DocumentError
from dynmo_train.cli import app
from dynmo_train.cli.explain_flags.flag_table import declared_flags, markdown, project_flags, rows, torchtitan_rows
from dynmo_train.config.compat.flags import FLAGS
from dynmo_train.config.compat.megatron_model import COMBINED_FLAGS
from dynmo_train.config.compat.torchtitan import TORCHTITAN, torchtitan_advice
from dynmo_train.config.compat.translate import RENAMED_VALUES, declared_name
from dynmo_train.config.resolve import built_in_specs, parse_config_file
from tests.tables import table

ROOT = typer.main.get_command(app)
COMMANDS = ROOT.commands["pretrain"].commands
FAMILIES = declared_flags(ROOT)
ROWS = [*rows(FAMILIES), *torchtitan_rows()]
SPECS = built_in_specs()


def of(status):
    return [pytest.param(row, id=row.flag) for row in ROWS if row.status == status]


def parsed(words, family="gpt"):
    """Values of the options that a command line sets."""
    # Sequence parallelism alone has no effect.
    alone = {"--sequence-parallel", "--parallelism.enable_sequence_parallel"} & set(words)
    sizes = ["--tensor-model-parallel-size", "2"] if alone else []
    context = COMMANDS[family].make_context(family, [*words, *sizes])
    return {name: value for name, value in context.params.items() if value is not None}


def flag_of(row):
    return row.flag if row.flag.startswith("-") else f"--{row.flag}"


def sample(spec):
    """A value that an option accepts, as a word."""
    if spec.choices:
        return spec.choices[-1]
    limits = spec.declaration
    low = limits.minimum if limits.minimum is not None else (limits.above or 0)
    high = limits.maximum if limits.maximum is not None else limits.below
    number = low + 1 if high is None or high > low + 1 else (low + high) / 2
    return {str: "text", int: str(int(number)), float: str(float(number))}[spec.kind]


def spec_of(flag):
    return next(spec for spec in SPECS.values() if flag in (spec.flag, spec.negative))


@table("row", of("same"))
def test_row_same_parses_to_the_named_key(row):
    name = declared_name(row.flag, FAMILIES["gpt"], FLAGS)
    spec = spec_of(name)
    assert f"`[{spec.concern}] {spec.name}" in row.here
    if spec.kind is bool:
        assert parsed([row.flag])[spec.name] is (name == spec.flag)
    else:
        assert str(parsed([row.flag, sample(spec)])[spec.name]) == sample(spec)


@table("row", [each for each in of("renamed") if each.id not in COMBINED_FLAGS])
def test_row_renamed_parses_to_our_option(row):
    known = FLAGS[flag_of(row)]
    name = known.arguments[-1] if known.arguments[-1].startswith("--") else known.arguments[-2]
    spec = spec_of(name)
    assert f"`{' '.join(known.arguments)}" in row.here
    takes_value = known.num_values != 0
    value = next(iter(known.renamed_values), sample(spec)) if takes_value and spec.kind is not bool else None
    found = parsed([flag_of(row), *([value] if value else [])])
    if spec.kind is bool:
        assert found[spec.name] is (name == spec.flag)
    elif known.arguments[-1] == name and not known.drop_values:
        assert str(found[spec.name]) == known.renamed_values.get(value, value)
    else:
        assert str(found[spec.name]) == known.arguments[-1]


@table("row", of("no effect"))
def test_row_without_effect_is_reported_with_its_reason(row, capsys):
    known = FLAGS[flag_of(row)]
    family = known.families[0] if known.families else "gpt"
    words = [flag_of(row), *["1"] * (known.num_values or 0)]
    assert parsed(words, family) == parsed([], family)
    assert f"accepted for compatibility and ignored: {flag_of(row)}: {known.reason}" in capsys.readouterr().err
    assert row.here.startswith(known.reason)


@table("row", of("refused"))
def test_row_refused_ends_with_the_remedy_of_the_row(row):
    known = FLAGS[flag_of(row)]
    with pytest.raises(DocumentError) as caught:
        parsed([flag_of(row), *["other"] * (known.num_values or 0)])
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.path == flag_of(row)
    assert row.here.partition("; `")[0] in (problem.message, problem.message.partition("; `")[0])
    assert len(problem.message) > len("not supported: ")


@table("flag", [flag for flag, known in FLAGS.items() if known.neutral is not None])
def test_neutral_value_of_a_refused_flag_is_accepted(flag, capsys):
    neutral = FLAGS[flag].neutral
    assert parsed([flag, neutral]) == parsed([f"{flag}={neutral}"]) == parsed([])
    assert f"{flag}: {neutral} changes nothing" in capsys.readouterr().err


@table(
    ("flag", "theirs", "ours"),
    [(flag, theirs, ours) for flag, known in FLAGS.items() for theirs, ours in known.renamed_values.items()]
    + [(flag, theirs, ours) for flag, values in RENAMED_VALUES.items() for theirs, ours in values.items()],
)
def test_renamed_values_are_values_of_our_option(flag, theirs, ours):
    name = FLAGS[flag].arguments[0] if flag in FLAGS else flag
    assert str(parsed([flag, theirs])[spec_of(name).name]) == ours


def test_every_flag_of_the_table_belongs_to_a_project():
    listed = {flag for flags in project_flags().values() for flag in flags}
    missing = sorted(flag for flag in FLAGS if flag.removeprefix("--") not in TORCHTITAN and flag not in listed)
    assert missing == [], "add them to the projects that have them, in cli/explain_flags/project_flags.toml"
    assert all(len(flags) == len(set(flags)) for flags in project_flags().values())


def test_page_has_a_row_for_each_flag_and_counts_them():
    text = "\n".join(markdown(ROOT))
    assert all(f"\n| `{row.flag}` | " in text for row in ROWS)
    counts = [sum(row.status == "same" and project in row.projects for row in ROWS) for project in project_flags()]
    assert all(f"| {project} | {count} | " in text for project, count in zip(project_flags(), counts, strict=True))


# Values of the types that torchtitan 0.2.2 has for the keys that become options.
TORCHTITAN_FILE = """
job.dump_folder = "outputs"
metrics = {log_freq = 10, save_tb_folder = "tb"}
memory_estimation.enable = true
quantize.linear.float8.recipe_name = "rowwise"
optimizer = {name = "AdamW", lr = 3e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1}
lr_scheduler = {warmup_steps = 200, total_steps = 1000, decay_type = "linear"}
debug.seed = 1
[training]
max_context_length = 2048
local_batch_size = 8
batch_size = 8
global_batch_size = 64
gradient_accumulation_steps = 2
seq_len = 2048
max_norm = 1.0
steps = 1000
seed = 1
warmup_steps = 200
compile = true
dataloader.num_workers = 2
dataset_path = "allenai/c4"
[parallelism]
enable_sequence_parallel = true
data_parallel_replicate_degree = 1
enable_async_tensor_parallel = true
tensor_parallel_degree = 1
context_parallel_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1
pipeline_parallel_layers_per_stage = 2
expert_parallel_degree = 1
[checkpoint]
folder = "checkpoint"
interval = 500
initial_load_path = "seed"
initial_load_model_only = true
keep_latest_k = 10
[activation_checkpoint]
mode = "selective"
class = "FullAC"
[compile]
enable_async_tensor_parallel = true
enable = true
backend = "inductor"
[validation]
dataset_path = "allenai/c4"
freq = 10
steps = 4

[validator]
freq = 5
steps = 10
"""


def flat(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_torchtitan_keys_become_options_of_their_type():
    values = dict(flat(tomllib.loads(TORCHTITAN_FILE)))
    assert set(values) == {key for key, known in TORCHTITAN.items() if known.kind == "becomes"}
    for key, value in values.items():
        known = TORCHTITAN[key]
        spec = spec_of(known.arguments[-1])
        renamed = known.renamed_values.get(value, value) if isinstance(value, str) else value
        assert spec.convert(renamed) == (value if renamed == value else renamed, None), key
        assert (spec.kind is bool) == (known.num_values == 0), key


def test_torchtitan_file_is_refused_with_our_keys():
    text = (
        'compile.enable = true\n[training]\nseq_len = 2048\ndataset = "c4"\n[parallelism]\ntensor_parallel_degree = 2\n'
    )
    with pytest.raises(DocumentError) as caught:
        parse_config_file(text, "titan.toml")
    messages = {problem.path: problem.message for problem in caught.value.problems}
    assert messages["training.seq_len"] == "unknown option; a key of torchtitan: use seq_length"
    assert "--hf-dataset allenai/c4 --hf-dataset-name en" in messages["training.dataset"]
    assert messages["parallelism.tensor_parallel_degree"].endswith("use tensor_model_parallel_size")
    assert messages["compile.enable"].endswith("use torch_compile")


def test_torchtitan_advice_knows_tables_and_nothing_else():
    assert "a table of torchtitan" in torchtitan_advice("training.dataloader")
    assert "leave it out" in torchtitan_advice("training.gc_freq")
    assert torchtitan_advice("training.sequence") is None
    with pytest.raises(DocumentError, match="unknown table; must be one of"):
        parse_config_file("[unknown]\nx = 1\n", "f.toml")
