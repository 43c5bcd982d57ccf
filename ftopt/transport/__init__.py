"""How bytes move: reductions that can be stopped, their rendezvous, and the transfer of committed state."""
