"""The sample ledger: which units are done, leased, or free."""
