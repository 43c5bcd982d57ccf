"""Checkpoints on disk: safetensors files and a manifest, durable, written in the background.

``disk``      operations on a file system, one per method: the place where tests simulate crashes
``part``      what one replica contributes to a checkpoint
``writer``    writes parts on a separate thread; the replica that finishes last completes the checkpoint
``manifest``  the file that marks a checkpoint as complete, and its strict reader
``reader``    finds checkpoints, verifies them, reads replicas' parts
``writing_process``  finds a second process that writes there
``export``    the anchor as a plain state dict
``follow``    each newer one's anchor, for processes that are no members

``docs/checkpoints.md`` says what is guaranteed. ``ftopt/common/tree.py`` turns nested values into JSON and tensors.
"""
