"""ftopt in other people's trainers: a callback for each, which needs that trainer's package (``pip install
'ftopt[trainers]'``), and what loops of your own need. ``docs/trainers.md`` shows their use."""

from ftopt.integrations.membership import finish as finish
from ftopt.optimizer.schedules import advance as advance
