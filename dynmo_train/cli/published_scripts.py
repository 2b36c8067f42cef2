"""Scripts of other projects and the equivalent command or script of this project.

``explain-flags`` reads this table, ``dynmo_train/launch/README.md`` shows it, and tests compare ``bin/`` with it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedScript:
    """A program or script of another project.

    Attributes:
        name: file name, with its folder if the name is ambiguous; ``*`` matches any characters.
        equivalent: a command such as ``dynmo-train pretrain gpt``, or a script of ``bin/``.
        source: project of the script, one of ``SOURCES``.
    """

    name: str
    equivalent: str
    source: str


MEGATRON = "Megatron-LM"
DEEPSPEED = "Megatron-DeepSpeed"
DYNMO = "DynMo"
OPTIMUS = "Optimus-CC"
AWS = "AWS test case"
GUIDE = "DeepSpeed guide"
OTHERS = "other programs"
SOURCES = (DYNMO, MEGATRON, DEEPSPEED, OPTIMUS, AWS, GUIDE, OTHERS)


def _same(source: str, *names: str) -> tuple[PublishedScript, ...]:
    """Scripts with the same name in ``bin/``."""
    return tuple(PublishedScript(name, f"bin/{name}", source) for name in names)


TABLE: tuple[PublishedScript, ...] = (
    *_same(DYNMO, "bert_example.sh"),
    PublishedScript("pretrain_gpt.py", "dynmo-train pretrain gpt", MEGATRON),
    PublishedScript("pretrain_bert.py", "dynmo-train pretrain bert", MEGATRON),
    PublishedScript("pretrain_t5.py", "dynmo-train pretrain t5", MEGATRON),
    PublishedScript("pretrain_ict.py", "dynmo-train pretrain ict", MEGATRON),
    PublishedScript("pretrain_llama.py", "dynmo-train pretrain llama", MEGATRON),
    PublishedScript("preprocess_data.py", "dynmo-prep binarize", MEGATRON),
    PublishedScript("merge_datasets.py", "dynmo-prep merge-indexed", MEGATRON),
    PublishedScript("generate_samples_gpt.py", "dynmo-train generate", MEGATRON),
    PublishedScript("generate_samples_gpt2.py", "dynmo-train generate", MEGATRON),
    PublishedScript("main.py", "dynmo-train tasks", MEGATRON),
    PublishedScript("merge_mp_partitions.py", "dynmo-ckpt merge_mp_partitions", MEGATRON),
    PublishedScript("blacklist_urls.py", "dynmo-prep blacklist-urls", MEGATRON),
    PublishedScript("merge_jsons.py", "dynmo-prep merge", MEGATRON),
    PublishedScript("add_id.py", "dynmo-prep add-id", MEGATRON),
    PublishedScript("cleanup_dataset.py", "dynmo-prep clean", MEGATRON),
    PublishedScript("cleanup_fix_dataset.py", "dynmo-prep fix", MEGATRON),
    PublishedScript("find_duplicates.py", "dynmo-prep find-duplicates", MEGATRON),
    PublishedScript("find_duplicate.py", "dynmo-prep find-duplicates", MEGATRON),
    PublishedScript("group_duplicate_url.py", "dynmo-prep group-duplicates", MEGATRON),
    PublishedScript("group_duplicate_urls.py", "dynmo-prep group-duplicates", MEGATRON),
    PublishedScript("remove_group_duplicates.py", "dynmo-prep remove-duplicates", MEGATRON),
    PublishedScript("filter_ngrams.py", "dynmo-prep decontaminate", MEGATRON),
    *_same(
        MEGATRON,
        *("pretrain_gpt.sh", "pretrain_gpt_distributed.sh", "pretrain_gpt_distributed_with_mp.sh"),
        *("pretrain_bert.sh", "pretrain_bert_distributed.sh", "pretrain_bert_distributed_with_mp.sh"),
        *("pretrain_t5.sh", "pretrain_t5_distributed.sh", "pretrain_t5_distributed_with_mp.sh"),
        *("pretrain_gpt3_175B.sh", "evaluate_zeroshot_gpt.sh", "merge_mp_bert.sh"),
        *("finetune_mnli_distributed.sh", "finetune_race_distributed.sh"),
    ),
    *_same(DEEPSPEED, "download_ckpt.sh", "download_vocab.sh", "generate_text.sh"),
    PublishedScript("pretrain_gpt_cc.py", "dynmo-train pretrain gpt", OPTIMUS),
    PublishedScript("ckpt_convert.py", "dynmo-ckpt ckpt_convert", OPTIMUS),
    PublishedScript("tbl2_fig9_tbl4/*.sh", "bin/ASPLOS23/tbl2_fig9_tbl4.sh", OPTIMUS),
    PublishedScript("fig10/*.sh", "bin/ASPLOS23/fig10.sh", OPTIMUS),
    PublishedScript("fig11/*.sh", "bin/ASPLOS23/fig11.sh", OPTIMUS),
    PublishedScript("fig12/*.sh", "bin/ASPLOS23/fig12.sh", OPTIMUS),
    PublishedScript("fig14/*", "bin/ASPLOS23/fig14.sh", OPTIMUS),
    PublishedScript("lsf_job_submit.sub", "bin/ASPLOS23/lsf_job_submit.sub", OPTIMUS),
    PublishedScript("0.distributed-training.Dockerfile", "Dockerfile", AWS),
    *_same(
        AWS,
        *("getdata-job.yaml-template", "prepdata-job.yaml-template", "pytorchjob.yaml-template"),
        *("1.data-preprocessing.sbatch", "2.distributed-training.sbatch", "3.distributed-training.sbatch"),
        *("3.data-preproc-llama2.sbatch", "4.pre-train-llama2.sbatch"),
    ),
    PublishedScript("pretrain_gpt2.py", "dynmo-train pretrain gpt", GUIDE),
    *_same(GUIDE, "pretrain_gpt2_distributed.sh", "ds_pretrain_gpt2.sh", "ds_zero_stage_2_config.json"),
    PublishedScript("WikiExtractor.py", "dynmo-prep extract-wiki", OTHERS),
    PublishedScript("download.py", "dynmo-prep fetch-urls", OTHERS),
    PublishedScript("shuf", "dynmo-prep shuffle", OTHERS),
    PublishedScript("convert_megatron_gpt2_checkpoint.py", "dynmo-ckpt convert", OTHERS),
    PublishedScript("convert_megatron_bert_checkpoint.py", "dynmo-ckpt convert", OTHERS),
)
# Programs with positional arguments, and the role of each argument in the equivalent command.
POSITIONAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "blacklist_urls.py": ("the input", "--output"),
    "cleanup_dataset.py": ("the input", "--output"),
    "group_duplicate_url.py": ("the input", "--output", "--threshold"),
    "group_duplicate_urls.py": ("the input", "--output", "--threshold"),
    "remove_group_duplicates.py": ("--groups", "the input", "--output"),
}
# Flags of classic tools that commands of another package accept but do not show in their help.
CLASSIC_FLAGS: Mapping[tuple[str, str], str] = {
    ("dynmo-prep add-id", "--input-file"): "--input",
    ("dynmo-prep add-id", "--output-file"): "--output",
    ("dynmo-prep extract-wiki", "--json"): "the output is JSON lines, in the folder of -o: AA/wiki_00",
    ("dynmo-prep extract-wiki", "--processes"): "--workers",
    ("dynmo-prep merge", "--json_path"): "--input: the .json files of the folder",
    ("dynmo-prep find-duplicates", "--inputs"): "--input and --id-key, for each pair of file and key",
    ("dynmo-prep decontaminate", "--dedup-dataset"): "--input and --json-key",
    ("dynmo-prep decontaminate", "--lambada-path"): "--task lambada=FILE",
    ("dynmo-prep decontaminate", "--tasks"): "--task, one per task",
}
# Tasks of Megatron's tasks/main.py.
TASKS: Mapping[str, str] = {
    "WIKITEXT103": "evaluate wikitext",
    "LAMBADA": "evaluate lambada",
    "MNLI": "finetune mnli",
    "RACE": "finetune race",
}
LAUNCHERS: Mapping[str, str] = {
    "torch.distributed.launch": "dynmo-train launch node",
    "torch.distributed.run": "dynmo-train launch node",
    "torchrun": "dynmo-train launch node",
    "deepspeed": "dynmo-train launch hostfile",
    "srun": "dynmo-train launch slurm",
    "bsub": "dynmo-train launch lsf",
}


def find(path: str) -> PublishedScript | None:
    """The row of a script given by its path; None for an unknown script."""
    name = path.rpartition("/")[2]
    for row in TABLE:
        if row.name == name or ("/" in row.name and fnmatch.fnmatchcase(f"/{path}", f"*/{row.name}")):
            return row
    return None


def _launcher_rows() -> list[str]:
    by_command: dict[str, list[str]] = {}
    for word, command in LAUNCHERS.items():
        by_command.setdefault(command, []).append(f"`{word}`")
    return [f"| {', '.join(words)} | `{command}` |" for command, words in by_command.items()]


def markdown() -> str:
    """The Markdown tables of the README, one per source."""
    parts: list[str] = []
    for source in SOURCES:
        rows = [f"| `{row.name}` | `{row.equivalent}` |" for row in TABLE if row.source == source]
        if source == MEGATRON:
            rows += [f"| `main.py --task {task}` | `dynmo-train {command}` |" for task, command in TASKS.items()]
        if source == OTHERS:
            rows.append("| `main.py --tasks` (lm-evaluation-harness) | `dynmo-train evaluate lm-eval` |")
            rows += _launcher_rows()
        parts.append("\n".join([f"| {source} | equivalent |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from .._common.console import emit

    emit(markdown().rstrip())
