"""A replica of several ranks: rank 0 leads with a whole copy of the model, the others follow."""
