"""``ftopt export CHECKPOINT FILE``: writes the anchor as a plain safetensors state dict."""

from __future__ import annotations

import argparse
from pathlib import Path

from ftopt.cli.output import say


def add(parser: argparse.ArgumentParser) -> None:
    text = "a checkpoint, or a folder of checkpoints: its newest complete one"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=text)
    parser.add_argument("file", metavar="FILE", type=Path, help="file to write, e.g. model.safetensors; must not exist")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, for ``model.load_state_dict`` and Hugging Face."""
    from ftopt.checkpoint.export import export
    from ftopt.checkpoint.manifest import BadCheckpoint
    from ftopt.checkpoint.reader import find, with_offer

    checkpoint = find(arguments.checkpoint.resolve())
    try:
        tensors = export(checkpoint, arguments.file)
    except BadCheckpoint as bad:
        raise with_offer(bad, checkpoint.path) from None
    elements = sum(tensor.numel() for tensor in tensors.values())
    at = f"version {checkpoint.manifest.version}, inner step {checkpoint.manifest.inner_step}"
    say(f"{arguments.file}: {len(tensors)} tensors, {elements:,} elements, of {at}")
    return 0
