"""Sparse prefill through flash-attn-4's block lists, on Hopper.

The path of a call: `backend` lowers the index to block lists and runs the tiles (`call`), and continues with the single
columns (../columns.py).
"""
