"""The rounds of one fragment: from the first proposal to the commit."""
