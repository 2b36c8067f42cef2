"""Completion of commands, options and choices in bash, zsh and fish.

The script of a shell passes the line up to the cursor as the arguments of the command, and the name of the shell in an
environment variable::

    _DYNMO_PLAN_COMPLETE=zsh dynmo-plan partition --sched  ->  --schedule:Pipeline schedule.

No word is quoted or split again, so that file names with spaces are safe. Without an answer the shell completes files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from .errors import DynmoError, UsageError

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of PROG for bash. Use: source <(PROG --show-completion bash)
_FUNC() {
    local IFS=$'\\n' words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=($(VARIABLE=bash "${1/#\\~/$HOME}" "${words[@]}" 2>/dev/null))
    return 0
}
complete -o default -o bashdefault -F _FUNC PROG
"""
_ZSH = """\
#compdef PROG
# Completion of PROG for zsh. Use: source <(PROG --show-completion zsh), after compinit
_FUNC() {
    local -a lines
    lines=("${(@f)$(VARIABLE=zsh ${~words[1]} "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "${lines[1]}" ]]; then
        _files
    else
        _describe -V 'PROG' lines
    fi
}
if [[ "${funcstack[1]}" == "_PROG" ]]; then
    _FUNC "$@"
else
    compdef _FUNC PROG
fi
"""
_FISH = """\
# Completion of PROG for fish. Use: PROG --show-completion fish | source
function _FUNC
    set -l words (commandline -opc)
    set -e words[1]
    set -l current (commandline -ct)
    test (count $current) -eq 0; and set current ''
    set -l lines (env VARIABLE=fish PROG $words $current 2>/dev/null)
    if test (count $lines) -eq 0
        __fish_complete_path $current
    else
        printf '%s\\n' $lines
    end
end
complete --command PROG --no-files --arguments '(_FUNC)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def variable_of(prog: str) -> str:
    """The environment variable that asks a command for completions."""
    return f"_{prog.replace('-', '_').upper()}_COMPLETE"


def script(prog: str, shell: str) -> str:
    """The completion script of a command for one shell.

    Raises:
        UsageError: unknown shell.
    """
    if shell not in _SCRIPTS:
        raise UsageError(f"no completion for the shell {shell!r}; give one of {', '.join(SHELLS)}")
    function = f"{prog.replace('-', '_')}_completion"
    text = _SCRIPTS[shell].replace("VARIABLE", variable_of(prog)).replace("_FUNC", f"_{function}")
    return text.replace("PROG", prog)


def current_shell() -> str:
    """The shell that started this process, else the login shell.

    Raises:
        UsageError: it is not one of ``SHELLS``.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        parent = ""
    names = (parent.lstrip("-"), Path(os.environ.get("SHELL", "")).name)
    found = next((name for name in names if name in SHELLS), None)
    if found is None:
        raise UsageError(f"cannot determine the shell; give one of {', '.join(SHELLS)}")
    return found


def install(prog: str, shell: str) -> list[Path]:
    """Write the completion script of a command where the shell reads it.

    Returns:
        The files that were written. A start-up file of the shell gets one line, once.
    """
    text, home = script(prog, shell), Path.home()
    if shell == "fish":
        path = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions" / f"{prog}.fish"
        return [_written(path, text)]
    if shell == "zsh":
        path = _written(home / ".zfunc" / f"_{prog}", text)
        startup = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
        return [path, *_with_line(startup, "fpath+=~/.zfunc; autoload -Uz compinit; compinit")]
    path = _written(home / ".bash_completions" / f"{prog}.sh", text)
    return [path, *_with_line(home / ".bashrc", f"source '{path}'")]


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _with_line(path: Path, line: str) -> list[Path]:
    """Append a line to a start-up file that does not have it; returns the file if it was written."""
    present = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    if line in present.splitlines():
        return []
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if present.endswith("\n") or not present else "\n") + line + "\n")
    return [path]


def _click_completion() -> Any:
    """The module that completes a line of a command, in typer's click or in the separate one."""
    from typer import core

    item = getattr(core, "CompletionItem", None)
    return importlib.import_module("click.shell_completion" if item is None else item.__module__)


def complete_choices(option: Any) -> None:
    """Complete the values of an option whose metavar lists its choices: ``gpipe|1f1b``.

    An ``autocompletion`` of typer would be inspected at each start, for each option.
    """
    choices = (option.metavar or "").split("|")
    if len(choices) == 1:
        return
    item = _click_completion().CompletionItem
    option.shell_complete = lambda _ctx, incomplete: [item(each) for each in choices if each.startswith(incomplete)]


def completions(command: Any, prog: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """Completions of the last word: values, and the help of each.

    Args:
        command: root of a command line.
        prog: name of the command.
        words: words after the name, up to the cursor; the last one is completed and may be empty.
    """
    *before, word = words or ("",)
    # Its abstract methods read and write the syntax of a shell, which is done here.
    unused = dict.fromkeys(("format_completion", "get_completion_args", "source_vars"))
    complete = type("Complete", (_click_completion().ShellComplete,), unused)(command, {}, prog, variable_of(prog))
    try:
        items = complete.get_completions(list(before), word)
    except DynmoError:
        return []
    return [(item.value, " ".join((item.help or "").split())) for item in items if item.type == "plain"]


def run_completion(app: typer.Typer, prog: str, shell: str, words: list[str]) -> None:
    """Print the completions of a line on stdout in the syntax of a shell."""
    if shell == "bash":
        # bash splits words at "=": --schedule = zb; the value alone is completed.
        words = [word for at, word in enumerate(words) if word != "=" or at == len(words) - 1]
        words = [*words[:-1], ""] if words and words[-1] == "=" else words
    if "--" in words[:-1]:
        # After it is a command of the same program: dynmo-train launch local --nproc 4 -- pretrain gpt
        words = words[words.index("--") + 1 :]
    for value, text in completions(typer.main.get_command(app), prog, words):
        if shell == "zsh":
            value = value.replace("\\", "\\\\").replace(":", "\\:")
        separator = {"zsh": ":", "fish": "\t"}.get(shell)
        sys.stdout.write(f"{value}{separator}{text}\n" if separator and text else f"{value}\n")
