"""The processes of a job: the coordinator and the replicas of ``ftopt run``, one replica's training loop, and faults
that are injected into them.

`runner` starts the processes and watches them to their end; `replica_process` is one of them, and `train` its loop.
"""
