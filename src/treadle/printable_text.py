"""Make text safe to show on a terminal: models, data and users' code may print anything."""

from __future__ import annotations

import json
import re
import unicodedata

_HARMLESS_FORMATS = "\u200c\u200d"  # joiners: scripts and emoji need them
_ACTING = re.compile(
    r"[\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2\u180e\u200b\u200e-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0001-\U000e007f]"
)
"""The characters that `visible` escapes, without those that JSON escapes by itself."""


def visible(text: str) -> str:
    """Return text on one line, with every control character replaced by a symbol or an escape.

    >>> visible("a\\nb\\x1b[31mc")
    'a⏎b␛[31mc'
    """
    if text.isprintable():  # most text: none of the characters that are escaped is printable
        return text
    return "".join(_visible_character(c) for c in text)


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "⏎"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if character not in _HARMLESS_FORMATS and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def visible_line(text: str) -> str:
    """Escape a printed line as `visible` does, but keep its tabs."""
    return "\t".join(visible(part) for part in text.split("\t"))


def harmless_json(text: str) -> str:
    r"""Escape in JSON text what `visible` escapes: its values stay the same, and the text is safe to show.

    >>> print(harmless_json('"a\x9bb\u202ec"'))
    "a\u009bb\u202ec"
    """
    return _ACTING.sub(lambda found: json.dumps(found[0])[1:-1], text)
