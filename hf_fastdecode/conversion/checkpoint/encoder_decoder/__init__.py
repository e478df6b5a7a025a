"""Conversion of encoder-decoder models: each attention of the decoder is a layer with a plan of its own."""
