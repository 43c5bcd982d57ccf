"""Changes of members, and the features that follow these (`listener`)."""
