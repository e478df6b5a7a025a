"""Drawing the tokens of one step: cases, check, time and table."""
