"""Checkpoints on disk: safetensors shards and a manifest, durable, written beside the training.

``disk``      what is done to a file system, one operation a method: the place where tests let it crash
``tree``      nested values and tensors as JSON and a safetensors file
``part``      what one replica puts into a checkpoint
``writer``    writes parts on a thread of its own; whoever finishes last makes the checkpoint whole
``manifest``  the one file that says that a checkpoint is whole, and its strict reader
``reader``    finds checkpoints, verifies them, reads replicas' parts
``export``    the anchor as a plain state dict

``docs/checkpoints.md`` says what is promised.
"""
