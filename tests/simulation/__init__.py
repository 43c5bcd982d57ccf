"""The protocol's machines under a virtual clock and a virtual network: one seed is one history, and replays exactly."""
