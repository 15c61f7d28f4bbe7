"""Reads the prompts of a command: texts or chats, from the command line, from files, or from stdin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.bundle.bundle import Bundle
from exporter.common.documents import parse_document
from exporter.common.errors import InputError
from exporter.common.terminal import say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from runtime.text.chat import Chat

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt of the command.

    Attributes:
        text: what the user gave: a text, or the last message of a chat.
        tokens: token ids of all that the model gets.
    """

    text: str
    tokens: list[int]


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `PromptReader` reads."""
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="raw text to continue, or with --chat a message to answer; - reads it from stdin; may be repeated",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts from a file, or from stdin with -: one a line, empty lines left out; in a .jsonl file each line "
        'is a JSON text, {"prompt": …} or {"messages": […]}',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="render prompts with the model's chat template; without any prompt, chat line by line on stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help='a chat to answer, from a JSON file or from stdin with -: [{"role": "user", "content": "Hello"}, …]',
    )


class PromptReader:
    """Turns the arguments of a command into prompts."""

    def __init__(self, arguments: argparse.Namespace, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._arguments, self._bundle, self._tokenizer = arguments, bundle, tokenizer
        self._template: Chat | None = None
        stdin = [*arguments.prompt, arguments.prompts, arguments.messages].count(STDIN)
        if stdin > 1:
            raise InputError(f"stdin: got - for {stdin} arguments, expected one, since stdin is read once")
        if arguments.system is not None and not arguments.chat:
            raise InputError("--system: got a system message without --chat, expected both")

    @property
    def is_interactive(self) -> bool:
        """Whether the command chats line by line."""
        arguments = self._arguments
        return arguments.chat and not (arguments.prompt or arguments.prompts or arguments.messages)

    def read(self) -> list[Prompt]:
        """Returns all prompts in their order: those of --prompt, of --prompts, of --messages.

        Raises:
            InputError: there is none, or a file is not of its form.
            OSError: a file cannot be read.
        """
        found = list(self._found())
        if not found:
            raise InputError("prompt: got none, expected --prompt TEXT, --prompts FILE, --messages FILE or --chat")
        return found

    def _found(self) -> Iterator[Prompt]:
        for text in self._arguments.prompt:
            yield self._of_text(_read(STDIN) if text == STDIN else text)
        if self._arguments.prompts is not None:
            yield from self._of_lines(self._arguments.prompts)
        if self._arguments.messages is not None:
            yield self.of_messages(_json(_read(self._arguments.messages), self._arguments.messages))

    def _of_lines(self, name: str) -> Iterator[Prompt]:
        for number, line in enumerate(_read(name).split("\n"), 1):
            line = line.removesuffix("\r")
            if not line.strip():
                continue
            if not name.endswith(".jsonl"):
                yield self._of_text(line)
                continue
            data = _json(line, f"{name} line {number}")
            if isinstance(data, dict) and set(data) == {"messages"}:
                yield self.of_messages(data["messages"])
                continue
            text = data["prompt"] if isinstance(data, dict) and set(data) == {"prompt"} else data
            if not isinstance(text, str):
                raise InputError(
                    f'{name} line {number}: got {data!r:.80}, expected a text, {{"prompt": text}} or '
                    '{"messages": list}'
                )
            yield self._of_text(text)

    def _of_text(self, text: str) -> Prompt:
        from exporter.bundle.tokenizer import encode

        if self._arguments.chat:
            return self.of_messages([*self.system_messages(), {"role": "user", "content": text}])
        return Prompt(text, encode(self._tokenizer, text, say))

    def system_messages(self) -> list[dict]:
        """Returns the system message that the command has, if any."""
        system = self._arguments.system
        return [] if system is None else [{"role": "system", "content": system}]

    def of_messages(self, messages: Any) -> Prompt:
        """Renders a chat.

        Raises:
            InputError: the messages are not of their form, or the model's template refuses them.
            BundleError: the bundle has no chat template, or one that cannot be read.
        """
        from exporter.bundle.chat_template import read_chat_template
        from exporter.bundle.tokenizer import encode_chat
        from runtime.text.chat import Chat

        if self._template is None:
            self._template = Chat(read_chat_template(self._bundle))
        text = self._template.render(messages)
        return Prompt(str(messages[-1].get("content", "")), encode_chat(self._tokenizer, text))


def stdin_lines() -> Iterator[str]:
    """Yields the lines of stdin as they come.

    Raises:
        InputError: a line is not text in stdin's encoding.
    """
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: it is not {error.encoding} text; set PYTHONIOENCODING to its encoding") from None


def _read(name: str) -> str:
    """Returns the text of a file, or of stdin."""
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{'stdin' if name == STDIN else name}: it is not UTF-8 text at byte {error.start}; save it as UTF-8"
        ) from None


def _json(text: str, place: str) -> object:
    try:
        return parse_document(text)
    except ValueError as error:
        raise InputError(f"{place}: it is not JSON ({str(error)[:300]})") from None
