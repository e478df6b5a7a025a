"""What slim layers cache, in which dtype, and the values that follow from it."""
