"""The outer step of one replica: its payload, the effect of the agreed result, and the timing."""
