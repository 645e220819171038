"""Precision debugging: what the stages of chosen steps computed, written as msprobe dumps and compared."""
