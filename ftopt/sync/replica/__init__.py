"""The replica's end of the outer-sync layer: threads, sockets and files around the replica machine."""
