"""Assignments of a shell script: strings, arrays and their elements, and ``export``, ``declare`` and ``local``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .expansion import MAX_VALUE, Expander, Value, Variables
from .session import Budget
from .syntax import Assignment, Place

# Attributes of variables that are refused, and what to write instead.
_ATTRIBUTES: Mapping[str, str] = {
    "A": "arrays have whole numbers as subscripts; use case, or one variable for each key",
    "i": "values are text; assign $((EXPRESSION))",
    "n": "a variable has no second name; use the variable itself",
    "l": "values are not changed; use ${NAME,,}",
    "u": "values are not changed; use ${NAME^^}",
}


class Assignments:
    """Assigns variables; not those that ``--set`` fixes."""

    variables: Variables
    expander: Expander
    settings: dict[str, str]
    exported: set[str]
    budget: Budget
    # For each active function, the variables that it has hidden, with their values outside.
    hidden: list[dict[str, Value | None]]

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
        """``export``, ``declare``, ``local`` and ``readonly``; in a function, ``local`` and ``declare`` end with it.

        Raises:
            ScriptError: an attribute that changes what an assignment means.
        """
        options = "".join(word[1:] for word in words[1:] if word[:1] in ("-", "+"))
        for letter, what in _ATTRIBUTES.items():
            if letter in options and words[0] != "export":
                place.refuse(f"{words[0]} -{letter} is not interpreted: {what}")
        is_local = words[0] == "local" or (words[0] in ("declare", "typeset") and "g" not in options)
        names = [assignment.name for assignment in assignments]
        for assignment in assignments:
            # The value may name a variable that it hides: local LR=${LR:-1e-4}.
            if not is_local or assignment.index:
                self.run_assignment(assignment, place)
                continue
            value = self.value_of(assignment, place)
            if self.hide(assignment.name) or not assignment.is_appended:
                self.assign(assignment.name, value, place)
            else:
                self.run_assignment(assignment, place)
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name.isidentifier():
                names.append(name)
                is_new = is_local and self.hide(name)
                if equals:
                    self.assign(name, value, place)
                elif "a" in options:
                    self.variables.values.setdefault(name, [])
                elif is_new and name not in self.settings:
                    self.variables.values.pop(name, None)
        if words[0] == "export" or "x" in options:
            self.exported.update(names)
        # The status is that of this command, not that of a substitution in a value.
        self.variables.status = 0

    def hide(self, name: str) -> bool:
        """Keep the value of a variable that the active function hides; whether it is hidden from now on."""
        if not self.hidden or name in self.hidden[-1]:
            return False
        self.hidden[-1][name] = self.variables.values.get(name)
        return True

    def end_function(self) -> None:
        """Restore the variables that a function has hidden."""
        for name, value in self.hidden.pop().items():
            if value is None:
                self.variables.values.pop(name, None)
            else:
                self.variables.values[name] = value
