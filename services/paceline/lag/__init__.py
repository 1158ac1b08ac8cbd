"""Lag: how far collectors and rows are behind the learner, why, and within which bound.

Pure: times and versions come in as arguments. Only `publications` and `trace` touch files.
"""
