"""Inputs of a call beside its text: an encoder's, images, videos or audio, and which rows they belong to."""
