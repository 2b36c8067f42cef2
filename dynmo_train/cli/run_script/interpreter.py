"""Interpret a shell script: which commands of this project it starts, in which folders and environments.

text ── parser ──> syntax tree ── interpreter ──> steps: commands of this project, JSON files to write
                                       │
                                       └── launchers: torchrun, srun, deepspeed ... become ours

Nothing is started here. All of the script is interpreted before its first command runs, with the status 0 for each
command; the run ends at the first one that fails. What is not interpreted is refused with the line and a remedy. The
budget bounds the work for any script.
"""

from __future__ import annotations

import copy
import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..._common.document import DocumentError, parse_json
from ...formats.input_text import read_input
from ...formats.os_errors import reason
from .builtins import BUILT_INS, BuiltIns
from .conditions import holds
from .expansion import Expander, Value, Variables
from .launchers import Launch, NestedScript, OurCommand, refusal, translate_program
from .parser import DECLARATIONS, parse_script
from .published_text import equivalent_of, without_entities
from .session import (
    IGNORED,
    MAX_SCRIPT_BYTES,
    PIPE_SINKS,
    Budget,
    ExitScript,
    Jump,
    ScriptResult,
    StartStep,
    WriteStep,
    passed_variables,
)
from .syntax import (
    AndOr,
    Assignment,
    Case,
    Command,
    Commands,
    Condition,
    Evaluation,
    For,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Place,
    Redirection,
    ScriptError,
    Simple,
    Word,
)
from .text_commands import TextCommands


class Interpreter(BuiltIns):
    """Interprets one script, with its nested ones.

    Args:
        name: path of the script, ``$0``.
        arguments: arguments of the script.
        environment: environment of the script.
        folder: working folder.
        settings: variables whose value the script cannot change.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = dict(settings or {})
        self.environment = dict(environment)
        values: dict[str, Value] = {**environment, "BASH_SOURCE": [name], **self.settings}
        self.variables = Variables(values, list(arguments), name, settings=self.settings)
        self.exported = {*environment, *self.settings}
        self.functions: dict[str, Command] = {}
        self.folder = folder
        self.root: tuple[Path, ...] = (folder, folder / Path(name).parent)
        self.result = ScriptResult()
        self.budget = Budget()
        self.written: dict[Path, str] = {}
        self.captured: list[str] | None = None
        self.launch: Launch | None = None
        self.stops_on_error = False
        self.hidden: list[dict[str, Value | None]] = []
        self.conditions = self.calls = 0
        self.scripts = [name]
        # The last command, where it started a program: its words, prefix and input.
        self.started: tuple[list[str], Mapping[str, Value], str] | None = None
        self.prepare()

    def prepare(self) -> None:
        """Create what refers to this interpreter; a subshell is a copy and has its own."""
        self.expander = Expander(
            self.variables, self.substitute, lambda size, place: self.budget.spend("characters", size, place)
        )
        self.texts = TextCommands(lambda: self.folder, self.written, lambda name: str(self.variables.get(name) or ""))

    def interpret(self, text: str) -> ScriptResult:
        """Interpret a script.

        Args:
            text: contents of the script.

        Raises:
            ScriptError: it has a command or syntax that is not interpreted.
        """
        text, self.result.notes[:0] = without_entities(text)
        try:
            self.run_all(parse_script(text, self.scripts[-1]))
        except ExitScript as end:
            self.result.exit_code = end.status
        except Jump:
            pass
        except RecursionError:
            raise ScriptError(f"{self.scripts[0]}: is nested too deep; simplify it") from None
        for name, line in self.variables.missing.items():
            what = f"argument {name} is not given" if name.isdigit() else f"{name} is not set"
            self.result.notes.append(f"line {line}: {what}; its value is empty")
        return self.result

    def read_script(self, path: str, place: Place) -> str:
        """Read a nested script.

        Raises:
            ScriptError: it cannot be read.
        """
        self.budget.spend("scripts", 1, place)
        try:
            return read_input(self.folder / path, MAX_SCRIPT_BYTES)
        except (DocumentError, ValueError) as error:
            message = reason(error) if isinstance(error, DocumentError) else str(error)
            other = equivalent_of(path)
            place.refuse(f"the script {path} cannot be read: {message}; give the path of an existing one{other}")

    def run_all(self, commands: Commands) -> None:
        """Run commands, one after the other."""
        for command in commands:
            self.run_and_or(command)

    def run_and_or(self, command: AndOr) -> None:
        """Run pipelines that are connected by && and ||.

        Raises:
            ExitScript: one of them failed under ``set -e``.
        """
        last = len(command.pipelines) - 1
        for number, (operator, pipeline) in enumerate(command.pipelines):
            status = self.variables.status
            if (operator == "&&" and status) or (operator == "||" and not status):
                continue
            self.conditions += number < last
            try:
                self.run_pipeline(pipeline)
            finally:
                self.conditions -= number < last
            is_final = number == last and not pipeline.is_negated
            if self.variables.status and is_final and self.stops_on_error and not self.conditions:
                self.note(pipeline.place, "a command failed under set -e, which ends the script")
                raise ExitScript(self.variables.status)
        if command.is_background:
            self.note(command.pipelines[0][1].place, "& is ignored: commands run one after the other")

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Run commands that are connected by pipes."""
        first, *others = pipeline.commands
        if not others:
            self.run(first)
        else:
            self.run_connected(first, others, pipeline.place)
        if pipeline.is_negated:
            self.variables.status = int(not self.variables.status)

    def run_connected(self, first: Command, others: Sequence[Command], place: Place) -> None:
        """Run commands connected by pipes: text passes from one to the next; output of a run is not piped."""
        before = len(self.result.steps)
        outer, self.captured = self.captured, []
        try:
            self.run(first)
            text = "".join(self.captured)
            for number, command in enumerate(others):
                if len(self.result.steps) > before:
                    words = (
                        self.expander.fields([w for w in command.words if not isinstance(w, Assignment)], place)
                        if isinstance(command, Simple)
                        else [""]
                    )
                    if words[:1] and words[0] not in PIPE_SINKS:
                        place.refuse(f"the output of a run is not piped to {words[0]}; remove the pipe")
                    self.note(place, f"the output is not piped to {' '.join(words)}")
                    continue
                self.captured = outer if number == len(others) - 1 else []
                self.run(command, text)
                text = "".join(self.captured or [])
        finally:
            self.captured = outer

    def is_true(self, condition: Commands) -> bool:
        """Run the commands of a condition; whether the last one has the status 0."""
        self.conditions += 1
        try:
            self.run_all(condition)
        finally:
            self.conditions -= 1
        return self.variables.status == 0

    # Compound commands

    def run(self, command: Command, stdin: str = "") -> None:
        """Run one command; ``stdin`` is the text that a pipe passes to it."""
        self.budget.spend("commands", 1, command.place)
        match command:
            case Simple():
                self.run_simple(command, stdin)
            case Condition():
                self.variables.status = int(not self.condition(command))
            case Evaluation():
                text = self.expander.string(command.expression, command.place)
                self.variables.status = int(not self.expander.integer(text, command.place))
            case If():
                self.run_if(command)
            case Loop():
                self.run_loop(command)
            case For():
                self.run_for(command)
            case Case():
                self.run_case(command)
            case Function():
                self.functions[command.name] = command.body
                self.variables.status = 0
            case Group(is_subshell=True):
                self.run_subshell(command.body)
            case Group():
                self.run_all(command.body)

    def run_if(self, command: If) -> None:
        """Run the first branch whose condition is true."""
        for condition, body in command.branches:
            if not condition or self.is_true(condition):
                self.variables.status = 0
                self.run_all(body)
                return
        self.variables.status = 0

    def in_loop(self, body: Commands) -> bool:
        """Run the body of a loop once; whether the loop ends.

        Raises:
            Jump: for an outer loop or function.
        """
        try:
            self.run_all(body)
        except Jump as jump:
            if jump.kind == "return":
                raise
            if jump.levels > 1:
                raise Jump(jump.kind, jump.levels - 1) from None
            return jump.kind == "break"
        return False

    def run_loop(self, command: Loop) -> None:
        """Run ``while`` or ``until``."""
        while self.is_true(command.condition) != command.is_until:
            self.budget.spend("commands", 1, command.place)
            self.variables.status = 0
            if self.in_loop(command.body):
                break
        self.variables.status = 0

    def run_for(self, command: For) -> None:
        """Run ``for``."""
        words = list(self.variables.arguments) if command.words is None else []
        for word in command.words or ():
            for text in self.expander.split(word, command.place):
                if re.search(r"[*?]|\[.*\]", text):
                    command.place.refuse(f"a loop over the files {text[:80]!r} is not interpreted; write their names")
                else:
                    words.append(text)
        for word_text in words:
            self.budget.spend("commands", 1, command.place)
            self.assign(command.name, word_text, command.place)
            self.variables.status = 0
            if self.in_loop(command.body):
                break

    def run_case(self, command: Case) -> None:
        """Run the first branch whose pattern matches."""
        subject = self.expander.string(command.word, command.place)
        self.variables.status = 0
        for patterns, body in command.branches:
            if any(fnmatch.fnmatchcase(subject, self.expander.pattern(one, command.place)) for one in patterns):
                self.run_all(body)
                return

    def run_subshell(self, body: Commands) -> None:
        """Run commands in a copy: variables and folder stay as they are, steps and notes are common."""
        inner = copy.copy(self)
        inner.variables = copy.copy(self.variables)
        inner.variables.values = {
            name: list(value) if isinstance(value, list) else value for name, value in self.variables.values.items()
        }
        inner.variables.arguments = list(self.variables.arguments)
        self.budget.spend("characters", sum(map(len, inner.variables.values.values())), Place(self.scripts[-1], 0))
        inner.exported, inner.functions = set(self.exported), dict(self.functions)
        inner.hidden = [dict(scope) for scope in self.hidden]
        inner.prepare()
        try:
            inner.run_all(body)
        except ExitScript as end:
            inner.variables.status = end.status
        self.variables.status = inner.variables.status

    def substitute(self, text: str, place: Place) -> str:
        """The output of a command substitution; only commands that produce text are interpreted."""
        self.calls += 1
        if self.calls > 20:
            place.refuse("command substitutions are nested too deep; simplify the script")
        before, outer = len(self.result.steps), self.captured
        output: list[str] = []
        self.captured = output
        was_missing = dict(self.variables.missing)
        try:
            self.run_subshell(parse_script(text, place.script, place.line))
        finally:
            self.captured = outer
            self.calls -= 1
            self.variables.missing = was_missing | self.variables.missing
        if len(self.result.steps) > before:
            place.refuse("the output of a run is not a value; run it before, and give the value with --set NAME=VALUE")
        return "".join(output)

    def condition(self, command: Condition) -> bool:
        """``[[ ... ]]``."""
        words: list[tuple[str, str, bool]] = []
        for token in command.tokens:
            if isinstance(token, str):
                words.append((token, token, True))
            else:
                words.append(
                    (self.quiet_string(token, command.place), self.expander.pattern(token, command.place), False)
                )
        return self.holds(words, command.place, has_patterns=True)

    def quiet_string(self, word: Word, place: Place) -> str:
        """Expand a word of a condition, where an unset variable is tested and needs no note."""
        missing = dict(self.variables.missing)
        text = self.expander.string(word, place)
        self.variables.missing.clear()
        self.variables.missing.update(missing)
        return text

    def holds(self, words: Sequence[tuple[str, str, bool]], place: Place, *, has_patterns: bool) -> bool:
        """Whether a condition is true."""
        return holds(
            words,
            self.folder,
            lambda text: self.expander.integer(text, place),
            lambda name: self.variables.get(name) is not None,
            place,
            has_patterns=has_patterns,
        )

    # Simple commands

    def run_simple(self, command: Simple, stdin: str) -> None:
        """Run a simple command: assignments, or words."""
        place = command.place
        if not command.words:
            self.variables.status = 0
            for assignment in command.assignments:
                self.run_assignment(assignment, place)
            return
        first = command.words[0]
        is_test = not isinstance(first, Assignment) and self.literal(first) in ("[", "test")
        missing = dict(self.variables.missing)
        words: list[str] = []
        declared: list[Assignment] = []
        for word in command.words:
            if isinstance(word, Assignment):
                declared.append(word)
            else:
                words += self.expander.split(word, place)
        if is_test:
            self.variables.missing.clear()
            self.variables.missing.update(missing)
        if not words:
            self.variables.status = 0
            return
        if words[0] in DECLARATIONS:
            self.declare(words, declared, place)
            return
        prefix = {one.name: self.value_of(one, place) for one in command.assignments}
        for redirection in command.redirections:
            if redirection.operator in ("<<", "<<-", "<<<"):
                stdin = self.expander.string(redirection.target, place) + "\n" * (redirection.operator == "<<<")
            elif redirection.operator == "<":
                stdin = self.texts.read(self.expander.string(redirection.target, place), place)
        self.budget.spend("characters", len(stdin), place)
        self.call(words, prefix, stdin, command.redirections, place)

    @staticmethod
    def literal(word: Word) -> str:
        """The text of a word without expansions; empty for others."""
        return "".join(getattr(part, "text", "") for part in word) if len(word) == 1 else ""

    def call(
        self,
        words: list[str],
        prefix: Mapping[str, Value],
        stdin: str,
        redirections: Sequence[Redirection],
        place: Place,
    ) -> None:
        """Run a function, a built-in, a text command or a program.

        Raises:
            ExitScript: the command is ``exec``, whose program replaces the script.
        """
        name, arguments = words[0], words[1:]
        if not name.startswith("--"):
            self.started = None
        separator = prefix.get("IFS", " ")
        if isinstance(separator, list) or separator.strip():
            place.refuse(f"IFS before {name} is not interpreted: words are split at blanks; use tr, or write the words")
        is_last = False
        while name in ("command", "builtin", "exec") and arguments and not arguments[0].startswith("-"):
            is_last = is_last or name == "exec"
            name, *arguments = arguments
        self.variables.status = 0
        built_in = getattr(self, f"do_{BUILT_INS.get(name, '')}", None)
        if name in self.functions:
            self.call_function(name, arguments, prefix, place)
        elif built_in is not None:
            built_in(name, arguments, stdin, place)
        elif (text := self.texts.find(name, arguments)) is not None:
            self.write(text(arguments, stdin, place), redirections, place)
        elif name in IGNORED:
            if IGNORED[name]:
                self.note(place, f"{name} is ignored: {IGNORED[name]}")
        else:
            self.start([name, *arguments], prefix, stdin, redirections, place)
        if is_last:
            raise ExitScript(self.variables.status)

    def write(self, text: str, redirections: Sequence[Redirection], place: Place) -> None:
        """Write the output of a text command: to the user, to a substitution, or to a JSON file."""
        self.budget.spend("characters", len(text), place)
        for redirection in redirections:
            if redirection.operator not in (">", ">>", ">|", "&>", "&>>") or redirection.descriptor == "2":
                continue
            path = self.expander.string(redirection.target, place)
            if path in ("/dev/null", "/dev/stdout", "/dev/stderr"):
                return
            self.write_file(path, text, redirection.operator in (">>", "&>>"), place)
            return
        is_error = any(one.operator == ">&" and one.descriptor in ("", "1") for one in redirections)
        if self.captured is not None and not is_error:
            self.captured.append(text)
        elif text.strip():
            self.result.printed.append(text.rstrip("\n"))

    def write_file(self, path: str, text: str, is_appended: bool, place: Place) -> None:
        """Note a JSON file that the script writes; other files are not written."""
        full = Path(os.path.abspath(self.folder / path)) if "\0" not in path else self.folder
        if full.suffix != ".json":
            self.note(place, f"{path} is not written: only JSON files are")
            return
        roots = [Path(os.path.abspath(root)) for root in self.root]
        real = Path(os.path.realpath(full))
        if not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
            place.refuse(
                f"{path} is outside of the folder of the run and that of the script; write it before, and remove this"
            )
        if is_appended:
            text = self.written.get(full, "") + text
        try:
            is_object = isinstance(parse_json(text), dict)
        except ValueError:
            is_object = False
        if not is_object:
            place.refuse(f"the text for {path} is not a JSON object; correct it, or write the file before")
        self.written[full] = text
        self.result.steps.append(WriteStep(full, text, place))

    def start(
        self,
        words: list[str],
        prefix: Mapping[str, Value],
        stdin: str,
        redirections: Sequence[Redirection],
        place: Place,
    ) -> None:
        """Add the step of a program, or interpret a nested script; options continue the command before them."""
        # A shell would execute that command without these options, and fail here.
        if words[0].startswith("--") and self.started is not None:
            self.note(place, f"{words[0]} is an option of the command before: its last line lacks a backslash")
            before, prefix, stdin = self.started
            self.result.steps.pop()
            words = [*before, *words]
        translated = translate_program(words, stdin, self.launch_variables(prefix), self.launch)
        if isinstance(translated, NestedScript):
            self.run_nested(translated, prefix, place)
            return
        if not isinstance(translated, OurCommand):
            value = "; or give the value with --set NAME=VALUE" if self.captured is not None else ""
            place.refuse(refusal(words, translated) + value)
        for note in translated.notes:
            self.note(place, note)
        for redirection in redirections:
            if redirection.operator in (">", ">>", "&>", "&>>", ">|"):
                target = self.expander.string(redirection.target, place)
                if target != "/dev/null":
                    self.note(place, f"the output is not written to {target}; redirect that of this command")
        variables = self.launch_variables({**prefix, **translated.environment})
        environment, unsafe = passed_variables(variables, self.environment)
        for name in unsafe:
            self.note(place, f"{name} is not passed on: it changes which code is executed; set it before")
        self.result.steps.append(StartStep(tuple(translated.words), environment, self.folder, place, tuple(words)))
        self.started = words, prefix, stdin

    def launch_variables(self, prefix: Mapping[str, Value]) -> dict[str, str]:
        """Strings that launchers read: the environment with exported variables."""
        values = {**self.variables.values, **prefix}
        names = self.exported | prefix.keys()
        return {name: value for name in names if isinstance(value := values.get(name), str)}

    def run_nested(self, script: NestedScript, prefix: Mapping[str, Value], place: Place) -> None:
        """Interpret ``bash FILE``, ``bash -c TEXT`` or a script from a here-document, in a copy of the variables."""
        self.calls += 1
        if self.calls > 20:
            place.refuse("scripts are nested too deep; simplify them")
        text = script.text if script.text is not None else self.read_script(script.path, place)
        for note in script.notes:
            self.note(place, note)
        inner = copy.copy(self)
        values = {name: value for name, value in self.variables.values.items() if name in self.exported}
        values |= {**prefix, **script.environment}
        inner.variables = Variables(values, list(script.arguments), script.path, settings=self.settings)
        inner.exported, inner.functions, inner.hidden = self.exported | values.keys(), {}, []
        inner.stops_on_error, inner.launch = False, script.launch
        inner.root = (*self.root, self.folder / Path(script.path).parent) if script.text is None else self.root
        inner.prepare()
        try:
            inner.enter_script(script.path if script.text is None else place.script, text)
        except ExitScript as end:
            inner.variables.status = end.status
        self.variables.status = inner.variables.status
        self.calls -= 1

    def note(self, place: Place, text: str) -> None:
        """Add a note for the user, once."""
        where = f"line {place.line}" if place.script == self.scripts[0] else f"{place.script}, line {place.line}"
        line = f"{where}: {text}"
        if line not in self.result.notes[-50:]:
            self.result.notes.append(line)


def interpret_script(
    text: str,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    settings: Mapping[str, str] | None = None,
) -> ScriptResult:
    """Interpret a script, without executing anything.

    Args:
        text: contents of the script.
        name: its path, ``$0``.
        arguments: its arguments.
        environment: environment of the script.
        folder: working folder.
        settings: variables whose value the script cannot change.

    Raises:
        ScriptError: it has a command or syntax that is not interpreted.
    """
    return Interpreter(name, arguments, environment, folder, settings).interpret(text)
