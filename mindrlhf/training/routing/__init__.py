"""Routing replay: experts train on the tokens that the generator sent to them."""
