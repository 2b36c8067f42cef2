"""Options of ``generate`` that have no effect next to others: a table as :mod:`effect` has one for ``pretrain``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..evaluation import GenerateConfig
from ..fields import specs_of


@dataclass(frozen=True, kw_only=True)
class TaskEffect:
    """When some options have an effect; ``without`` follows "has no effect"."""

    options: tuple[str, ...]
    when: Callable[[GenerateConfig, float], bool]
    without: str


GENERATE_EFFECTS: tuple[TaskEffect, ...] = (
    TaskEffect(
        options=("top_k", "seed"),
        when=lambda _, temperature: temperature > 0,
        without="where the likeliest token is taken (--greedy, a temperature of 0 or a top-p of 0)",
    ),
    # A top-p of 0 is what asks for the likeliest token.
    TaskEffect(
        options=("top_p",),
        when=lambda c, temperature: temperature > 0 or (c.top_p == 0 and not c.greedy),
        without="where the likeliest token is taken (--greedy or a temperature of 0)",
    ),
    TaskEffect(options=("temperature",), when=lambda c, _: not c.greedy, without="with --greedy"),
    TaskEffect(
        options=("genfile", "sample_output_file"), when=lambda c, _: not c.interactive, without="with --interactive"
    ),
    TaskEffect(options=("sample_output_file",), when=lambda c, _: not c.genfile, without="next to --genfile"),
    TaskEffect(options=("sample_input_file",), when=lambda c, _: not c.prompts, without="next to --prompts"),
)


def generate_warnings(asked: GenerateConfig, temperature: float) -> list[str]:
    """The options of ``generate`` that are given, with another value than the default, and change nothing."""
    specs = {spec.name: spec for spec in specs_of(GenerateConfig)}
    return [
        f"{specs[name].flag} has no effect {effect.without}"
        for effect in GENERATE_EFFECTS
        if not effect.when(asked, temperature)
        for name in effect.options
        if getattr(asked, name) != specs[name].default
    ]
