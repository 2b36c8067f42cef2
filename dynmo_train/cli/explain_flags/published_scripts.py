"""The published scripts that this project stands in for, and the command or script here that does the work of each.

One table: ``explain-flags`` reads it, ``dynmo_train/launch/README.md`` shows it, ``bin/`` is tested against it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A program or script of another project, by its file name; ``*`` stands for anything.

    Attributes:
        name: file name, with its folder where that tells it from others.
        ours: the command here, such as ``dynmo-train pretrain gpt``, or a script of ``bin/``.
        source: who publishes it: a word of ``SOURCES``.
    """

    name: str
    ours: str
    source: str


MEGATRON = "Megatron-LM"
DEEPSPEED = "Megatron-DeepSpeed"
DYNMO = "DynMo"
OPTIMUS = "Optimus-CC"
AWS = "AWS test case"
GUIDE = "DeepSpeed guide"
OTHERS = "other programs"
SOURCES = (DYNMO, MEGATRON, DEEPSPEED, OPTIMUS, AWS, GUIDE, OTHERS)


def _same(source: str, *names: str) -> tuple[Published, ...]:
    """Scripts that are in ``bin/`` under their own names."""
    return tuple(Published(name, f"bin/{name}", source) for name in names)


TABLE: tuple[Published, ...] = (
    *_same(DYNMO, "bert_example.sh"),
    Published("pretrain_gpt.py", "dynmo-train pretrain gpt", MEGATRON),
    Published("pretrain_bert.py", "dynmo-train pretrain bert", MEGATRON),
    Published("pretrain_t5.py", "dynmo-train pretrain t5", MEGATRON),
    Published("pretrain_ict.py", "dynmo-train pretrain ict", MEGATRON),
    Published("pretrain_llama.py", "dynmo-train pretrain llama", MEGATRON),
    Published("preprocess_data.py", "dynmo-prep binarize", MEGATRON),
    Published("merge_datasets.py", "dynmo-prep merge-indexed", MEGATRON),
    Published("generate_samples_gpt.py", "dynmo-train generate", MEGATRON),
    Published("generate_samples_gpt2.py", "dynmo-train generate", MEGATRON),
    Published("main.py", "dynmo-train tasks", MEGATRON),
    Published("merge_mp_partitions.py", "dynmo-ckpt merge_mp_partitions", MEGATRON),
    Published("blacklist_urls.py", "dynmo-prep blacklist-urls", MEGATRON),
    Published("merge_jsons.py", "dynmo-prep merge", MEGATRON),
    Published("add_id.py", "dynmo-prep add-id", MEGATRON),
    Published("cleanup_dataset.py", "dynmo-prep clean", MEGATRON),
    Published("cleanup_fix_dataset.py", "dynmo-prep fix", MEGATRON),
    Published("find_duplicates.py", "dynmo-prep find-duplicates", MEGATRON),
    Published("find_duplicate.py", "dynmo-prep find-duplicates", MEGATRON),
    Published("group_duplicate_url.py", "dynmo-prep group-duplicates", MEGATRON),
    Published("group_duplicate_urls.py", "dynmo-prep group-duplicates", MEGATRON),
    Published("remove_group_duplicates.py", "dynmo-prep remove-duplicates", MEGATRON),
    Published("filter_ngrams.py", "dynmo-prep decontaminate", MEGATRON),
    *_same(
        MEGATRON,
        *("pretrain_gpt.sh", "pretrain_gpt_distributed.sh", "pretrain_gpt_distributed_with_mp.sh"),
        *("pretrain_bert.sh", "pretrain_bert_distributed.sh", "pretrain_bert_distributed_with_mp.sh"),
        *("pretrain_t5.sh", "pretrain_t5_distributed.sh", "pretrain_t5_distributed_with_mp.sh"),
        *("pretrain_gpt3_175B.sh", "evaluate_zeroshot_gpt.sh", "merge_mp_bert.sh"),
        *("finetune_mnli_distributed.sh", "finetune_race_distributed.sh"),
    ),
    *_same(DEEPSPEED, "download_ckpt.sh", "download_vocab.sh", "generate_text.sh"),
    Published("pretrain_gpt_cc.py", "dynmo-train pretrain gpt", OPTIMUS),
    Published("ckpt_convert.py", "dynmo-ckpt ckpt_convert", OPTIMUS),
    Published("tbl2_fig9_tbl4/*.sh", "bin/ASPLOS23/tbl2_fig9_tbl4.sh", OPTIMUS),
    Published("fig10/*.sh", "bin/ASPLOS23/fig10.sh", OPTIMUS),
    Published("fig11/*.sh", "bin/ASPLOS23/fig11.sh", OPTIMUS),
    Published("fig12/*.sh", "bin/ASPLOS23/fig12.sh", OPTIMUS),
    Published("fig14/*", "bin/ASPLOS23/fig14.sh", OPTIMUS),
    Published("lsf_job_submit.sub", "bin/ASPLOS23/lsf_job_submit.sub", OPTIMUS),
    Published("0.distributed-training.Dockerfile", "Dockerfile", AWS),
    *_same(
        AWS,
        *("getdata-job.yaml-template", "prepdata-job.yaml-template", "pytorchjob.yaml-template"),
        *("1.data-preprocessing.sbatch", "2.distributed-training.sbatch", "3.distributed-training.sbatch"),
        *("3.data-preproc-llama2.sbatch", "4.pre-train-llama2.sbatch"),
    ),
    Published("pretrain_gpt2.py", "dynmo-train pretrain gpt", GUIDE),
    *_same(GUIDE, "pretrain_gpt2_distributed.sh", "ds_pretrain_gpt2.sh", "ds_zero_stage_2_config.json"),
    Published("WikiExtractor.py", "dynmo-prep extract-wiki", OTHERS),
    Published("download.py", "dynmo-prep fetch-urls", OTHERS),
    Published("shuf", "dynmo-prep shuffle", OTHERS),
    Published("convert_megatron_gpt2_checkpoint.py", "dynmo-ckpt convert", OTHERS),
    Published("convert_megatron_bert_checkpoint.py", "dynmo-ckpt convert", OTHERS),
)
# Programs that take files by their places, and what each place is to the command here.
PLACES: Mapping[str, tuple[str, ...]] = {
    "blacklist_urls.py": ("the input", "--output"),
    "cleanup_dataset.py": ("the input", "--output"),
    "group_duplicate_url.py": ("the input", "--output", "--threshold"),
    "group_duplicate_urls.py": ("the input", "--output", "--threshold"),
    "remove_group_duplicates.py": ("--groups", "the input", "--output"),
}
# Flags that commands of another package take from classic tools and their help does not show.
CLASSIC_FLAGS: Mapping[tuple[str, str], str] = {
    ("dynmo-prep add-id", "--input-file"): "--input",
    ("dynmo-prep add-id", "--output-file"): "--output",
    ("dynmo-prep merge", "--json_path"): "--input: the .json files of the folder",
    ("dynmo-prep find-duplicates", "--inputs"): "--input and --id-key, of each pair of a file and a key",
    ("dynmo-prep decontaminate", "--dedup-dataset"): "--input and --json-key",
    ("dynmo-prep decontaminate", "--lambada-path"): "--task lambada=FILE",
    ("dynmo-prep decontaminate", "--tasks"): "--task, of each",
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


def find(path: str) -> Published | None:
    """The row of a script that is named by its path; None where the table has none."""
    name = path.rpartition("/")[2]
    for row in TABLE:
        if row.name == name or ("/" in row.name and fnmatch.fnmatchcase(f"/{path}", f"*/{row.name}")):
            return row
    return None


def _launcher_rows() -> list[str]:
    named: dict[str, list[str]] = {}
    for word, ours in LAUNCHERS.items():
        named.setdefault(ours, []).append(f"`{word}`")
    return [f"| {', '.join(words)} | `{ours}` |" for ours, words in named.items()]


def markdown() -> str:
    """The table for the README: one part for each source, with their name on the left and ours on the right."""
    parts: list[str] = []
    for source in SOURCES:
        rows = [f"| `{row.name}` | `{row.ours}` |" for row in TABLE if row.source == source]
        if source == MEGATRON:
            rows += [f"| `main.py --task {task}` | `dynmo-train {ours}` |" for task, ours in TASKS.items()]
        if source == OTHERS:
            rows.append("| `main.py --tasks` (lm-evaluation-harness) | `dynmo-train evaluate lm-eval` |")
            rows += _launcher_rows()
        parts.append("\n".join([f"| {source} | here |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from ..._common.console import emit

    emit(markdown().rstrip())
