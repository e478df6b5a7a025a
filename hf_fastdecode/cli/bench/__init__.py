"""The commands of the bench, one a file, and what they have in common."""
