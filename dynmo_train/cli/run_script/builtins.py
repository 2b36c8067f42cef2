"""Built-in commands of the shell: ``set``, ``shift``, ``test``, ``cd``, ``source``, ``eval`` and similar."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from .assignments import Assignments
from .expansion import Value
from .parser import parse_script
from .session import ExitScript, Jump
from .syntax import Command, Commands, Place

BUILT_INS: Mapping[str, str] = {
    ":": "nothing",
    "true": "nothing",
    "false": "false",
    "[": "test",
    "test": "test",
    "exit": "exit",
    "return": "jump",
    "break": "jump",
    "continue": "jump",
    "shift": "shift",
    "set": "set",
    "unset": "unset",
    "eval": "eval",
    "source": "source",
    ".": "source",
    "cd": "cd",
    "pushd": "cd",
    "read": "read",
    "let": "let",
}


class BuiltIns(Assignments):
    """Built-in commands; each receives its name, its arguments, the text of its input, and its line."""

    folder: Path
    calls: int
    stops_on_error: bool
    scripts: list[str]
    functions: dict[str, Command]

    @abstractmethod
    def run_all(self, commands: Commands) -> None:
        """Run commands."""

    @abstractmethod
    def run(self, command: Command, stdin: str = "") -> None:
        """Run one command."""

    @abstractmethod
    def note(self, place: Place, text: str) -> None:
        """Add a note for the user."""

    @abstractmethod
    def read_script(self, path: str, place: Place) -> str:
        """Read a nested script."""

    @abstractmethod
    def holds(self, words: Sequence[tuple[str, str, bool]], place: Place, *, has_patterns: bool) -> bool:
        """Whether a condition is true."""

    def call_function(self, name: str, arguments: list[str], prefix: Mapping[str, Value], place: Place) -> None:
        """Run a function of the script; assignments before its name end with it."""
        self.calls += 1
        if self.calls > 20:
            place.refuse(f"calls of the function {name} are nested too deep; simplify the script")
        outer, self.variables.arguments = self.variables.arguments, arguments
        self.hidden.append({})
        exported = set(self.exported)
        try:
            for variable, value in prefix.items():
                self.hide(variable)
                self.assign(variable, value, place)
                self.exported.add(variable)
            self.run(self.functions[name])
        except Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.end_function()
            self.exported -= prefix.keys() - exported
            self.variables.arguments = outer
            self.calls -= 1

    def do_nothing(self, _name: str, _arguments: list[str], _stdin: str, _place: Place) -> None:
        """``:`` and ``true``."""

    def do_false(self, _name: str, _arguments: list[str], _stdin: str, _place: Place) -> None:
        """``false``."""
        self.variables.status = 1

    def do_test(self, name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``test`` and ``[``."""
        if name == "[":
            if arguments[-1:] != ["]"]:
                place.refuse("[ is not closed; close it with ]")
            arguments = arguments[:-1]
        words = [(word, word, False) for word in arguments]
        self.variables.status = int(not self.holds(words, place, has_patterns=False))

    def do_exit(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``exit``.

        Raises:
            ExitScript: always.
        """
        raise ExitScript(self.number(arguments, self.variables.status, place) % 256)

    def do_jump(self, name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``break``, ``continue`` and ``return``.

        Raises:
            Jump: always.
        """
        number = self.number(arguments, 0 if name == "return" else 1, place)
        if name == "return":
            self.variables.status = number % 256
        raise Jump(name, max(1, number))

    def number(self, arguments: Sequence[str], default: int, place: Place) -> int:
        """The first argument as a whole number; without one, the default."""
        if not arguments:
            return default
        if not re.fullmatch(r"-?\d{1,9}", arguments[0]):
            place.refuse(f"{arguments[0][:80]!r} is not a whole number; give one")
        return int(arguments[0])

    def do_shift(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``shift``."""
        count = self.number(arguments, 1, place)
        if 0 <= count <= len(self.variables.arguments):
            del self.variables.arguments[:count]
        else:
            self.variables.status = 1

    def do_set(self, _name: str, arguments: list[str], _stdin: str, _place: Place) -> None:
        """``set``: options -e and -u, and arguments."""
        words = list(arguments)
        while words and words[0][:1] in ("-", "+"):
            word = words.pop(0)
            if word == "--":
                self.variables.arguments = words
                return
            is_on = word[0] == "-"
            options = [words.pop(0) if words else ""] if word[1:] == "o" else []
            if "e" in word or "errexit" in options:
                self.stops_on_error = is_on
            if "u" in word or "nounset" in options:
                self.variables.is_unset_refused = is_on
            if word[1:] != "o" and word.endswith("o") and words:
                words.pop(0)
        if words:
            self.variables.arguments = words

    def do_unset(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``unset``."""
        for name in arguments:
            if "[" in name:
                place.refuse(f"unset {name}: single elements are not removed; assign the array without it")
            if arguments[0] == "-f":
                self.functions.pop(name, None)
            elif name not in self.settings:
                self.variables.values.pop(name, None)
                self.exported.discard(name)

    def do_eval(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``eval``."""
        self.run_text(" ".join(arguments), place)

    def run_text(self, text: str, place: Place) -> None:
        """Run commands in a text: ``eval`` or ``bash -c``."""
        self.calls += 1
        if self.calls > 20:
            place.refuse("eval is nested too deep; simplify the script")
        self.budget.spend("characters", len(text), place)
        self.run_all(parse_script(text, place.script, place.line))
        self.calls -= 1

    def do_source(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``source``; files that activate an environment are ignored."""
        path = (arguments or [""])[0]
        if re.search(r"(^|/)(activate|\.?bashrc|\.?profile|\.bash_profile|conda\.sh)$", path):
            self.note(place, f"{path} is ignored: environments are not activated; activate yours before")
            return
        text = self.read_script(path, place)
        outer = self.variables.arguments
        if arguments[1:]:
            self.variables.arguments = arguments[1:]
        self.enter_script(path, text)
        self.variables.arguments = outer

    def enter_script(self, path: str, text: str) -> None:
        """Run the text of a nested script under its own name."""
        bash_source = self.variables.values.get("BASH_SOURCE", "")
        self.scripts = [*self.scripts, path]
        self.variables.values["BASH_SOURCE"] = [path]
        try:
            self.run_all(parse_script(text, path))
        except Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.scripts = self.scripts[:-1]
            self.variables.values["BASH_SOURCE"] = bash_source

    def do_cd(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``cd`` to a folder that exists."""
        path = next((word for word in arguments if word not in ("--", "-P", "-L")), os.path.expanduser("~"))
        folder = Path(os.path.abspath(self.folder / path)) if "\0" not in path else Path("\0")
        try:
            is_folder = folder.is_dir()
        except ValueError:
            is_folder = False
        if path == "-" or not is_folder:
            self.note(place, f"cd {path} is ignored: no such folder")
            self.variables.status = 1
            return
        self.folder = folder
        self.variables.values["PWD"] = str(folder)

    def do_read(self, _name: str, arguments: list[str], stdin: str, place: Place) -> None:
        """``read`` from a text."""
        names = [word for word in arguments if not word.startswith("-")]
        options = "".join(word[1:] for word in arguments if word.startswith("-"))
        if not stdin or set(options) - set("ra") or not names:
            place.refuse("read is interpreted only with <<< TEXT; give the value with --set NAME=VALUE")
        line = stdin.split("\n", 1)[0]
        if "a" in options:
            self.assign(names[0], line.split(), place)
            return
        words = line.split(None, len(names) - 1)
        for number, name in enumerate(names):
            self.assign(name, words[number].strip() if number < len(words) else "", place)

    def do_let(self, _name: str, arguments: list[str], _stdin: str, place: Place) -> None:
        """``let``."""
        for text in arguments:
            self.variables.status = int(not self.expander.integer(text, place))
