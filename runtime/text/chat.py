"""Renders the messages of a chat with a model's template, as transformers does.

A template comes with a checkpoint, so it is untrusted. It runs in Jinja's sandbox, where it can read the messages and
build a text, and nothing else: no attribute of Python's own, no import, no file, no change of what it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from exporter.bundle.chat_template import ChatTemplate
from exporter.common.errors import BundleError, InputError

LARGEST_TEXT = 16 * 2**20  # characters of a rendered chat, and of a text or list that a template multiplies
DEEPEST = 32  # levels of lists and objects in a message


class _Generation(Extension):
    """The tag `generation`, which marks the model's own words for training. Here it only has a body."""

    tags = {"generation"}  # noqa: RUF012 - the form that Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach Python's own attributes."""

    def __init__(*arguments: Any, **values: Any) -> None:
        self, *rest = arguments
        for name in dict(*rest, **values):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, and got {name!r:.80}")


def _new_dict(*arguments: Any, **values: Any) -> dict:
    """What a template gets for `dict`: the class itself has methods."""
    return dict(*arguments, **values)


def _to_json(
    data: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes characters of HTML; templates want plain JSON."""
    return json.dumps(data, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses products that would fill the memory."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, str | list | tuple) else x for x in (left, right)]
        if operator == "**" and any(isinstance(x, int) and abs(x) > 1000 for x in sizes):
            raise SecurityError("it computes a power of a number above 1000")
        if operator == "*" and sizes != [left, right] and sizes[0] * sizes[1] > LARGEST_TEXT:
            raise SecurityError(f"it multiplies a text to more than {LARGEST_TEXT:,} characters")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _new_dict,
        "namespace": _PlainNamespace,
    }
    return environment


class Chat:
    """A chat template, ready to render."""

    def __init__(self, template: ChatTemplate) -> None:
        """Compiles a template.

        Raises:
            BundleError: it is no Jinja template.
        """
        self._place, self._special_tokens = template.place, template.special_tokens
        try:
            self._template = _environment().from_string(template.source)
        except Exception as error:  # Jinja compiles to Python, so a strange template ends in any of its exceptions
            raise BundleError(f"{template.place}: it is no chat template ({_reason(error)})") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a chat. It holds the begin token where the template writes one.

        Args:
            messages: each with a "role" and mostly a "content", as the template wants them.
            add_generation_prompt: whether the text ends with the beginning of the model's answer.

        Raises:
            InputError: the messages are none, or the template refuses them; the message has its reason.
        """
        plain = _checked(messages)
        try:
            pieces = self._template.generate(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return _joined(pieces)
        except Exception as error:  # an untrusted template: each of Python's exceptions is possible
            raise InputError(
                f"chat: the template {self._place} does not render these messages ({_reason(error)}); give it the "
                "roles and the order that it knows, or plain text without --chat"
            ) from None


def _joined(pieces: Iterable[str]) -> str:
    taken, n_characters = [], 0
    for piece in pieces:
        taken.append(piece)
        n_characters += len(piece)
        if n_characters > LARGEST_TEXT:
            raise SecurityError(f"it writes more than {LARGEST_TEXT:,} characters")
    return "".join(taken)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Returns a copy of the messages in plain data, so that a template meets no object with methods of its own."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"messages: got {messages!r:.80}, expected a list of at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f'messages: got {message!r:.80}, expected objects such as {{"role": "user", "content": "Hello"}}'
            )
    return [_plain(dict(message), DEEPEST) for message in messages]


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise InputError(f"messages: they have more than {DEEPEST} levels of lists and objects")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in value]
    raise InputError(f"messages: got a {type(value).__name__}, expected texts, numbers, lists and objects only")
