"""Parse the words in a shell script: quotes, expansions and here-documents."""

from __future__ import annotations

import bisect
import re

from .syntax import Arithmetic, Parameter, Part, Place, Placeholder, Redirection, Substitution, Text, Word

MAX_NESTING = 40
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|;|&(?!>)|\|&|\||\(|\)|\n")
_KEYWORD = re.compile(
    r"(if|then|elif|else|fi|for|while|until|do|done|case|esac|in|function|select|\{|\}|!|\[\[)(?=[\s;&|()]|$)"
)
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_PARAMETER_OPERATOR = re.compile(r":-|:=|:\+|:\?|%%|##|//|/#|/%|,,|\^\^|[-=+?%#/,^:@]")
_WORD_END = frozenset(" \t\r\n;&|<>()")
# What documentation has in place of a value: <path to the file>.
PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>\n]*[^\s<>])?>")


class WordParser:
    """A recursive-descent parser over the characters of a script."""

    def __init__(self, text: str, script: str, first_line: int = 1) -> None:
        self.text, self.script, self.first_line = text, script, first_line
        self.at = 0
        self.depth = 0
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.documents: list[tuple[Redirection, str, bool, bool, Place]] = []

    def place(self, at: int | None = None) -> Place:
        """The line of a position.

        Args:
            at: index of a character; None: the current one.
        """
        line = bisect.bisect_left(self.newlines, self.at if at is None else at)
        return Place(self.script, self.first_line + line)

    def enter(self) -> None:
        """Count a level of nesting.

        Raises:
            ScriptError: there are too many.
        """
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.place().refuse(f"is nested more than {MAX_NESTING} levels deep; simplify the script")

    # Blanks and operators

    def skip_blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.at += 2 + (self.text[self.at + 1] == "\r")
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\\" and self.at == len(self.text) - 1:
                self.at += 1  # the last line continues with nothing
            else:
                return

    def operator(self) -> str:
        """The operator at the current position, which is not consumed; empty at a word."""
        self.skip_blanks()
        match = _OPERATOR.match(self.text, self.at)
        return match[0] if match else ""

    def keyword(self) -> str:
        """The reserved word at the current position, which is not consumed; empty without one."""
        self.skip_blanks()
        match = _KEYWORD.match(self.text, self.at)
        return match[1] if match else ""

    def expect(self, *words: str, of: str) -> str:
        """Consume one of the reserved words or operators.

        Raises:
            ScriptError: another word follows.
        """
        self.skip_newlines()
        found = self.keyword() or self.operator()
        if found not in words:
            self.place().refuse(f"{' or '.join(words)} of {of} is missing; complete it")
        self.at += len(found)
        return found

    def newline(self) -> None:
        """Consume a line break, and the here-documents that follow it."""
        self.at += 1
        documents, self.documents = self.documents, []
        for redirection, end, is_literal, strips_tabs, place in documents:
            lines = []
            while True:
                if self.at >= len(self.text):
                    place.refuse(f"the here-document has no end; write {end} on a line of its own")
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = stop + 1
                line = line.lstrip("\t") if strips_tabs else line
                if line.rstrip("\r") == end:
                    break
                lines.append(line + "\n")
            body = "".join(lines)
            redirection.target = (Text(body, True),) if is_literal else self.embedded(body, place.line + 1)

    def embedded(self, text: str, line: int) -> Word:
        """Parse text in which parameters are expanded as in double quotes.

        Args:
            text: the text.
            line: its first line in the script, from 1.
        """
        inner = type(self)(text, self.script, line)
        inner.depth = self.depth
        return inner.quoted("")

    def skip_newlines(self) -> None:
        """Skip line breaks, with the here-documents after them."""
        while self.operator() == "\n":
            self.newline()

    # Words

    def word(self) -> Word:
        """Parse a word up to a blank or an operator."""
        parts: list[Part] = []
        plain: list[str] = []

        def flush() -> None:
            if plain:
                parts.append(Text("".join(plain)))
                plain.clear()

        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "<" and (match := PLACEHOLDER.match(self.text, self.at)):
                flush()
                parts.append(Placeholder(match[0], self.place()))
                self.at = match.end()
                continue
            if char in _WORD_END:
                break
            if char == "\\":
                if self.text.startswith("\\\n", self.at):
                    self.at += 2
                    continue
                flush()
                parts.append(Text(self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char == "'":
                flush()
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    self.place().refuse("the single quote is not closed; close it")
                parts.append(Text(self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif char == '"':
                flush()
                self.at += 1
                parts += self.quoted('"') or (Text("", True),)
                self.at += 1
            elif char == "`" or (char == "$" and self.is_expansion()):
                flush()
                parts.append(self.expansion(is_quoted=False))
            else:
                plain.append(char)
                self.at += 1
        flush()
        return tuple(parts)

    def quoted(self, end: str) -> Word:
        """Parse text up to a closing quote, which is not consumed; an empty ``end``: up to the end of the text."""
        opened, parts, plain = self.at, list[Part](), list[str]()
        while True:
            if self.at >= len(self.text):
                if end:
                    self.place(opened).refuse("the double quote is not closed; close it")
                break
            char = self.text[self.at]
            if char == end:
                break
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", "\\", "\n", end or "$"):
                escaped = self.text[self.at + 1 : self.at + 2]
                plain.append("" if escaped == "\n" else escaped)
                self.at += 2
            elif char == "`" or (char == "$" and self.is_expansion(is_quoted=True)):
                if plain:
                    parts.append(Text("".join(plain), True))
                    plain = []
                parts.append(self.expansion(is_quoted=True))
            else:
                plain.append(char)
                self.at += 1
        if plain:
            parts.append(Text("".join(plain), True))
        return tuple(parts)

    def is_expansion(self, *, is_quoted: bool = False) -> bool:
        """Whether a parameter, a command or an expression follows the dollar sign."""
        following = self.text[self.at + 1 : self.at + 2]
        if following in ("'", '"') and not is_quoted:
            self.place().refuse(f"$ before a quote is not interpreted; use {following} alone")
        if following == "[":
            self.place().refuse("$[EXPRESSION] is not interpreted; write $((EXPRESSION))")
        return bool(following) and (following in "{(" or _PARAMETER.match(following) is not None)

    def expansion(self, *, is_quoted: bool) -> Parameter | Arithmetic | Substitution:
        """Parse what begins with a dollar sign or a backquote."""
        self.enter()
        place = self.place()
        if self.text[self.at] == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*+`", re.DOTALL).match(self.text, self.at + 1)
            if end is None:
                place.refuse("the backquote is not closed; close it")
            inner = re.sub(r"\\([`\\$])", r"\1", end[0][:-1])
            self.at = end.end()
            found: Parameter | Arithmetic | Substitution = Substitution(inner, is_quoted, place)
        elif self.text.startswith("$((", self.at):
            inner = self.parenthesized(self.at + 1)[1:-1]
            found = Arithmetic(self.embedded(inner, place.line), is_quoted, place)
        elif self.text.startswith("$(", self.at):
            found = Substitution(self.parenthesized(self.at + 1), is_quoted, place)
        elif self.text.startswith("${", self.at):
            self.at += 2
            found = self.braced(place, is_quoted=is_quoted)
        else:
            # Without braces, an argument has one digit.
            match = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]").match(self.text, self.at + 1)
            name = match[0] if match else ""
            self.at += 1 + len(name)
            found = Parameter(name, "", "", (), is_quoted, place)
        self.depth -= 1
        return found

    def parenthesized(self, at: int) -> str:
        """The text within the parentheses that open at ``at``; the position moves after them."""
        level, quote, start, place = 0, "", at, self.place()
        while at < len(self.text):
            char = self.text[at]
            if char == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == "(":
                level += 1
            elif char == ")":
                level -= 1
                if not level:
                    self.at = at + 1
                    return self.text[start + 1 : at]
            at += 1
        return place.refuse("the parenthesis is not closed; close it")

    def braced(self, place: Place, *, is_quoted: bool) -> Parameter:
        """Parse ``NAME...}`` after ``${``."""
        text, operator, index = self.text, "", ""
        if text.startswith("#", self.at) and not text.startswith(("#}", "#-", "#:"), self.at):
            operator = "length"
            self.at += 1
        match = _PARAMETER.match(text, self.at)
        if match is None:
            place.refuse("the expansion has no name; write ${NAME}")
        self.at = match.end()
        if text.startswith("[", self.at):
            end = text.find("]", self.at)
            index = text[self.at + 1 : end] if end > 0 else ""
            if not index or len(index) > 200 or "\n" in index:
                place.refuse(f"the subscript of {match[0]} is not complete; write ${{{match[0]}[INDEX]}}")
            self.at = end + 1
        operands: list[Word] = []
        if not operator and (found := _PARAMETER_OPERATOR.match(text, self.at)):
            operator = found[0]
            self.at = found.end()
            # A pattern is one within double quotes too: "${PATH##*/}".
            is_text = is_quoted and operator[0] not in "#%/"
            operands.append(self.operand("/" if operator.startswith("/") else "", is_quoted=is_text))
            if operator.startswith("/") and text.startswith("/", self.at):
                self.at += 1
                operands.append(self.operand("", is_quoted=is_quoted))
        if not text.startswith("}", self.at):
            place.refuse(
                f"the expansion of {match[0]} is not interpreted; use ${{{match[0]}}} or ${{{match[0]}:-VALUE}}"
            )
        self.at += 1
        return Parameter(match[0], index, operator, tuple(operands), is_quoted, place)

    def operand(self, end: str, *, is_quoted: bool) -> Word:
        """Parse the word after the operator of an expansion, up to ``}`` or ``end``."""
        parts: list[Part] = []
        opened = self.place()
        while True:
            if self.at >= len(self.text):
                opened.refuse("the brace is not closed; close it")
            char = self.text[self.at]
            if char == "}" or (end and char == end):
                return tuple(parts)
            if char == "\\":
                parts.append(Text(self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char == '"':
                self.at += 1
                parts += self.quoted('"') or (Text("", True),)
                self.at += 1
            elif char == "'" and not is_quoted:
                close = self.text.find("'", self.at + 1)
                if close < 0:
                    opened.refuse("the single quote is not closed; close it")
                parts.append(Text(self.text[self.at + 1 : close], True))
                self.at = close + 1
            elif char == "`" or (char == "$" and self.is_expansion(is_quoted=is_quoted)):
                parts.append(self.expansion(is_quoted=is_quoted))
            else:
                stop = re.compile(r"[^\\\"'`$}/]++|.", re.DOTALL).match(self.text, self.at)
                piece = stop[0] if stop else char
                parts.append(Text(piece, is_quoted))
                self.at += len(piece)
