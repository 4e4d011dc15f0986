"""Files that ship with the package: the reference model, the JSON Schema."""
