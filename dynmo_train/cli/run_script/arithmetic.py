"""Arithmetic expressions of the shell: integers of 64 bits, by the precedence of C."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, MutableMapping

from .syntax import Place

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]{1,16}|\d{1,19}|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]?=|[-+*/%()<>&|^~!?:,])"
)
MAX_TOKENS, MAX_NESTING = 1000, 40


def _divide(left: int, right: int) -> int:
    """Division that rounds to zero, as in C."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_BINARY: list[dict[str, Callable[[int, int], int]]] = [
    {"||": lambda left, right: int(bool(left or right))},
    {"&&": lambda left, right: int(bool(left and right))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": lambda left, right: int(left == right), "!=": lambda left, right: int(left != right)},
    {
        "<": lambda left, right: int(left < right),
        "<=": lambda left, right: int(left <= right),
        ">": lambda left, right: int(left > right),
        ">=": lambda left, right: int(left >= right),
    },
    {"<<": lambda left, right: left << (right & 63), ">>": lambda left, right: left >> (right & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divide, "%": lambda left, right: left - right * _divide(left, right)},
]


def _wrapped(number: int) -> int:
    """The number in 64 bits with sign, as the shell computes."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class _Evaluation:
    def __init__(self, text: str, variables: MutableMapping[str, str], place: Place, depth: int) -> None:
        self.variables, self.place, self.depth, self.text = variables, place, depth, text
        self.nesting = 0
        # Number of open operands that are parsed without being evaluated: N of 0 && N++.
        self.skipped = 0
        self.tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None or len(self.tokens) >= MAX_TOKENS:
                place.refuse(f"{text.strip()[:80]!r} is not an integer expression; use whole numbers and + - * / %")
            self.tokens.append(match[1])
            at = match.end()
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *tokens: str) -> str:
        found = self.peek()
        if found and found in tokens:
            self.at += 1
            return found
        return ""

    def need(self, token: str) -> None:
        if not self.take(token):
            self.place.refuse(f"{self.text.strip()[:80]!r}: {token} is missing in the expression; complete it")

    def value(self, name: str) -> int:
        """The value of a variable, which may be an expression itself; 0 for an unset one."""
        text = self.variables.get(name, "")
        if not text.strip():
            return 0
        return evaluate(text, self.variables, self.place, self.depth + 1)

    def comma(self) -> int:
        result = self.assignment()
        while self.take(","):
            result = self.assignment()
        return result

    def assignment(self) -> int:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.place.refuse("the expression is nested too deep; simplify it")
        name = self.peek()
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if re.fullmatch(r"[A-Za-z_]\w*", name) and re.fullmatch(r"[-+*/%&|^]?=", following):
            self.at += 2
            result = self.assignment()
            if following != "=":
                result = self.apply(following[0], self.value(name), result)
            self.store(name, result)
        else:
            result = self.ternary()
        self.nesting -= 1
        return result

    def ternary(self) -> int:
        condition = self.binary(0)
        if not self.take("?"):
            return condition
        first = self.skip_if(not condition, self.assignment)
        self.need(":")
        second = self.skip_if(bool(condition), self.assignment)
        return first if condition else second

    def skip_if(self, is_skipped: bool, operand: Callable[[], int]) -> int:
        """Parse an operand; a skipped one changes no variable and divides by no number."""
        self.skipped += is_skipped
        result = operand()
        self.skipped -= is_skipped
        return result

    def store(self, name: str, value: int) -> None:
        """Assign a variable."""
        if not self.skipped:
            self.variables[name] = str(value)

    def apply(self, symbol: str, left: int, right: int) -> int:
        if self.skipped:
            return 0
        if symbol in ("/", "%") and right == 0:
            self.place.refuse(f"{self.text.strip()[:80]!r} divides by zero; check its variables")
        level = next(level for level in _BINARY if symbol in level)
        return _wrapped(level[symbol](left, right))

    def binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self.power()
        left = self.binary(level + 1)
        while symbol := self.take(*_BINARY[level]):
            is_decided = (symbol == "&&" and not left) or (symbol == "||" and left != 0)
            left = self.apply(symbol, left, self.skip_if(is_decided, lambda: self.binary(level + 1)))
        return left

    def power(self) -> int:
        base = self.unary()
        if not self.take("**"):
            return base
        exponent = self.power_operand()
        if not 0 <= exponent < 64:
            self.place.refuse(f"the exponent {exponent} must be from 0 to 63; use a smaller one")
        return _wrapped(base**exponent)

    def power_operand(self) -> int:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.place.refuse("the expression is nested too deep; simplify it")
        result = self.power()
        self.nesting -= 1
        return result

    def unary(self) -> int:
        signs = []
        while sign := self.take("+", "-", "!", "~", "++", "--"):
            signs.append(sign)
        name = self.peek()
        if signs[-1:] in (["++"], ["--"]) and re.fullmatch(r"[A-Za-z_]\w*", name):
            self.store(name, _wrapped(self.value(name) + (1 if signs.pop() == "++" else -1)))
        result = self.primary()
        for sign in reversed(signs):
            result = -result if sign == "-" else int(not result) if sign == "!" else ~result if sign == "~" else result
        return _wrapped(result)

    def primary(self) -> int:
        if self.take("("):
            result = self.comma()
            self.need(")")
            return result
        token = self.peek()
        self.at += 1
        if re.fullmatch(r"[A-Za-z_]\w*", token):
            result = self.value(token)
            if step := self.take("++", "--"):
                self.store(token, _wrapped(result + (1 if step == "++" else -1)))
            return result
        try:
            # A leading zero is octal in the shell, which surprises: 010 is 8.
            return _wrapped(int(token, 8 if re.fullmatch(r"0\d+", token) else 0))
        except ValueError:
            self.place.refuse(f"{self.text.strip()[:80]!r}: {token or 'a number'} is missing or no number; complete it")


def evaluate(text: str, variables: MutableMapping[str, str], place: Place, depth: int = 0) -> int:
    """Evaluate an integer expression.

    Args:
        text: the expression; an empty one is 0.
        variables: values of variables, which may be expressions; assignments change them.
        place: line of the script, for messages.
        depth: number of variables through which this expression was reached.

    Raises:
        ScriptError: not an integer expression, a division by zero, or variables that refer to each other.
    """
    if depth > 8:
        place.refuse("the variables of the expression refer to each other; give them numbers")
    if not text.strip():
        return 0
    evaluation = _Evaluation(text, variables, place, depth)
    result = evaluation.comma()
    if evaluation.peek():
        place.refuse(f"{text.strip()[:80]!r}: {evaluation.peek()} is unexpected in the expression; remove it")
    return result
