"""Shows people a run or a job.

`jsonl` and `folder` keep what happened. Then each thing is done once:

    Event -> sentences -> Note                                       the words
    Event -> story -> terminal | status | narrator | report          what each replica does, and what is news
    Event -> decisions, samples -> summary -> account | report       the figures of a whole run
    Event -> rings, prometheus -> live -> page | metrics             the last days of a coordinator's jobs
    Event -> trackers: curves -> mirror -> wandb | tensorboard       metrics of one replica

A report is the page with its data inlined (`page`, ``assets/``).
"""
