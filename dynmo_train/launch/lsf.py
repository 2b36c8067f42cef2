"""A batch script for IBM Spectrum LSF: a launcher on each host by ``blaunch``, in a Singularity image where asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from .job_script import array, exports, one_word, shell_words

_RUN = """
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + LSB_JOBID % 20000))}"

nodes=()
trap 'kill -TERM "${nodes[@]}"' TERM INT USR2
for node in "${!hosts[@]}"; do
  NODE_RANK="$node" blaunch -z "${hosts[node]}" "${container[@]}" "${command[@]}" &
  nodes+=("$!")
done

code=0
for node in "${nodes[@]}"; do
  while wait "$node"; ended=$?; kill -0 "$node" 2>/dev/null; do :; done  # a trap interrupts it
  ((ended == 0 || code)) || code=$ended
done
if ((code == 75)); then
  brequeue -e "$LSB_JOBID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class LsfJob:
    """What is submitted: ``nodes`` hosts of ``nproc`` processes on ``slots`` CPUs; empty texts leave options out."""

    arguments: tuple[str, ...]
    name: str
    nodes: int
    nproc: int
    gpus: int = 0
    slots: int = 1
    time: str = ""
    queue: str = ""
    project: str = ""
    output: str = "lsf-%J.out"
    max_restarts: int = 3
    log_dir: str = "logs"
    image: str = ""
    container: str = "singularity"
    mounts: tuple[str, ...] = ()
    workdir: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()


def _container(job: LsfJob) -> list[str]:
    """The words before the command that run it in an image; none without one."""
    if not job.image:
        return []
    words = [job.container, "exec", *(["--nv"] if job.gpus else [])]
    words += [f"--bind={one_word('--mount', mount)}" for mount in job.mounts]
    if job.workdir:
        words.append(f"--pwd={one_word('--workdir', job.workdir)}")
    return [*words, one_word("--image", job.image)]


def lsf_script(job: LsfJob) -> str:
    """The batch script, a pure function of the job; for ``bsub < FILE``.

    Raises:
        UsageError: a value would not stay one word.
    """
    named = {
        "-J": job.name,
        "-o": job.output,
        "-W": job.time,
        "-q": job.queue,
        "-P": job.project,
        # The slots of a host are for its launcher, which starts the processes.
        "-n": str(job.nodes * job.slots),
        "-R": f'"span[ptile={job.slots}]"',
        "-gpu": f'"num={job.gpus}/host"' if job.gpus else "",
    }
    checked = {
        option: value if value.startswith('"') else one_word(option, value) for option, value in named.items() if value
    }
    head = "".join(f"#BSUB {option} {value}\n" for option, value in checked.items()) + "#BSUB -r\n"
    head += "".join(f"#BSUB {one_word('--bsub', word)}\n" for word in job.more)
    launcher = ["dynmo-train", "launch", "node", "--nproc", str(job.nproc), "--nnodes", '"${#hosts[@]}"']
    launcher += ["--job", '"lsf-$LSB_JOBID"', "--max-restarts", str(job.max_restarts)]
    launcher += ["--log-dir", one_word("--log-dir", job.log_dir) + '/"$LSB_JOBID"', "--"]
    return (
        "#!/bin/bash\n"
        + head
        + "\n# Written by dynmo-train launch lsf; submit it with: bsub < FILE. Sizes can be set in the environment.\n"
        + "set -uo pipefail\n\n"
        + exports(job.exports)
        + "mapfile -t hosts < <(awk '!seen[$0]++' \"$LSB_DJOB_HOSTFILE\")\n"
        + array("container", _container(job))
        + array("command", [*launcher, *shell_words(job.arguments)])
        + _RUN
    )
