"""Batch scripts for Slurm: one job step per node, so that released nodes leave the job; requeue to resume."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS, is_count
from ..._common.errors import DynmoError, UsageError
from ..options import BatchJob, NodeCount, Output, ScriptFile, parse_node_range
from .job_script import bash_array, check_word, export_lines, parse_exports, shell_words

# One step per node instead of one for all: a finished step releases its node, and the others continue.
_BODY = """
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
"""
_RUN = """
declare -A node_of=()  # process of a step: number of its node
# Slurm sends USR1 before the time limit: save, exit and requeue. The signal may arrive immediately.
requeue=
trap 'requeue=time; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM INT

for node in "${!hosts[@]}"; do
  NODE_RANK="$node" srun "${step[@]}" --nodelist="${hosts[node]}" "${command[@]}" &
  node_of[$!]=$node
done

released=()

release_node() {  # a node whose ranks were released
  unset "hosts[$1]"
  local remaining
  remaining=$(IFS=,; echo "${hosts[*]}")
  echo "Released node $1; $remaining continue."
  (cd "$(mktemp -d)" && scontrol update JobId="$SLURM_JOB_ID" NodeList="$remaining") || true
}

code=0
while ((${#node_of[@]})); do
  sleep 1 &
  wait "$!"  # a trap interrupts wait
  finished=()
  for step_id in "${!node_of[@]}"; do
    kill -0 "$step_id" 2>/dev/null || finished+=("$step_id")
  done
  for step_id in "${finished[@]}"; do
    wait "$step_id"
    status=$?
    node=${node_of[$step_id]}
    unset "node_of[$step_id]"
    if ((status == 0 && node > 0)); then released+=("$node"); fi
    if ((status != 0 && code != 75)); then code=$status; fi
  done
  # At the end of a run all steps end together: release a node only if the others still run at the next check.
  if ((${#finished[@]} == 0 && ${#released[@]} && ${#node_of[@]})); then
    for node in "${released[@]}"; do release_node "$node"; done
    released=()
  fi
done

if [[ -n $requeue || $code == 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class HetGroup:
    """A group of identical nodes of a heterogeneous job."""

    nodes: int
    partition: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What only Slurm has."""

    PANEL: ClassVar[str] = "Slurm"

    partition: Annotated[str, typer.Option("--partition", help="Slurm partition.")] = ""
    account: Annotated[str, typer.Option("--account", help="Slurm account.")] = ""
    qos: Annotated[str, typer.Option("--qos", help="Quality of service.")] = ""
    array: Annotated[
        int,
        typer.Option("--array", min=0, max=MAX_COUNT, help="Number of sequential jobs; each resumes the run."),
    ] = 0
    het: Annotated[
        list[str] | None,
        typer.Option("--het", metavar="NODES:PARTITION[:GPUS]", help="Group of a heterogeneous job; repeatable."),
    ] = None
    save_before_s: Annotated[
        int,
        typer.Option(
            "--save-before-s", min=1, max=MAX_COUNT, help="Seconds before the time limit at which to save and requeue."
        ),
    ] = 120
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="--OPTION=VALUE", help="Other option of sbatch; repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SlurmJob(SlurmOptions, BatchJob):
    """A command in a Slurm job."""

    nodes: NodeCount = None
    output: Output = "slurm-%x-%j.out"
    script: ScriptFile = Path("dynmo.sbatch")

    @property
    def node_range(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return parse_node_range("--nodes", self.nodes or "1")

    @property
    def het_groups(self) -> list[HetGroup]:
        """The groups of a heterogeneous job; empty for another job."""
        return [parse_het_group(text) for text in self.het or ()]


def parse_het_group(text: str) -> HetGroup:
    """Parse ``NODES:PARTITION[:GPUS]``, the value of ``--het``.

    Raises:
        UsageError: the value has another form, or numbers out of range.
    """
    words = text.split(":")
    if len(words) not in (2, 3) or not is_count(words[0]) or int(words[0]) < 1 or not all(words):
        raise UsageError(f"--het {text!r}: must be NODES:PARTITION or NODES:PARTITION:GPUS")
    gpus = words[2] if len(words) == 3 else "0"
    if not is_count(gpus):
        raise UsageError(f"--het {text!r}: GPUS must be an integer, the number per node")
    if int(words[0]) > MAX_RANKS or int(gpus) > MAX_JOBS:
        raise UsageError(f"--het {text!r}: must have at most {MAX_RANKS:,} nodes with at most {MAX_JOBS:,} GPUs")
    return HetGroup(nodes=int(words[0]), partition=words[1], gpus=int(gpus))


def _request(nodes: str, partition: str, gpus: int, job: SlurmJob) -> str:
    """The ``#SBATCH`` lines that request a group of nodes."""
    lines = f"#SBATCH --nodes={nodes}\n"
    if "-" not in nodes:  # for a range, a task count makes Slurm allocate the minimum
        lines += "#SBATCH --ntasks-per-node=1\n"
    if partition:
        lines += f"#SBATCH --partition={check_word('--partition', partition)}\n"
    if gpus:
        lines += f"#SBATCH --gpus-per-node={gpus}\n"
    if job.cpus:
        lines += f"#SBATCH --cpus-per-task={job.cpus}\n"
    return lines


def _head(job: SlurmJob) -> str:
    named = {
        "--job-name": job.job_name,
        "--output": job.output,
        "--time": job.time_limit,
        "--account": job.account,
        "--qos": job.qos,
        # One at a time: each element resumes from the checkpoint of the previous one.
        "--array": f"1-{job.array}%1" if job.array else "",
    }
    lines = "".join(f"#SBATCH {option}={check_word(option, value)}\n" for option, value in named.items() if value)
    lines += "#SBATCH --requeue\n#SBATCH --open-mode=append\n"
    if job.time_limit:
        lines += f"#SBATCH --signal=B:USR1@{job.save_before_s}\n"
    for word in job.sbatch or ():
        lines += f"#SBATCH {check_word('--sbatch', word)}\n"
    if not job.het_groups:
        nodes = "-".join(str(each) for each in dict.fromkeys(job.node_range))
        return lines + _request(nodes, job.partition, job.gpus, job)
    groups = [_request(str(group.nodes), group.partition, group.gpus, job) for group in job.het_groups]
    return lines + "#SBATCH hetjob\n".join(groups)


def _hosts(job: SlurmJob) -> str:
    """Bash lines that set ``hosts`` to the node names of the job, in order."""
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(len(job.het_groups))] or [
        "SLURM_JOB_NODELIST"
    ]
    lines = "hosts=()\n"
    for name in lists:
        lines += f'mapfile -t -O "${{#hosts[@]}}" hosts < <(scontrol show hostnames "${name}")\n'
    return lines


def _step(job: SlurmJob) -> list[str]:
    """The ``srun`` options of the job step of a node, quoted."""
    words = ["--nodes=1", "--ntasks=1", "--export=ALL", "--cpu-bind=none"]
    if job.cpus:
        words.append(f"--cpus-per-task={job.cpus}")
    if job.het_groups:
        words.append(f"--het-group=0-{len(job.het_groups) - 1}")
    container = {
        "--container-image": job.image,
        "--container-mounts": ",".join(job.mount or ()),
        "--container-workdir": job.workdir,
    }
    words += [f"{option}={check_word(option, value)}" for option, value in container.items() if value]
    return words


def slurm_script(job: SlurmJob) -> str:
    """The batch script of a job.

    Raises:
        UsageError: a value is not a single word.
    """
    min_nodes = str(job.node_range[0]) if not job.het_groups else str(sum(group.nodes for group in job.het_groups))
    launcher = ["dynmo-train", "launch", "node", "--nproc", str(job.nproc)]
    launcher += ["--nnodes", f'"{min_nodes}:${{#hosts[@]}}"', "--job", '"slurm-$SLURM_JOB_ID"']
    launcher += ["--max-restarts", str(job.max_restarts), "--save-s", str(job.save_before_s)]
    launcher += job.hang_words
    launcher += ["--log-dir", check_word("--log-dir", job.log_dir) + '/"$SLURM_JOB_ID"', "--"]
    return (
        "#!/bin/bash\n"
        + _head(job)
        + "\n# Generated by dynmo-train launch slurm. Environment variables override sizes: NUM_LAYERS=64 sbatch FILE\n"
        + "set -uo pipefail\n\n"
        + export_lines(parse_exports(job.export or ()))
        + _hosts(job)
        + _BODY.lstrip("\n")
        + bash_array("step", _step(job))
        + bash_array("command", [*launcher, *shell_words(job.arguments)])
        + _RUN
    )


def submit_script(file: Path, command: Sequence[str], *, by_stdin: bool) -> str:
    """Submit a script and return the output of the scheduler, such as the job id.

    Args:
        file: batch script.
        command: submission command of the scheduler.
        by_stdin: whether the command reads the script from standard input.

    Raises:
        UsageError: the submission command is not installed.
        DynmoError: the scheduler rejected the script.
    """
    words = [*command] if by_stdin else [*command, str(file)]
    script = file.read_text(encoding="utf-8") if by_stdin else None
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"{command[0]}: not found on PATH; print the script with --dry-run and submit it on the cluster"
        ) from error
    if done.returncode:
        raise DynmoError(f"{command[0]} rejected {file}: {done.stderr.strip()}")
    return done.stdout.strip()
