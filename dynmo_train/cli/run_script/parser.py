"""Parse a shell script to a syntax tree: the part of the grammar of bash that training scripts use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

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
    Simple,
    Text,
    Word,
)
from .word_parser import PLACEHOLDER, WordParser

_REDIRECTION = re.compile(r"(\d{0,4})(<<<|<<-|<<|>>|>\||>&|<&|<>|<|>)|(&>>|&>)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]{1,200})\])?(\+?)=")
_FUNCTION = re.compile(r"([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Commands whose arguments may be assignments.
DECLARATIONS = frozenset({"export", "declare", "typeset", "local", "readonly"})
_MAX_WORDS = 100_000


class _Parser(WordParser):
    """A recursive-descent parser of commands."""

    def commands(self, *ends: str) -> Commands:
        """Parse commands up to one of the reserved words or operators, which is not consumed."""
        self.enter()
        found: list[AndOr] = []
        while True:
            self.skip_newlines()
            operator = self.operator()
            if operator in ends or self.keyword() in (ends or ("",)) or self.at >= len(self.text):
                if self.at >= len(self.text) and self.documents:
                    self.newline()
                if ends and self.at >= len(self.text):
                    self.place().refuse(f"{' or '.join(ends)} is missing before the end; complete it")
                if self.at >= len(self.text) or operator in ends or self.keyword() in ends:
                    break
            if operator and operator != "(":
                self.place().refuse(f"{operator.strip() or 'the line break'} has no command before it; remove it")
            found.append(self.and_or())
        self.depth -= 1
        return tuple(found)

    def and_or(self) -> AndOr:
        pipelines = [("", self.pipeline())]
        while (operator := self.operator()) in ("&&", "||"):
            self.at += 2
            self.skip_newlines()
            pipelines.append((operator, self.pipeline()))
        is_background = operator == "&"
        if operator in (";", "&"):
            self.at += 1
        return AndOr(tuple(pipelines), is_background)

    def pipeline(self) -> Pipeline:
        place, is_negated = self.place(), False
        while self.keyword() == "!":
            self.at += 1
            is_negated = not is_negated
        found = [self.command()]
        while (operator := self.operator()) in ("|", "|&"):
            self.at += len(operator)
            self.skip_newlines()
            found.append(self.command())
        return Pipeline(place, tuple(found), is_negated)

    def command(self) -> Command:
        place, keyword = self.place(), self.keyword()
        if function := _FUNCTION.match(self.text, self.at):
            self.at = function.end()
            self.skip_newlines()
            return Function(place, function[1], self.command())
        if self.text.startswith("((", self.at):
            return Evaluation(place, self.embedded(self.parenthesized(self.at)[1:-1], place.line))
        if self.operator() == "(":
            self.at += 1
            body = self.commands(")")
            self.at += 1
            return Group(place, True, body)
        if keyword in ("", "in"):
            return self.simple(place)
        self.at += len(keyword)
        compound = _COMPOUND.get(keyword)
        if compound is None:
            place.refuse(f"{keyword} has no beginning here, or is not interpreted; remove it")
        found: Command = compound(self, place, keyword)
        while not self.operator() and (match := _REDIRECTION.match(self.text, self.at)):
            place.refuse(f"{match[0]} after {keyword} is not interpreted; redirect single commands")
        return found

    def if_(self, place: Place, _keyword: str) -> If:
        branches = []
        while True:
            condition = self.commands("then")
            self.expect("then", of="if")
            branches.append((condition, self.commands("elif", "else", "fi")))
            end = self.expect("elif", "else", "fi", of="if")
            if end == "else":
                branches.append(((), self.commands("fi")))
                end = self.expect("fi", of="if")
            if end == "fi":
                return If(place, tuple(branches))

    def loop(self, place: Place, keyword: str) -> Loop:
        condition = self.commands("do")
        return Loop(place, keyword == "until", condition, self.body(keyword))

    def body(self, keyword: str) -> Commands:
        self.expect("do", of=keyword)
        body = self.commands("done")
        self.expect("done", of=keyword)
        return body

    def for_(self, place: Place, keyword: str) -> For | Group:
        self.skip_blanks()
        if self.text.startswith("((", self.at):
            return self.counting(place, keyword)
        name = _NAME.match(self.text, self.at)
        if name is None:
            place.refuse("the loop has no variable and no words; write: for NAME in WORD ...")
        self.at = name.end()
        self.skip_newlines()
        words: list[Word] | None = None
        if self.keyword() == "in":
            self.at += 2
            words = []
            while not self.operator() and self.at < len(self.text):
                words.append(self.word())
        if self.operator() == ";":
            self.at += 1
        return For(place, name[0], None if words is None else tuple(words), self.body(keyword))

    def counting(self, place: Place, keyword: str) -> Group:
        """Parse ``for ((FIRST; CONDITION; STEP))`` to the equivalent ``while``."""
        expressions = self.parenthesized(self.at)[1:-1].split(";")
        if len(expressions) != 3:
            place.refuse("the loop needs three expressions; write: for ((FIRST; CONDITION; STEP))")
        if self.operator() == ";":
            self.at += 1
        body = self.body(keyword)
        first, condition, step = (
            AndOr((("", Pipeline(place, (Evaluation(place, self.embedded(text or "1", place.line)),), False)),))
            for text in map(str.strip, expressions)
        )
        return Group(
            place,
            False,
            (first, AndOr((("", Pipeline(place, (Loop(place, False, (condition,), (*body, step)),), False)),))),
        )

    def case(self, place: Place, _keyword: str) -> Case:
        self.skip_blanks()
        subject = self.word()
        branches: list[tuple[tuple[Word, ...], Commands]] = []
        self.expect("in", of="case")
        while True:
            self.skip_newlines()
            if self.keyword() == "esac":
                self.at += 4
                return Case(place, subject, tuple(branches))
            if self.operator() == "(":
                self.at += 1
                self.skip_blanks()
            patterns = [self.word()]
            while self.operator() == "|":
                self.at += 1
                self.skip_blanks()
                patterns.append(self.word())
            if self.operator() != ")":
                self.place().refuse("the pattern of case has no closing parenthesis; write PATTERN)")
            self.at += 1
            body = self.commands(";;", "esac")
            branches.append((tuple(patterns), body))
            if self.operator() == ";;":
                self.at += 2

    def group(self, place: Place, _keyword: str) -> Group:
        body = self.commands("}")
        self.at += 1
        return Group(place, False, body)

    def function(self, place: Place, _keyword: str) -> Function:
        self.skip_blanks()
        name = re.compile(r"[A-Za-z_][\w-]*").match(self.text, self.at)
        if name is None:
            place.refuse("the function has no name; write: NAME() { ...; }")
        self.at = name.end()
        if self.operator() == "(":
            self.at += 1
            self.expect(")", of="function")
        self.skip_newlines()
        return Function(place, name[0], self.command())

    def condition(self, place: Place, _keyword: str) -> Condition:
        tokens: list[Word | str] = []
        while True:
            self.skip_newlines()
            if re.compile(r"\]\](?=[\s;&|)]|$)").match(self.text, self.at):
                self.at += 2
                return Condition(place, tuple(tokens))
            if self.at >= len(self.text):
                place.refuse("[[ is not closed; close it with ]]")
            if operator := self.operator() or (self.text[self.at] if self.text[self.at] in "<>" else ""):
                self.at += len(operator)
                tokens.append(operator)
                continue
            tokens.append(self.regex_word() if tokens[-1:] == [(Text("=~"),)] else self.word())

    def regex_word(self) -> Word:
        """Parse the pattern after ``=~``, in which parentheses and bars are characters of the pattern."""
        match = re.compile(r"\S+").match(self.text, self.at)
        self.at = match.end() if match else self.at
        return (Text(match[0] if match else ""),)

    def simple(self, place: Place) -> Simple:
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirections: list[Redirection] = []
        while True:
            self.skip_blanks()
            if self.at >= len(self.text):
                break
            is_placeholder = PLACEHOLDER.match(self.text, self.at) is not None
            if not is_placeholder and (match := _REDIRECTION.match(self.text, self.at)):
                redirections.append(self.redirection(match))
                continue
            if self.operator():
                break
            is_declaration = bool(words) and words[0] in [(Text(name),) for name in DECLARATIONS]
            if (not words or is_declaration) and (match := _ASSIGNMENT.match(self.text, self.at)):
                (words if is_declaration else assignments).append(self.assignment(match))
                continue
            before = self.at
            words.append(self.word())
            if self.at == before:
                self.place().refuse(f"{self.text[self.at]!r} is not interpreted here; quote it or remove it")
            if len(words) > _MAX_WORDS:
                place.refuse(f"the command has more than {_MAX_WORDS:,} words; shorten it")
        return Simple(place, tuple(assignments), tuple(words), tuple(redirections))

    def assignment(self, match: re.Match[str]) -> Assignment:
        self.at = match.end()
        name, index, is_appended = match[1], match[2] or "", bool(match[3])
        if not self.text.startswith("(", self.at):
            return Assignment(name, index, is_appended, self.word())
        place = self.place()
        self.at += 1
        words: list[Word] = []
        while True:
            self.skip_newlines()
            if self.at >= len(self.text):
                place.refuse(f"the array {name} is not closed; close it with )")
            operator = self.operator()
            if operator == ")":
                self.at += 1
                return Assignment(name, index, is_appended, words)
            if operator or (self.text[self.at] in "<>" and not PLACEHOLDER.match(self.text, self.at)):
                self.place().refuse(f"{operator or self.text[self.at]} is not interpreted in an array; quote it")
            if re.compile(r"\[[^\]\s]+\]=").match(self.text, self.at):
                self.place().refuse(f"subscripts within the array {name} are not interpreted; write its words in order")
            words.append(self.word())

    def redirection(self, match: re.Match[str]) -> Redirection:
        descriptor, operator = match[1] or "", match[2] or match[3]
        place = self.place()
        self.at = match.end()
        self.skip_blanks()
        target = self.word()
        if not target:
            place.refuse(f"{operator} has no target; name a file")
        redirection = Redirection(descriptor, operator, target)
        if operator in ("<<", "<<-"):
            end = "".join(part.text for part in target if isinstance(part, Text))
            is_literal = any(isinstance(part, Text) and part.is_quoted for part in target)
            self.documents.append((redirection, end, is_literal, operator == "<<-", place))
        return redirection


_COMPOUND: Mapping[str, Callable[[_Parser, Place, str], Command]] = {
    "if": _Parser.if_,
    "while": _Parser.loop,
    "until": _Parser.loop,
    "for": _Parser.for_,
    "case": _Parser.case,
    "{": _Parser.group,
    "[[": _Parser.condition,
    "function": _Parser.function,
}


def parse_script(text: str, script: str, first_line: int = 1) -> Commands:
    """Parse a script.

    Args:
        text: contents of the script.
        script: name of the script, for messages.
        first_line: number of the first line, for messages.

    Raises:
        ScriptError: it is incomplete, or has syntax that is not interpreted.
    """
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + first_line
        Place(script, line).refuse("has a NUL byte; give a text file")
    return _Parser(text.replace("\r\n", "\n"), script, first_line).commands()
