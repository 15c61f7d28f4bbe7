"""Reads the chat template of a whole model's bundle, and the special tokens that it may name."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.bundle.bundle import Bundle
from exporter.common.documents import is_inside, read_document
from exporter.common.errors import BundleError

TEMPLATE_FILE, CONFIG_FILE, TOKENS_FILE = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
LARGEST_TEMPLATE_BYTES = 2**20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template as it is in a checkpoint. `runtime/text/chat.py` renders it.

    Attributes:
        source: its Jinja text.
        special_tokens: name → text, such as bos_token → <s>.
        place: where it came from, for messages.
    """

    source: str
    special_tokens: dict[str, str]
    place: str


def read_chat_template(bundle: Bundle) -> ChatTemplate:
    """Reads the template: chat_template.jinja, else the one in tokenizer_config.json.

    Raises:
        BundleError: the bundle has none, or one that cannot be read.
    """
    config, tokens = _object(bundle, CONFIG_FILE), _object(bundle, TOKENS_FILE)
    special = {name: _text_of(config.get(name, tokens.get(name))) for name in SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in special.items() if text is not None}
    if TEMPLATE_FILE in bundle.manifest.files:
        return ChatTemplate(_template_file(bundle), special_tokens, str(bundle.folder / TEMPLATE_FILE))
    place, source = str(bundle.folder / CONFIG_FILE), config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        raise BundleError(
            f"bundle {bundle.folder}: it has no chat template, so its model may be none for chats; give it plain text, "
            "or export it from a checkpoint with chat_template.jinja"
        )
    if not isinstance(source, str):
        raise BundleError(f"{place}: got a {type(source).__name__} at chat_template, expected a text")
    return ChatTemplate(source, special_tokens, place)


def _template_file(bundle: Bundle) -> str:
    path = bundle.folder / TEMPLATE_FILE
    try:
        if not is_inside(path, bundle.folder):
            raise BundleError(f"{path}: it is a link that leads out of its folder; put the file itself there")
        if path.stat().st_size > LARGEST_TEMPLATE_BYTES:
            raise BundleError(
                f"{path}: it has {path.stat().st_size:,} bytes, expected at most {LARGEST_TEMPLATE_BYTES:,}"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: it cannot be read as UTF-8 text ({error}); export again") from None


def _object(bundle: Bundle, name: str) -> dict:
    path = bundle.folder / name
    if name not in bundle.manifest.files:
        return {}
    try:
        data = read_document(path)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: it cannot be read as JSON ({str(error)[:300]}); export again") from None
    if not isinstance(data, dict):
        raise BundleError(f"{path}: got a JSON {type(data).__name__}, expected an object; export again")
    return data


def _text_of(token: object) -> str | None:
    """Returns the text of a special token, which is a text or an object with its text at `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
