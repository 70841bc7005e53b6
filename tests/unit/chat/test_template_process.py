"""Chat templates run in a process of their own, as transformers runs them in this one, and are stopped in time."""

import gc
import os
import time

import pytest

from treadle.chat.template_process import TemplateFault, TemplateProcess
from treadle.chat.template_worker import make_environment

CHATML = (
    "{%- for m in messages %}\n  {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{{ t.function | tojson }}{% endfor %}"
    "{% endif %}{% set ns = namespace(n=0) %}{% macro line(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}\n"
    "    {% for m in messages %}\n    {% if loop.index0 > 3 %}{% break %}{% endif %}\n"
    "{% set ns.n = ns.n + 1 %}{% generation %}{{ line(m) }}{% endgeneration %}"
    "{% for c in m.tool_calls or [] %}{{ c.arguments | tojson }}|{{ c.arguments.unit is none }}|{{ c }}{% endfor %}\n"
    "    {% endfor %}{{ ns.n }}{{ enable_thinking is defined and enable_thinking is false }}{{ strftime_now('%Y') }}"
)
MESSAGES = [
    {"role": "system", "content": " Be bréf <b>. "},
    {"role": "user", "content": "a\ud83db\n\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"city": "Zürich", "unit": None, "n": 1.5}}]},
]


def test_the_environment_is_the_one_of_transformers():
    from transformers.utils.chat_template_utils import _compile_jinja_template

    ours, theirs = make_environment(), _compile_jinja_template("-").environment
    for name in ("filters", "tests", "globals"):
        assert getattr(ours, name).keys() == getattr(theirs, name).keys()
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "sandboxed"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours.extensions) == len(theirs.extensions)
    assert type(ours) is type(theirs)


@pytest.mark.parametrize("template", [CHATML, TOOLS, "{{ messages[0] }}{{ 1.0 }}{{ true }}{{ missing }}\n"])
def test_texts_are_those_of_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = MESSAGES[:2] if template == CHATML else MESSAGES
    tools = [{"type": "function", "function": {"name": "é<", "parameters": {"b": 1, "a": None}}}]
    variables = {"bos_token": "<s>", "enable_thinking": False, "tools": tools, "add_generation_prompt": True}
    (want,), _ = render_jinja_template([messages], chat_template=template, **variables)
    process = TemplateProcess(template)
    context = {"messages": messages, "documents": None, **variables}
    assert [process.render(context) for _ in range(3)] == [want] * 3


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "repeats": "{% set x = 'x' * 10**9 %}{{ x }}",
    "repeats more": "{{ 'x' * 10**12 }}",
    "doubles": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "powers": "{{ 10 ** (10 ** 9) % 7 }}",
    "pads": "{{ 'x' | center(10**10) }}",
    "formats": "{{ '%1000000000d' | format(1) }}",
    "lists": "{{ ([0] * 10**9) | length }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "content": "{% for m in messages %}{{ m.content * 10**9 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_end_is_stopped(name):
    process = TemplateProcess(BOMBS[name], max_cpu_seconds=0.5)
    start = time.monotonic()
    with pytest.raises(TemplateFault) as caught:
        process.render({"messages": [{"role": "user", "content": "hello"}]})
    assert time.monotonic() - start < 10
    assert any(text in str(caught.value) for text in ("CPU time", "memory", "far more text", "recursion", "ended"))


def test_after_a_stop_the_next_messages_are_rendered_until_it_happens_often():
    process = TemplateProcess("{{ x }}{% if x %}{{ x ** (x ** x) }}{% endif %}", max_cpu_seconds=0.3)
    for _ in range(3):
        assert process.render({"x": ""}) == ""
        with pytest.raises(TemplateFault, match=r"stopped after 0\.3 s of CPU time; it seems to loop for ever"):
            process.render({"x": 9})
    with pytest.raises(TemplateFault, match="had to be stopped 3 times"):
        process.render({"x": ""})


def test_many_slow_renderings_are_bounded_together():
    process = TemplateProcess("{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}", 0.6)

    def render_often() -> None:
        for _ in range(100):
            process.render({})

    with pytest.raises(TemplateFault, match="CPU time"):
        render_often()


def test_what_a_template_refuses_leaves_the_process_as_it_is():
    process = TemplateProcess("{{ raise_exception('not so') if bad else 'fine' }}{{ undefined_name.x if worse }}")
    for _ in range(5):
        with pytest.raises(TemplateFault, match="not so"):
            process.render({"bad": True})
        with pytest.raises(TemplateFault, match="'undefined_name' is undefined"):
            process.render({"worse": True})
        assert process.render({}) == "fine"
    with pytest.raises(TemplateFault, match="unexpected '}'"):
        TemplateProcess("{{ }").render({})
    ring: list = []
    ring.append(ring)
    with pytest.raises(TemplateFault, match="can't be written as JSON"):
        process.render({"messages": ring})


def test_long_messages_pass():
    process = TemplateProcess("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    messages = [{"content": "x" * 1_000_000}] * 5
    assert len(process.render({"messages": messages})) == 5_000_010


def test_the_process_ends_with_its_owner():
    process = TemplateProcess("{{ x }}")
    process.render({"x": 9})
    number = process._worker._process.pid
    assert os.path.exists(f"/proc/{number}")
    del process
    gc.collect()
    assert not os.path.exists(f"/proc/{number}")
