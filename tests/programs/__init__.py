"""Random user programs: training loops made of what users do, run on replicas that die, join late and are cut off.

``python -m tests.programs 17`` runs program 17, prints it as a short script if it fails, and makes it smaller.
"""
