"""ftopt in other people's trainers: a callback for each, which needs that trainer's package (``pip install
'ftopt[trainers]'``). ``docs/trainers.md`` shows their use, and trainers that need none."""
