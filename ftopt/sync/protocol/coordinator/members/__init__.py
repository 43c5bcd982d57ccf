"""What happens to members, and the features that concern some of them (`listener`)."""
