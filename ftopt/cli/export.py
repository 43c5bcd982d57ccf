"""``ftopt export RUN FILE``: writes a checkpoint's parameters as a plain state dict."""

from __future__ import annotations

import argparse

from ftopt.cli.resume import of_a_script
from ftopt.cli.shared.output import complain, explain, say
from ftopt.common.paths import user_path
from ftopt.common.plural import count
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    text = "a run's folder, a folder of checkpoints (the newest complete one), or a checkpoint"
    parser.add_argument("checkpoint", metavar="RUN", type=user_path, help=text)
    text = "file to write: .safetensors, or .pt or .pth for torch.load"
    parser.add_argument("file", metavar="FILE", type=user_path, help=text)
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file for ``model.load_state_dict`` or Hugging Face; prints how to load it."""
    from ftopt.checkpoint.export import check_target, export, how_to_load, left_out
    from ftopt.checkpoint.manifest import BadCheckpoint
    from ftopt.checkpoint.reader import OF_A_RUN, find, whole, with_offer

    check_target(arguments.file, force=arguments.force)
    folder = arguments.checkpoint.resolve()
    if (why := of_a_script(folder)) and not (whole(folder) or whole(folder / OF_A_RUN)):
        raise UserError(f"{arguments.checkpoint} {why}; give that folder")
    checkpoint = find(folder)
    try:
        tensors = export(checkpoint, arguments.file, force=arguments.force)
    except BadCheckpoint as bad:
        raise with_offer(bad, checkpoint.path) from None
    elements = sum(tensor.numel() for tensor in tensors.values())
    at = f"version {checkpoint.manifest.version}, inner step {checkpoint.manifest.inner_step}"
    explain(f"{arguments.file}: {count(len(tensors), 'tensor')}, {count(elements, 'element')}, of {at}; to load it:\n")
    for reason in left_out(checkpoint):
        complain(f"not in the file: {reason}")
    recipe = checkpoint.path.parent.parent / "recipe.yaml"
    say(how_to_load(arguments.file, recipe if recipe.is_file() else None))
    return 0
