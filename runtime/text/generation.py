"""The generation loop: it decodes one text or several at once, each in a slot of its own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from exporter.common.errors import InputError
from runtime.session import DecodeSession
from runtime.text.sampling import Sampler
from runtime.text.sequence import GeneratedSequence, Piece
from runtime.text.stopping import StopRules

Pieces = Generator[tuple[int, Piece], None, None]  # index of a text, and what a step added to it


def generate(session: DecodeSession, sequences: Sequence[GeneratedSequence]) -> Pieces:
    """Generates texts, as many at once as the session has free slots. The others begin when a slot is free again.

    Args:
        session: a session on a whole model that is used with slots. Its other slots are left alone.
        sequences: new texts.

    Yields:
        The index of a text and what a step added to it.

    Raises:
        InputError: the bundle is no whole model, a prompt does not fit in the cache, or the session has no free slot.
    """
    if session.manifest.unit.kind != "model":
        raise InputError(f"generate: the bundle is a {session.manifest.unit}, expected a whole model")
    for index, sequence in enumerate(sequences):
        if len(sequence.prompt) > session.cache_capacity:
            raise InputError(
                f"prompt{f' {index + 1}' if len(sequences) > 1 else ''}: it has {len(sequence.prompt)} tokens and the "
                f"cache holds {session.cache_capacity}; shorten it, or open the session with a larger cache_capacity"
            )
    return _pieces(session, sequences)


def _pieces(session: DecodeSession, sequences: Sequence[GeneratedSequence]) -> Pieces:
    waiting, running = deque(range(len(sequences))), dict[int, int]()  # indices; slot → index
    try:
        while waiting or running:
            while waiting and (len(session.lengths) < session.max_batch or not running):
                running[session.acquire()] = waiting.popleft()
            results = session.step({slot: sequences[index].next_tokens for slot, index in running.items()})
            for slot, logits in results.items():
                index = running[slot]
                sequence = sequences[index]
                n_cached = len(sequence.prompt) + len(sequence.tokens)
                piece = sequence.take(logits, n_cached < session.cache_capacity)
                if sequence.stopped_by:
                    session.release(slot)
                    del running[slot]
                yield index, piece
    finally:
        for slot in running:
            with contextlib.suppress(InputError):  # the session was closed or reset meanwhile, and the slot with it
                session.release(slot)


@dataclass
class Generation:
    """The generation of one text. Iterate over it, once, for the new tokens.

    It takes a slot of the session when the iteration begins and releases it when the iteration ends. So several
    generations may use one session, one after the other or at the same time, and none sees another one's text.

    Attributes:
        session: a session on a whole model that is used with slots, and has a free one.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate.
        sampler: chooses each token. A generation draws from the beginning of its seed, also where it is not the first.
        stopped_by: None while it runs, then "end token", "max_new_tokens" or "cache_capacity".
    """

    session: DecodeSession
    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    stopped_by: str | None = None
    _pieces: Pieces = field(init=False, repr=False)
    _sequence: GeneratedSequence = field(init=False, repr=False)
    _begun: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        end_token_ids, rules = self.session.manifest.end_token_ids, StopRules(self.max_new_tokens)
        self._sequence = GeneratedSequence(self.prompt, self.sampler, rules, end_token_ids)
        self._pieces = generate(self.session, [self._sequence])

    def __iter__(self) -> Iterator[int]:
        """Returns an iterator over the new tokens, without the end token.

        Raises:
            InputError: the generation was iterated before. It would begin again, with other text where it draws.
        """
        if self._begun:
            raise InputError("generation: it was iterated already; keep its tokens in a list, or make another one")
        self._begun = True
        return self._tokens()

    def _tokens(self) -> Iterator[int]:
        with contextlib.closing(self._pieces) as pieces:
            for _, piece in pieces:
                self.stopped_by = self._sequence.stopped_by
                if piece.token is not None:
                    yield piece.token
