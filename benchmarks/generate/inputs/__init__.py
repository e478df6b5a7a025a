"""What calls of a shape are given: token ids, an encoder's input, or an image in a text. Without torch."""
