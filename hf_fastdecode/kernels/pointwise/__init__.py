"""Operators between the products of a layer, one launch each: RMSNorm, rotary embedding, gated activation."""
