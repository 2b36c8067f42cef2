"""The ``#SBATCH`` lines of a script: variables that Slurm sets in a job, and options of its submission."""

from __future__ import annotations

import re
import shlex

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "J": "job-name",
    "t": "time",
    "p": "partition",
    "A": "account",
    "c": "cpus-per-task",
}
# Variables of a job, and the options that set them.
_VARIABLES = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NNODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_JOB_NAME": "job-name",
    "SLURM_JOB_PARTITION": "partition",
    "SLURM_JOB_ACCOUNT": "account",
}
# What the launcher sets itself: the processes of a node, and how a job ends and is requeued.
_OF_THE_LAUNCHER = ("ntasks", "ntasks-per-node", "gpus-per-node", "signal", "requeue", "open-mode")
_LAUNCH_OPTIONS = ("nodes", "job-name", "time", "partition", "account", "qos", "cpus-per-task", "output")


def slurm_directives(text: str) -> dict[str, str]:
    """Options of the ``#SBATCH`` lines before the first command, by name; a flag is empty."""
    found: dict[str, str] = {}
    first = re.search(r"^[^#\s]", text, re.MULTILINE)
    for match in _DIRECTIVE.finditer(text, 0, first.start() if first else len(text)):
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:
            continue
        while words:
            name, equals, value = words.pop(0).partition("=")
            name = _SHORT.get(name[1:], name[1:]) if not name.startswith("--") else name[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            found[name] = value
    gpus = re.fullmatch(r"gpu(?::\w+)?:(\d+)", found.get("gres", ""))
    if gpus:
        found.setdefault("gpus-per-node", gpus[1])
    return found


def slurm_variables(directives: dict[str, str]) -> dict[str, str]:
    """Variables that Slurm would set in the job."""
    found = {name: directives[option] for name, option in _VARIABLES.items() if directives.get(option)}
    if not directives:
        return {}
    sizes = [directives.get(name, "") for name in ("nodes", "ntasks-per-node")]
    if all(size.isdecimal() and len(size) < 8 for size in sizes):
        found.setdefault("SLURM_NTASKS", str(int(sizes[0]) * int(sizes[1])))
    return {"SLURM_JOB_ID": "", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", **found}


def submission_options(directives: dict[str, str], words: list[str]) -> list[str]:
    """The options of ``dynmo-train launch slurm`` for the directives; ``words`` has precedence."""
    found: list[str] = []
    for name in _LAUNCH_OPTIONS:
        if directives.get(name) and f"--{name}" not in words:
            found += [f"--{name}", directives[name]]
    if directives.get("gpus-per-node") and "--gpus" not in words:
        found += ["--gpus", directives["gpus-per-node"]]
    for name, value in directives.items():
        is_gpu = name == "gres" and value.startswith("gpu")
        if name not in (*_LAUNCH_OPTIONS, *_OF_THE_LAUNCHER) and not is_gpu:
            found += ["--sbatch", f"--{name}={value}" if value else f"--{name}"]
    return found
