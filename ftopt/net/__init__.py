"""Access control: the job's token, TLS, and limits on unauthenticated connections. Only `http` needs more than the
standard library."""
