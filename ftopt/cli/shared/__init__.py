"""What verbs share: the grammar, what goes to the terminal, and options for token and TLS."""
