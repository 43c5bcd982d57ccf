"""Where training bytes come from: corpora split into train and held-out, and random windows of them."""
