"""Text and tokens that a recipe names, opened without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ftopt.config.data_settings import StdlibBytes, Text, TokensConfig
from ftopt.data.corpus import HELD_OUT, Corpus, check_length, stdlib_bytes, text
from ftopt.data.windows import Windows
from ftopt.errors import UserError

W = TypeVar("W", bound=Windows)


def open_corpus(data: StdlibBytes | Text, context: int) -> Corpus:
    """The bytes for training and for evaluation. UserError: there is no text, or less than a window of ``context``
    bytes for training or for evaluation."""
    corpus = text(data.path) if isinstance(data, Text) else stdlib_bytes()
    for part in (corpus.train, corpus.held_out):
        check_length(part, context)
    return corpus


def open_tokens(
    data: TokensConfig, context: int, *, vocab: int | None, make: Callable[..., W]
) -> tuple[W, W | None, int]:
    """The windows to train on, those to evaluate on, and a count; if the second are None, only the first ``count``
    train.

    Args:
        make: `Windows`, or a subclass, with its ``vocab``.

    Raises:
        UserError: there are no tokens, or only a single window.
    """

    def opened(key: str, path: str) -> W:
        try:
            return make(path, context, dtype=data.dtype, skip_bytes=data.skip_bytes, vocab=vocab)
        except UserError as error:
            raise UserError(f"data.{key}={path!r}: {str(error).removeprefix(f'source={path!r}: ')}") from None

    everything = opened("path", data.path)
    if data.held_out is not None:
        return everything, opened("held_out", data.held_out), len(everything)
    train = int(len(everything) * (1 - HELD_OUT))
    if not train:
        raise UserError(f"data.path={data.path!r} has a single window; give more tokens, or data.held_out")
    return everything, None, train
