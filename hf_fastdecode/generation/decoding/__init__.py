"""The decoding loop: drawing tokens, ending rows, compacting the batch."""
