"""How a replica is saved, restored, replayed, and how it adopts the work of one that does not come back."""
