"""Training data: a job's loader, and corpora split into a training and a held-out part, with windows of them."""
