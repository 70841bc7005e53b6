"""Characters that act on a terminal are shown as text, in messages and in JSON files."""

import json
import sys
import unicodedata

from treadle.printable_text import harmless_json, visible, visible_line

ACTING = [chr(code) for code in range(sys.maxunicode + 1) if visible(chr(code)) != chr(code)]


def test_json_keeps_every_character_and_shows_none_that_acts():
    text = "x".join(ACTING) + "plain ünïcode 字 👩\u200d💻"
    written = harmless_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert json.loads(written) == {text: [text]}
    assert [character for character in written if character in ACTING] == []
    assert "plain ünïcode 字 👩\u200d💻" in written
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or c == "\u200d" for c in written)


def test_a_printed_line_keeps_its_tabs():
    assert visible_line("a\tb\x1b[2J\r\u202e") == "a\tb␛[2J␍\\u202e"
