"""Chats are rendered as transformers renders them, and a template can run nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from exporter.bundle.chat_template import ChatTemplate, read_chat_template
from exporter.common.errors import BundleError, InputError
from runtime.text.chat import Chat

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Is 1 < 2 & é?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {  # each uses what real templates use
    "ChatML": CHATML,
    "begin token and trim": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}",
    "blocks on lines of their own": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  U: {{ m.content }}\n"
    "    {%- else %}\n  {% if loop.first %}first{% endif %}\n    {% endif %}\n{%- endfor %}\n",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.content %}{% endfor %}{{ ns.n }} {{ ns.last }}",
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% break %}{% endfor %}",
    "JSON": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ dict(a=1, b='<é>') | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "slices and methods": "{% for m in messages[1:] | reverse %}{{ m.role.upper().strip() }},"
    "{{ m.get('x', 'none') }};{% endfor %}",
    "no tools": "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}{{ x is defined }}",
    "macro": "{% macro show(m) -%}<{{ m.role }}>{%- endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
}


def chat(source: str) -> Chat:
    return Chat(ChatTemplate(source, SPECIAL, "chat_template.jinja"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_is_rendered_as_transformers_renders_it(name, add_generation_prompt):
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": add_generation_prompt}
    rendered, _ = render_jinja_template([CHAT], chat_template=TEMPLATES[name], **options, **SPECIAL)
    assert chat(TEMPLATES[name]).render(CHAT, **options) == rendered[0]


def test_the_time_is_that_of_now():
    from datetime import datetime

    assert chat("{{ strftime_now('%Y') }}").render(CHAT) in {str(datetime.now().year), str(datetime.now().year - 1)}


ESCAPES = {  # what a template may try → nothing of it works
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute by filter": "{{ '' | attr('__class__') }}",
    "attribute by item": "{{ messages[0]['__class__'].x }}{{ messages.__init__.__globals__ }}",
    "function globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "global's init": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('id') }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "changed messages": "{{ messages.append(1) }}",
    "cleared message": "{{ messages[0].clear() }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "namespace item": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "dict's methods": "{{ dict.__subclasses__() }}",
    "self": "{{ self._TemplateReference__context.environment }}",
    "large text": "{{ 'x' * 10000000000 }}",
    "large list": "{{ ([1] * 10000000000) | length }}",
    "large power": "{{ 10 ** 10 ** 10 }}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division by zero": "{{ 1 / 0 }}",
    "missing key": "{{ messages[9].content }}",
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
}


HIDDEN = ("attribute by filter", "format map", "function globals", "self")  # Jinja shows nothing for these


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_can_run_nothing(name):
    messages = json.loads(json.dumps(CHAT))
    try:
        text = chat(ESCAPES[name]).render(messages)
    except (InputError, BundleError) as error:
        assert str(error).startswith("chat") and "\n" not in str(error)
    else:
        assert name in HIDDEN and text == ""
    assert messages == CHAT


def test_an_object_with_methods_reaches_no_template():
    for value in (SimpleNamespace(run=print), print, b"bytes", {1, 2}):
        with pytest.raises(InputError, match=r"messages: got a \w+, expected texts"):
            chat(CHATML).render([{"role": "user", "content": value}])


@pytest.mark.parametrize(
    "messages", [[], None, "Hello", ["Hello"], [{"content": "x"}], [{"role": 1}], {"role": "user"}]
)
def test_messages_of_another_form_are_refused(messages):
    with pytest.raises(InputError, match="messages: got "):
        chat(CHATML).render(messages)
    deep = nested = []
    for _ in range(50):
        nested.append([])
        nested = nested[0]
    with pytest.raises(InputError, match="more than 32 levels"):
        chat(CHATML).render([{"role": "user", "content": deep}])


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% unknown %}", "{{ x | nofilter }}"])
def test_what_is_no_template_is_refused(source):
    with pytest.raises(BundleError, match=r"chat_template\.jinja: it is no chat template"):
        chat(source)


# --- where the template is -------------------------------------------------------------------------------------------


def bundle(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    listed = {name.replace("__", "."): {} for name in files}
    return SimpleNamespace(folder=folder, manifest=SimpleNamespace(files=listed))


def test_the_file_comes_before_the_config_and_special_tokens_are_texts_or_objects(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "pad_token": 5, "chat_template": "config"}
    tokens = {"bos_token": "other", "unk_token": "<unk>"}
    opened = bundle(tmp_path, tokenizer_config__json=config, special_tokens_map__json=tokens)
    assert read_chat_template(opened).source == "config"
    opened = bundle(
        tmp_path, tokenizer_config__json=config, special_tokens_map__json=tokens, chat_template__jinja="file"
    )
    found = read_chat_template(opened)
    assert (found.source, found.special_tokens) == ("file", {"bos_token": "<s>", "unk_token": "<unk>"})


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert read_chat_template(bundle(tmp_path, tokenizer_config__json={"chat_template": templates})).source == "yes"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it has no chat template"),
        ({"tokenizer_config__json": {"chat_template": None}}, "it has no chat template"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "x", "template": "y"}, 5]}}, "it has no chat template"),
        ({"tokenizer_config__json": {"chat_template": 5}}, "got a int at chat_template"),
        ({"tokenizer_config__json": [1]}, "got a JSON list"),
        ({"tokenizer_config__json": "{"}, "cannot be read as JSON"),
        ({"chat_template__jinja": "x" * (2**20 + 1)}, "expected at most 1,048,576"),
    ],
    ids=str,
)
def test_a_bundle_without_a_readable_template_is_refused(tmp_path, files, message):
    with pytest.raises(BundleError, match=message):
        read_chat_template(bundle(tmp_path, **files))


def test_a_template_outside_of_the_bundle_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "bundle"
    folder.mkdir()
    opened = bundle(folder, chat_template__jinja="x")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match="leads out of its folder"):
        read_chat_template(opened)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="it cannot be read as UTF-8"):
        read_chat_template(opened)
