"""ftopt in other trainers: a callback for each, which needs that trainer's package (``pip install 'ftopt[trainers]'``),
and a helper for loops of your own. ``docs/trainers.md`` shows their use."""

from ftopt.integrations.membership import finish as finish
from ftopt.optimizer.schedules import advance as advance
