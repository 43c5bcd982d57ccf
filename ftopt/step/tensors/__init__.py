"""Tensors in flat memory: views of parameters, pieces, pools, digests."""
