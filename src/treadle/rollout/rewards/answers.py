"""Find answers in text: the last number, the last box, what follows `####`. Pure functions."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from typing import Any

from treadle.rollout.rewards.forms import RewardFault

_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]])-)?"  # a minus right after a digit, letter or bracket is a subtraction
    r"\$?(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))?"
)
_BOLD = re.compile(r"(?<![\w*])\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*(?![\w*])")
_BOX_OR_BRACE = re.compile(r"\\f?boxed\s*\{|[{}]")


def find_last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None.

    Thousands commas, a sign, a decimal point, an exponent and a dollar sign are read; a full stop at the end of a
    sentence is not part of the number. A minus belongs to the number only if it touches it and does not follow
    a digit, letter or bracket. Fractions are two numbers.

    >>> find_last_number("She pays $1,234.50.")
    Decimal('1234.50')
    >>> find_last_number("7-9 = -2"), find_last_number("7-9")
    (Decimal('-2'), Decimal('9'))
    """
    found = deque(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    if not found:
        return None
    last = found[0]
    number = Decimal(last["digits"].replace(",", "") + (last["exponent"] or ""))
    return number.copy_negate() if last["sign"] else number  # unlike -number it does not round


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{…}`, with matched braces, or None.

    >>> find_last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    best_start, best_end = -1, -1
    open_braces: list[int] = []  # where a box begins inside, -1 for any other brace
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start > best_start:
                best_start, best_end = start, match.start()
        else:
            open_braces.append(-1 if match[0] == "{" else match.end())
    return None if best_start < 0 else text[best_start:best_end]


def without_bold(text: str) -> str:
    """Return the text without Markdown's `**bold**` marks; powers such as `2**3` stay.

    >>> without_bold("so **18** is 2**3 + 10")
    'so 18 is 2**3 + 10'
    """
    return _BOLD.sub(r"\1", text)


def label_text(label: Any) -> str:
    """Return the answer in a label: the text after the last `####` (GSM8K), stripped, without a full stop at its end.

    Raises `RewardFault` if there is none.

    >>> label_text("9 * 2 = <<9*2=18>>18\\n#### 18"), label_text(0.5)
    ('18', '0.5')
    """
    if label is None:
        raise RewardFault("the sample has no label; name its column with --label-key")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise RewardFault(f"the label is of type {type(label).__name__}; it must be text or a number")
    text = label if isinstance(label, str) else format(Decimal(str(label)), "f")
    answer = text.rpartition("####")[2].strip()
    answer = answer[:-1] if len(answer) > 1 and answer.endswith(".") else answer
    if not answer:
        raise RewardFault(f"the label {text!r} holds no answer")
    return answer
