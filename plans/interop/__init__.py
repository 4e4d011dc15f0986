"""Sparse attention settings of other tools, read into plans and written from them. A format is a file here and a row in
`formats.py`; none of it runs code, or needs more than the standard library and the schema."""
