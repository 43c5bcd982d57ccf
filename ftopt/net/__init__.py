"""Who may come in: the job's token, TLS, and what a stranger may cost. Standard library alone, but for `http`."""
