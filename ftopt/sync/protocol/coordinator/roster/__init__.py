"""The members of a job, which of them are connected, and what each holds; what the machine asks of its shell."""
