"""How the reference model `tiny-retriever` is made."""
