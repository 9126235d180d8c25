"""Choosing tensors by name."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

NameRule: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]
"""A glob over the whole name, ``"re:<regex>"`` or a compiled pattern found anywhere in it, or a list of them."""


def name_matcher(rule: NameRule) -> Callable[[str], bool]:
    """The rule as a function of a name; a list matches if one of its rules does."""
    if isinstance(rule, re.Pattern):
        return lambda name: rule.search(name) is not None
    if isinstance(rule, str):
        if rule.startswith("re:"):
            return name_matcher(re.compile(rule[3:]))
        return lambda name: fnmatch.fnmatchcase(name, rule)
    matchers = [name_matcher(item) for item in rule]
    return lambda name: any(match(name) for match in matchers)
