"""A batch script for Slurm: a job step for each node, nodes given back when released, requeued where it must go on."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._common.document import MAX_JOBS, MAX_RANKS
from .._common.errors import DynmoError, UsageError
from .job_script import array, exports, one_word, shell_words

# One step for each node rather than one for all: a step that ends gives its node back, the others go on.
_BODY = """
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
"""
_RUN = """
declare -A node_of=()  # process of a step: number of its node
# Shortly before the time is over Slurm sends USR1: save, end, and resume in the queue. A signal may come at once.
again=
trap 'again=time; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM INT

for node in "${!hosts[@]}"; do
  NODE_RANK="$node" srun "${step[@]}" --nodelist="${hosts[node]}" "${command[@]}" &
  node_of[$!]=$node
done

done_early=()

give_back() {  # a node whose workers were released
  unset "hosts[$1]"
  local left
  left=$(IFS=,; echo "${hosts[*]}")
  echo "node $1 is given back, $left go on"
  (cd "$(mktemp -d)" && scontrol update JobId="$SLURM_JOB_ID" NodeList="$left") || true
}

code=0
while ((${#node_of[@]})); do
  sleep 1 &
  wait "$!"  # a trap interrupts it
  finished=()
  for step_id in "${!node_of[@]}"; do
    kill -0 "$step_id" 2>/dev/null || finished+=("$step_id")
  done
  for step_id in "${finished[@]}"; do
    wait "$step_id"
    ended=$?
    node=${node_of[$step_id]}
    unset "node_of[$step_id]"
    if ((ended == 0 && node > 0)); then done_early+=("$node"); fi
    if ((ended != 0 && code != 75)); then code=$ended; fi
  done
  # At the end of a run all steps end together: a node is given back once the others have gone on for two looks.
  if ((${#finished[@]} == 0 && ${#done_early[@]} && ${#node_of[@]})); then
    for node in "${done_early[@]}"; do give_back "$node"; done
    done_early=()
  fi
done

if [[ -n $again || $code == 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A group of like nodes of a heterogeneous job."""

    nodes: int
    partition: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is submitted. ``least`` to ``most`` nodes of ``nproc`` processes; empty texts and None leave options out."""

    arguments: tuple[str, ...]
    name: str
    least: int
    most: int
    nproc: int
    gpus: int = 0
    cpus: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    output: str = "slurm-%x-%j.out"
    array: int = 0
    parts: tuple[Part, ...] = ()
    save_before_s: int = 120
    max_restarts: int = 3
    log_dir: str = "logs"
    image: str = ""
    mounts: tuple[str, ...] = ()
    workdir: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()


def parse_part(text: str) -> Part:
    """``NODES:PARTITION[:GPUS]`` of ``--het``."""
    words = text.split(":")
    if len(words) not in (2, 3) or not words[0].isdecimal() or int(words[0]) < 1 or not all(words):
        raise UsageError(f"--het takes NODES:PARTITION or NODES:PARTITION:GPUS, is {text!r}")
    gpus = words[2] if len(words) == 3 else "0"
    if not gpus.isdecimal():
        raise UsageError(f"--het takes a number of GPUs a node, is {text!r}")
    if int(words[0]) > MAX_RANKS or int(gpus) > MAX_JOBS:
        raise UsageError(f"--het {text!r}: must be at most {MAX_RANKS:,} nodes, of at most {MAX_JOBS:,} GPUs")
    return Part(nodes=int(words[0]), partition=words[1], gpus=int(gpus))


def _request(nodes: str, partition: str, gpus: int, job: SlurmJob) -> str:
    """The options by which a group of nodes is asked for."""
    lines = f"#SBATCH --nodes={nodes}\n"
    if "-" not in nodes:  # of a range Slurm gives no more nodes than the tasks need: the least
        lines += "#SBATCH --ntasks-per-node=1\n"
    if partition:
        lines += f"#SBATCH --partition={one_word('--partition', partition)}\n"
    if gpus:
        lines += f"#SBATCH --gpus-per-node={gpus}\n"
    if job.cpus:
        lines += f"#SBATCH --cpus-per-task={job.cpus}\n"
    return lines


def _head(job: SlurmJob) -> str:
    named = {
        "--job-name": job.name,
        "--output": job.output,
        "--time": job.time,
        "--account": job.account,
        "--qos": job.qos,
        # One at a time: each element goes on with what the one before has saved.
        "--array": f"1-{job.array}%1" if job.array else "",
    }
    lines = "".join(f"#SBATCH {option}={one_word(option, value)}\n" for option, value in named.items() if value)
    lines += "#SBATCH --requeue\n#SBATCH --open-mode=append\n"
    if job.time:
        lines += f"#SBATCH --signal=B:USR1@{job.save_before_s}\n"
    for word in job.more:
        lines += f"#SBATCH {one_word('--sbatch', word)}\n"
    if not job.parts:
        nodes = str(job.most) if job.least == job.most else f"{job.least}-{job.most}"
        return lines + _request(nodes, job.partition, job.gpus, job)
    groups = [_request(str(part.nodes), part.partition, part.gpus, job) for part in job.parts]
    return lines + "#SBATCH hetjob\n".join(groups)


def _hosts(job: SlurmJob) -> str:
    """Lines that put the names of the job's nodes in order into ``hosts``."""
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(len(job.parts))] or ["SLURM_JOB_NODELIST"]
    lines = "hosts=()\n"
    for name in lists:
        lines += f'mapfile -t -O "${{#hosts[@]}}" hosts < <(scontrol show hostnames "${name}")\n'
    return lines


def _step(job: SlurmJob) -> list[str]:
    """Options of one node's job step, quoted."""
    words = ["--nodes=1", "--ntasks=1", "--export=ALL", "--cpu-bind=none"]
    if job.cpus:
        words.append(f"--cpus-per-task={job.cpus}")
    if job.parts:
        words.append(f"--het-group=0-{len(job.parts) - 1}")
    container = {
        "--container-image": job.image,
        "--container-mounts": ",".join(job.mounts),
        "--container-workdir": job.workdir,
    }
    words += [f"{option}={one_word(option, value)}" for option, value in container.items() if value]
    return words


def slurm_script(job: SlurmJob) -> str:
    """The batch script, a pure function of the job.

    Raises:
        UsageError: a value would not stay one word.
    """
    least = str(job.least) if not job.parts else str(sum(part.nodes for part in job.parts))
    launcher = ["dynmo-train", "launch", "node", "--nproc", str(job.nproc)]
    launcher += ["--nnodes", f'"{least}:${{#hosts[@]}}"', "--job", '"slurm-$SLURM_JOB_ID"']
    launcher += ["--max-restarts", str(job.max_restarts), "--save-s", str(job.save_before_s)]
    launcher += ["--log-dir", one_word("--log-dir", job.log_dir) + '/"$SLURM_JOB_ID"', "--"]
    return (
        "#!/bin/bash\n"
        + _head(job)
        + "\n# Written by dynmo-train launch slurm. Sizes can be set when it is submitted: NUM_LAYERS=64 sbatch FILE\n"
        + "set -uo pipefail\n\n"
        + exports(job.exports)
        + _hosts(job)
        + _BODY.lstrip("\n")
        + array("step", _step(job))
        + array("command", [*launcher, *shell_words(job.arguments)])
        + _RUN
    )


def submit_script(file: Path, command: Sequence[str], *, by_stdin: bool) -> str:
    """Hand a script to its scheduler; what that says, such as the number of the job.

    Raises:
        UsageError: the command is not here.
        DynmoError: the scheduler refuses the script.
    """
    words = [*command] if by_stdin else [*command, str(file)]
    given = file.read_text(encoding="utf-8") if by_stdin else None
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(f"{command[0]} is not on PATH; write the script with --dry-run and submit it there") from error
    if done.returncode:
        raise DynmoError(f"{command[0]} refuses {file}: {done.stderr.strip()}")
    return done.stdout.strip()
