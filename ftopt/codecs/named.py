"""The codecs by name, as a recipe's ``method.codec`` gives it."""

from __future__ import annotations

from dataclasses import Field, fields
from threading import Thread
from typing import TYPE_CHECKING, Any

from ftopt.codecs.bf16 import BF16
from ftopt.codecs.blockwise import KERNELS, Blockwise, Kernels
from ftopt.codecs.codec import Codec
from ftopt.codecs.fp4 import FP4
from ftopt.codecs.fp32 import FP32
from ftopt.codecs.int8 import Int8
from ftopt.codecs.top_k import TopK
from ftopt.common.plural import count
from ftopt.errors import UserError

if TYPE_CHECKING:
    import torch

CODECS: dict[str, type[Codec]] = {"fp32": FP32, "bf16": BF16, "int8": Int8, "fp4": FP4, "top_k": TopK}
"""Name -> a frozen dataclass. Its settings are its fields, in order; each has a default, whose type is the
setting's."""


def codec_named(spec: str) -> Codec:
    """The codec that ``spec`` names: ``codec_named(codec.name) == codec``.

    Args:
        spec: a name of `CODECS`, followed by the codec's settings, if it has any: ``fp4``, ``top_k:0.01:4``. Settings
            left out at the end take their defaults.

    Raises:
        UserError: no such codec, or a setting that is not a number or out of range.
    """
    name, *texts = spec.split(":")
    if name not in CODECS:
        raise UserError(f"codec={spec!r}; allowed: {', '.join(map(_form, CODECS))}; settings may be left out")
    known = _settings(name)
    if len(texts) > len(known):
        has = count(len(known), "setting") if known else "no settings"
        raise UserError(f"codec={spec!r}: {name} has {has}; use {_form(name)}")
    values = []
    for text, setting in zip(texts, known, strict=False):
        kind: Any = type(setting.default)
        try:
            values.append(kind(text))
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise UserError(
                f"codec={spec!r}: {setting.name}={text!r}; must be {what}, as in {CODECS[name]().name}"
            ) from None
    try:
        return CODECS[name](*values)
    except UserError as error:
        raise UserError(f"codec={spec!r}: {error}") from None


def prepare_kernels(device: torch.device, numel: int) -> Thread | None:
    """Begins to load the codecs' kernels for payloads of ``numel`` elements: `ftopt.kernels.loader.Loader.prepare`."""
    return KERNELS.prepare(device, numel, difference)


def difference(kernels: Kernels) -> str:
    """The first codec that kernels give other bits than torch; "": none."""
    codecs = [kind() for kind in CODECS.values()]
    unlike = [
        codec.name for codec in codecs if isinstance(codec, Blockwise) and codec.kernel and not codec.agrees(kernels)
    ]
    return unlike[0] if unlike else ""


def _settings(name: str) -> list[Field[Any]]:
    return list(fields(CODECS[name]))  # type: ignore[arg-type]


def _form(name: str) -> str:
    return ":".join([name, *(setting.name.upper() for setting in _settings(name))])
