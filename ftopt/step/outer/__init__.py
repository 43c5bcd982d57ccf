"""The outer step of one replica: what it sends, what the agreed result does to it, and when."""
