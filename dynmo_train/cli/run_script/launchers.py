"""Programs and launchers of published scripts as commands of this project.

A command line has launchers, a program and its arguments: ``srun -l python -m torch.distributed.run --nnodes 2
pretrain_gpt.py --num-layers 24``. Launchers become one ``dynmo-train launch``, or nothing for one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..published_scripts import find
from .program_words import RefusedProgram as _Refused
from .program_words import converter_words, harness_words, model_words, task_words

OWN_PROGRAMS = ("dynmo-train", "dynmo-prep", "dynmo-plan", "dynmo-ckpt")
# Programs of Megatron that this project has no model or command for.
UNSUPPORTED_PROGRAMS: Mapping[str, str] = {
    **dict.fromkeys(
        ("pretrain_mamba.py", "pretrain_hybrid.py"),
        "layers of Mamba are not supported; train a decoder of attention layers with pretrain_gpt.py",
    ),
    **dict.fromkeys(
        ("pretrain_vlm.py", "pretrain_vision_classify.py", "pretrain_vision_dino.py", "pretrain_vision_inpaint.py"),
        "images are not supported; train on text with pretrain_gpt.py",
    ),
    "pretrain_retro.py": "RETRO is not supported; train with pretrain_gpt.py",
    "train_rl.py": "reinforcement learning is not supported; train with pretrain_gpt.py",
}
_PREFIXES = frozenset({"nohup", "time", "exec", "stdbuf", "unbuffer", "command"})
_SHELLS = frozenset({"bash", "sh"})


@dataclass(frozen=True)
class OurCommand:
    """A command of this project: program and arguments, variables, and notes for the user."""

    words: list[str]
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NestedScript:
    """A script that a script starts: ``bash FILE ARGUMENTS``, or its text after ``bash -c``.

    ``launch`` has the options of launchers before it: ``srun bash FILE``.
    """

    path: str
    arguments: list[str]
    text: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    launch: Launch | None = None


@dataclass
class Launch:
    """The options of the launchers of a command line.

    Attributes:
        kind: subcommand of ``launch``; empty for one process.
        options: options of the subcommand, in order.
        nproc: processes per node; None without such an option.
        ntasks: processes of all nodes that srun starts.
        nodes: number of nodes, or MIN:MAX.
        node_rank: rank of this node.
        address: address of the first node.
        port: port of the rendezvous.
        scheduler: ``slurm`` or ``lsf`` if their launcher starts the processes.
    """

    kind: str = ""
    options: list[str] = field(default_factory=list)
    nproc: str | None = None
    ntasks: str | None = None
    nodes: str | None = None
    node_rank: str | None = None
    address: str | None = None
    port: str | None = None
    scheduler: str = ""


# Option to what it sets: an attribute of Launch, ``=OPTION`` of launch, or ``no effect``; and its number of values.
_Options = Mapping[str, tuple[str, int]]
_NONE = ("no effect", 0)
_VALUE = ("no effect", 1)
TORCHRUN: _Options = {
    "nproc-per-node": ("nproc", 1),
    "nnodes": ("nodes", 1),
    "node-rank": ("node_rank", 1),
    "master-addr": ("address", 1),
    "master-port": ("port", 1),
    "rdzv-endpoint": ("endpoint", 1),
    "rdzv-id": ("=--job", 1),
    "max-restarts": ("=--max-restarts", 1),
    "log-dir": ("=--log-dir", 1),
    **dict.fromkeys(("standalone", "use-env"), _NONE),
    **dict.fromkeys(
        (
            *("rdzv-backend", "rdzv-conf", "redirects", "r", "tee", "t", "role", "monitor-interval", "start-method"),
            *("local-addr", "local-ranks-filter", "log-line-prefix-template", "numa-binding"),
        ),
        _VALUE,
    ),
}
DEEPSPEED: _Options = {
    "hostfile": ("=--hostfile", 1),
    "H": ("=--hostfile", 1),
    "include": ("=--include", 1),
    "i": ("=--include", 1),
    "exclude": ("=--exclude", 1),
    "e": ("=--exclude", 1),
    "num-nodes": ("=--num-nodes", 1),
    "num-gpus": ("=--num-gpus", 1),
    "master-addr": ("=--master-addr", 1),
    "master-port": ("=--master-port", 1),
    "enable-each-rank-log": ("=--log-dir", 1),
    **dict.fromkeys(("force-multi", "save-pid", "bind-cores-to-rank", "no-ssh-check", "no-local-rank"), _NONE),
    **dict.fromkeys(("launcher", "launcher-args", "bind-core-list", "ssh-port"), _VALUE),
}
SRUN: _Options = {
    "N": ("nodes", 1),
    "nodes": ("nodes", 1),
    "ntasks-per-node": ("tasks", 1),
    "n": ("ntasks", 1),
    "ntasks": ("ntasks", 1),
    "gpus-per-node": ("=--gpus", 1),
    "container-image": ("=--image", 1),
    "container-mounts": ("=--mount", 1),
    "container-workdir": ("=--workdir", 1),
    "partition": ("=--partition", 1),
    "p": ("=--partition", 1),
    "account": ("=--account", 1),
    "A": ("=--account", 1),
    "qos": ("=--qos", 1),
    "q": ("=--qos", 1),
    "time": ("=--time", 1),
    "t": ("=--time", 1),
    "job-name": ("=--job-name", 1),
    "J": ("=--job-name", 1),
    "cpus-per-task": ("=--cpus-per-task", 1),
    "c": ("=--cpus-per-task", 1),
    **dict.fromkeys(
        (
            *("l", "label", "exclusive", "unbuffered", "u", "verbose", "v", "overlap", "wait-all-nodes", "mem-bind"),
            *("container-mount-home", "no-container-mount-home", "container-writable", "no-container-remap-root"),
            *("container-remap-root", "no-container-entrypoint", "propagate", "het-group", "oversubscribe", "O"),
        ),
        _NONE,
    ),
    **dict.fromkeys(
        (
            *("G", "gpus", "gres", "mpi", "w", "nodelist", "x", "exclude", "output", "o", "error", "e"),
            *(
                "export",
                "cpu-bind",
                "gpu-bind",
                "gpus-per-task",
                "mem",
                "mem-per-cpu",
                "jobid",
                "signal",
                "kill-on-bad-exit",
            ),
            *(
                "K",
                "container-name",
                "container-env",
                "chdir",
                "D",
                "constraint",
                "C",
                "dependency",
                "distribution",
                "m",
            ),
            *("ntasks-per-gpu", "accel-bind", "network", "threads-per-core", "hint", "wait", "W"),
        ),
        _VALUE,
    ),
}
MPIRUN: _Options = {
    "np": ("ranks", 1),
    "n": ("ranks", 1),
    "c": ("ranks", 1),
    "N": ("nproc", 1),
    "npernode": ("nproc", 1),
    "ppn": ("nproc", 1),
    "hostfile": ("=--hostfile", 1),
    "machinefile": ("=--hostfile", 1),
    "f": ("=--hostfile", 1),
    "H": ("hosts", 1),
    "host": ("hosts", 1),
    **dict.fromkeys(
        (
            *("allow-run-as-root", "oversubscribe", "report-bindings", "tag-output", "v", "bind-to-none", "quiet", "q"),
            *("nooversubscribe", "display-map", "stream-buffering"),
        ),
        _NONE,
    ),
    **dict.fromkeys(("x", "bind-to", "map-by", "wdir", "genvlist", "timestamp-output", "rank-by"), _VALUE),
    **dict.fromkeys(("mca", "genv", "env"), ("no effect", 2)),
}
SINGULARITY: _Options = {
    **dict.fromkeys(("nv", "writable-tmpfs", "cleanenv", "e", "containall", "c", "rocm", "no-home"), _NONE),
    **dict.fromkeys(("env", "home", "pwd", "overlay", "network"), _VALUE),
    "bind": ("=--mount", 1),
    "B": ("=--mount", 1),
}
_TORCH_MODULES = ("torch.distributed.launch", "torch.distributed.run", "torch.distributed.elastic.multiprocessing")


def refusal(words: Sequence[str], reason: str) -> str:
    """The message for a command that is not interpreted.

    Args:
        words: the command.
        reason: why, and what to do instead.
    """
    shown = " ".join(words[:6])[:120]
    return f"{shown!r} is not executed: {reason}"


def translate_program(
    words: Sequence[str], stdin: str, variables: Mapping[str, str], launch: Launch | None = None
) -> OurCommand | NestedScript | str:
    """Translate a command line of a script.

    Args:
        words: the command line.
        stdin: here-document of the command.
        variables: environment of the command.
        launch: options of launchers that start the script of the command.

    Returns:
        A command of this project, a nested script, or why the command is refused.
    """
    try:
        outer = replace(launch, options=list(launch.options)) if launch else Launch()
        return _translate(list(words), stdin, variables, {}, outer)
    except _Refused as error:
        return str(error)


def _translate(
    words: list[str], stdin: str, variables: Mapping[str, str], environment: dict[str, str], launch: Launch
) -> OurCommand | NestedScript | str:
    """Consume one prefix, launcher or program at a time, from left to right."""
    for _ in range(100):
        if not words:
            return "it has no program; remove the line"
        name = words[0].rpartition("/")[2]
        if name in _SHELLS or name in ("sbatch", "bsub"):
            return _nested(words, stdin, environment, launch)
        following = _after_launcher(name, words, environment, launch)
        if following is None:
            return _program(words, variables, environment, launch)
        words = following
    return "it has too many launchers; use one"


def _after_launcher(name: str, words: list[str], environment: dict[str, str], launch: Launch) -> list[str] | None:
    """The words after a prefix, launcher or interpreter; None at a program."""
    if name in _PREFIXES:
        return words[1:]
    if name == "env":
        return _environment_words(words[1:], environment)
    if name in ("numactl", "nsys", "ncu", "timeout", "taskset", "uv"):
        return _without_wrapper(words)
    if name in ("singularity", "apptainer"):
        return _container(words[1:], launch)
    if re.fullmatch(r"python[\d.]*", name):
        return _python(words[1:], launch)
    if name in ("mpirun", "mpiexec"):
        return _options(words[1:], MPIRUN, launch, name)
    if name == "torchrun":
        launch.kind = launch.kind or "node"
        return _options(words[1:], TORCHRUN, launch, name)
    if name == "deepspeed":
        launch.kind = "hostfile"
        return _options(words[1:], DEEPSPEED, launch, name)
    if name == "srun":
        launch.kind, launch.scheduler = "slurm", "slurm"
        return _options(words[1:], SRUN, launch, name)
    return None


def _environment_words(words: list[str], environment: dict[str, str]) -> list[str]:
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        environment[match[1]] = match[2]
        words = words[1:]
    if words and words[0].startswith("-"):
        raise _Refused(f"env {words[0]} is not supported; remove it")
    return words


def _without_wrapper(words: list[str]) -> list[str]:
    """The words after ``nsys profile ...`` and similar: up to the first launcher, interpreter or program."""
    for at, word in enumerate(words[1:], 1):
        name = word.rpartition("/")[2]
        if name in ("torchrun", "deepspeed", "srun", "mpirun", *OWN_PROGRAMS) or re.fullmatch(r"python[\d.]*", name):
            return words[at:]
        if name.endswith(".py"):
            return words[at:]
    raise _Refused(f"{words[0]} starts no program that is known; remove it")


def _option_name(word: str) -> tuple[str, bool, str]:
    """Name, whether a value follows after ``=``, and the value, of an option; the name of ``-N4`` is ``N4``."""
    name, equals, value = word.partition("=")
    return name.lstrip("-").replace("_", "-"), bool(equals), value


def _options(words: list[str], options: _Options, launch: Launch, launcher: str) -> list[str]:
    """Read the options of a launcher.

    Returns:
        The words after them.

    Raises:
        _Refused: an option is unknown, or lacks its value.
    """
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        name, has_value, value = _option_name(word)
        if name not in options and not word.startswith("--") and name[:1] in options and name[1:].isdigit():
            name, has_value, value = name[0], True, name[1:]
        if name not in options and not word.startswith("--") and all(options.get(one) == _NONE for one in name):
            continue  # several options of a letter without values, such as -lu
        if name not in options:
            raise _Refused(f"the option {word[:80]} of {launcher} is not known; remove it, or use dynmo-train launch")
        target, count = options[name]
        values = [value] if has_value else words[:count]
        if not has_value:
            del words[:count]
            if len(values) < count or any(one.startswith("--") for one in values):
                raise _Refused(f"the option {word[:80]} of {launcher} has no value; give one")
        _set_option(target, values, launch)
    if launcher.startswith("mpi") and "--hostfile" in launch.options:
        launch.kind = "hostfile"
    return words


def _set_option(target: str, values: list[str], launch: Launch) -> None:
    """Set what an option of a launcher means here."""
    if target.startswith("="):
        for one in values[0].split(",") if target == "=--mount" else values:
            launch.options += [target[1:], one]
    elif target == "endpoint":
        launch.address, _, port = values[0].partition(":")
        launch.port = port or launch.port
    elif target == "hosts":
        # A script of an LSF job names its hosts; each of them starts the ranks of its node.
        launch.kind, launch.scheduler, launch.nodes = "lsf", "lsf", str(len(values[0].split(",")))
    elif target in ("ranks", "tasks"):
        launch.nproc = values[0]
        if target == "ranks":
            launch.kind = launch.scheduler or "node"
    elif target != "no effect":
        setattr(launch, target, values[0])


def _python(words: list[str], launch: Launch) -> list[str]:
    """The words after ``python``: its options, and ``-m`` with a launcher.

    Raises:
        _Refused: code on the command line, or an unknown module.
    """
    while words and words[0] in ("-u", "-O", "-B", "-s", "-I", "-E"):
        words.pop(0)
    if words[:1] == ["-c"]:
        raise _Refused("code on the command line is not executed; remove the line, or run it before")
    if words[:1] == ["-m"] and len(words) > 1:
        module = words[1]
        if module in _TORCH_MODULES:
            launch.kind = launch.kind or "node"
            return _options(words[2:], TORCHRUN, launch, module)
        if module in ("lm_eval", "lm_eval.__main__"):
            return ["main.py", *words[2:]]
        return [f"{module.replace('.', '/')}.py", *words[2:]]
    if not words or words[0].startswith("-"):
        raise _Refused(f"python {' '.join(words[:1])} is not executed; name a program".replace("  ", " "))
    return words


def _container(words: list[str], launch: Launch) -> list[str]:
    """Read ``run`` or ``exec`` of Singularity, with the image; the words after it.

    Raises:
        _Refused: another subcommand, or no image.
    """
    if words[:1] not in (["run"], ["exec"]):
        raise _Refused("singularity is interpreted as singularity run or exec; remove the line")
    words = _options(words[1:], SINGULARITY, launch, "singularity")
    if not words:
        raise _Refused("singularity has no image; name one")
    launch.options += ["--image", words[0]]
    return words[1:]


def _nested(words: list[str], stdin: str, environment: dict[str, str], launch: Launch) -> NestedScript | str:
    """``bash FILE``, ``bash -c TEXT``, ``sbatch FILE``, or a script from a here-document."""
    program, rest = words[0], words[1:]
    is_batch = program in ("sbatch", "bsub")
    notes = [f"{program} is ignored: the script is interpreted here"] if is_batch else []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if not is_batch and re.fullmatch(r"-[a-z]*c", word):
            if not rest:
                return f"{program} -c has no commands; give them"
            return NestedScript(program, rest[1:], rest[0], environment, notes, launch)
        if is_batch and re.fullmatch(r"-[A-Za-z]", word) and rest:
            rest.pop(0)
    if rest:
        return NestedScript(rest[0], rest[1:], None, environment, notes, launch)
    if stdin:
        return NestedScript(program, [], stdin, environment, notes)
    return f"{program} has no script; name one"


def _program(
    words: list[str], variables: Mapping[str, str], environment: dict[str, str], launch: Launch
) -> OurCommand | NestedScript | str:
    """The command of this project for a program, with its launcher."""
    path, arguments = words[0], words[1:]
    name = path.rpartition("/")[2]
    if name in UNSUPPORTED_PROGRAMS:
        return UNSUPPORTED_PROGRAMS[name]
    if name in OWN_PROGRAMS:
        return _own_command(name, arguments, environment)
    if name == "lm_eval" or (name == "lm-eval"):
        name, path = "main.py", "main.py"
    row = find(path)
    equivalent = row.equivalent if row else ""
    if path.endswith((".sh", ".sbatch", ".sub")):
        return NestedScript(path, arguments, None, environment, [], launch)
    if not equivalent and re.fullmatch(r"pretrain_\w+\.py", name):
        return f"{name} is not a program of Megatron-LM; if its options are those of a decoder, write pretrain_gpt.py"
    if not equivalent or equivalent.startswith("bin/") or "/" in equivalent:
        known = "dynmo-train explain-flags --table lists the programs that are known; remove the line, or run it before"
        return f"{name} is not known; {known}"
    notes: list[str] = []
    if "--image" in launch.options and not launch.scheduler:
        notes.append("the container is ignored: the command runs in this environment")
    # A line that is continued within quotes leaves a backslash behind.
    arguments = [word for word in arguments if word.strip() != "\\" and not re.fullmatch(r"--local[-_]rank=.*", word)]
    command, arguments = _command_words(name, equivalent, arguments, notes)
    words = [*command, *arguments]
    if command[0] != "dynmo-train":
        if launch.kind:
            notes.append(f"the launcher is ignored: {' '.join(command)} is one process")
        return OurCommand(words, notes, environment)
    launcher = _launcher_words(launch, variables, notes)
    if launcher:
        words = ["dynmo-train", "launch", *launcher, "--", *words[1:]]
    return OurCommand(words, notes, environment)


def _command_words(name: str, equivalent: str, arguments: list[str], notes: list[str]) -> tuple[list[str], list[str]]:
    """The command of a program, and its arguments.

    Args:
        name: file name of the program.
        equivalent: its equivalent in the table of published scripts.
        arguments: arguments of the program.
        notes: notes for the user, which this extends.
    """
    if equivalent == "dynmo-train tasks" and any(word.partition("=")[0] == "--tasks" for word in arguments):
        return ["dynmo-train", "evaluate", "lm-eval"], harness_words(arguments, notes)
    if name.startswith("convert_megatron_"):
        return equivalent.split(), converter_words(arguments, notes)
    command = equivalent.split()
    if command[1:2] == ["pretrain"]:
        return command, model_words(name, command[2], arguments, notes)
    if equivalent == "dynmo-train tasks":
        return command, task_words(arguments, notes)
    return command, arguments


def _own_command(name: str, arguments: list[str], environment: dict[str, str]) -> OurCommand | str:
    """A command of this project that a script contains; not one that starts other programs or scripts."""
    nested = arguments[arguments.index("--") + 1 :] if "--" in arguments else arguments
    if name == "dynmo-train" and ("run" in (arguments[:1] + nested[:1])):
        return "a script cannot start dynmo-train run; write: bash FILE"
    if name == "dynmo-train" and arguments[:1] == ["launch"]:
        outer = arguments[: arguments.index("--")] if "--" in arguments else arguments
        if any(word.partition("=")[0] in ("--ssh", "--container") for word in outer):
            return "--ssh and --container name other programs; run the command by itself"
    return OurCommand([name, *arguments], [], environment)


def _count(text: str, what: str) -> int:
    """A number of processes or nodes.

    Raises:
        _Refused: it is not a positive number.
    """
    if not re.fullmatch(r"0*[1-9]\d{0,6}", text):
        raise _Refused(f"{what} is {text[:80]!r}; must be a positive whole number")
    return int(text)


def _launcher_words(launch: Launch, variables: Mapping[str, str], notes: list[str]) -> list[str]:
    """The words after ``dynmo-train launch``; none for one process without a launcher."""
    if not launch.kind:
        return []
    if launch.nproc in ("gpu", "auto", "cpu"):
        raise _Refused(f"the number of processes is {launch.nproc!r}; give the number of GPUs per node")
    if launch.kind == "hostfile":
        words = ["hostfile", *launch.options]
        if launch.nproc is not None and "--num-gpus" not in words:
            words += ["--num-gpus", str(_count(launch.nproc, "the number of processes"))]
        return words
    nproc = _count(launch.nproc or _tasks_per_node(launch, variables), "the number of processes per node")
    if launch.scheduler:
        job = {"slurm": "SLURM_JOB_ID", "lsf": "LSB_JOBID"}[launch.scheduler]
        in_job = ["--in-job"] if variables.get(job, "").isdigit() else []
        nodes = [] if in_job or launch.nodes is None else ["--nodes", launch.nodes]
        return [launch.scheduler, *in_job, *nodes, "--nproc", str(nproc), *_without_options(launch.options, {"--job"})]
    nodes_text = launch.nodes or "1"
    if nodes_text == "1":
        options = _without_options(launch.options, {"--job", "--image", "--mount", "--workdir"})
        return ["local", "--nproc", str(nproc), *options] if nproc > 1 or options else []
    for part in nodes_text.split(":", 1):
        _count(part, "the number of nodes")
    words = ["node", "--nproc", str(nproc), "--nnodes", nodes_text]
    for option, value in (
        ("--node-rank", launch.node_rank),
        ("--master-addr", launch.address),
        ("--master-port", launch.port),
    ):
        if value:
            words += [option, value]
    return [*words, *launch.options]


def _tasks_per_node(launch: Launch, variables: Mapping[str, str]) -> str:
    """The processes that srun starts on each node, by its --ntasks or the job's options; without any, 1.

    Raises:
        _Refused: the number of nodes is unknown, or does not divide that of the processes.
    """
    if launch.scheduler != "slurm":
        return "1"
    per_node = variables.get("SLURM_NTASKS_PER_NODE", "")
    if launch.ntasks is None and per_node:
        return per_node
    tasks = _count(launch.ntasks or variables.get("SLURM_NTASKS") or "1", "the number of tasks of srun")
    nodes = launch.nodes or variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES")
    if tasks == 1:
        return "1"
    if nodes is None:
        raise _Refused(f"srun starts {tasks} tasks on an unknown number of nodes; give --nodes, or --ntasks-per-node")
    count = _count(nodes, "the number of nodes")
    if tasks % count:
        raise _Refused(f"{tasks} tasks are not the same number on each of {count} nodes; give --ntasks-per-node")
    return str(tasks // count)


def _without_options(words: Sequence[str], names: set[str]) -> list[str]:
    """Pairs of option and value, without some options."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in names for word in pair]
