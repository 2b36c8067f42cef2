"""Assignments of a shell script: strings, arrays and their elements, and ``export``, ``declare`` and ``local``."""

from __future__ import annotations

from collections.abc import Sequence

from .expansion import MAX_VALUE, Expander, Value, Variables
from .session import Budget
from .syntax import Assignment, Place


class Assignments:
    """Assigns variables; not those that ``--set`` fixes."""

    variables: Variables
    expander: Expander
    settings: dict[str, str]
    exported: set[str]
    budget: Budget

    def value_of(self, assignment: Assignment, place: Place) -> Value:
        """The value of an assignment."""
        if isinstance(assignment.value, list):
            return self.expander.fields(assignment.value, place)
        return self.expander.string(assignment.value, place)

    def run_assignment(self, assignment: Assignment, place: Place) -> None:
        """Assign a string, an array or an element."""
        name = assignment.name
        if name in self.settings:
            return
        value, old = self.value_of(assignment, place), self.variables.values.get(name)
        if assignment.index:
            self.assign_element(assignment, value, place)
            return
        if assignment.is_appended:
            if isinstance(value, list):
                value = [*(old if isinstance(old, list) else [] if old is None else [old]), *value]
            elif isinstance(old, list):
                value = [old[0] + value, *old[1:]] if old else [value]
            else:
                value = (old or "") + value
        self.assign(name, value, place)

    def assign_element(self, assignment: Assignment, value: Value, place: Place) -> None:
        """Assign an element of an array."""
        if isinstance(value, list):
            place.refuse(f"an element of {assignment.name} cannot be an array; give one word")
        index = self.expander.integer(assignment.index.replace("$", ""), place)
        old = self.variables.values.get(assignment.name)
        elements = list(old) if isinstance(old, list) else [] if old is None else [old]
        if not 0 <= index <= len(elements):
            place.refuse(f"{assignment.name}[{index}] is not the next element; assign elements in order")
        elements[index : index + 1] = [value]
        self.assign(assignment.name, elements, place)

    def assign(self, name: str, value: Value, place: Place) -> None:
        """Set a variable; not one that ``--set`` fixes.

        Raises:
            ScriptError: IFS, which changes how words are split.
        """
        if name == "IFS":
            place.refuse("IFS is not interpreted: words are split at blanks; remove the line")
        size = len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
        if size > MAX_VALUE:
            place.refuse(f"the value of {name} has more than {MAX_VALUE:,} characters; use a shorter one")
        self.budget.spend("characters", size, place)
        if name not in self.settings:
            self.variables.values[name] = value

    def declare(self, words: Sequence[str], assignments: Sequence[Assignment], place: Place) -> None:
        """``export``, ``declare``, ``local`` and ``readonly``; all variables are global."""
        self.variables.status = 0
        for assignment in assignments:
            self.run_assignment(assignment, place)
        names = [assignment.name for assignment in assignments]
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name.isidentifier():
                names.append(name)
                if equals:
                    self.assign(name, value, place)
                elif "-a" in words:
                    self.variables.values.setdefault(name, [])
        if words[0] == "export" or "-x" in words:
            self.exported.update(names)
