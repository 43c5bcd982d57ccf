"""The members of a job, which of them are connected, and what each holds; the machine's effects."""
