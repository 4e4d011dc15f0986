"""The plan as data: patterns, schema, YAML, fingerprint, aliases. Imports no torch."""
