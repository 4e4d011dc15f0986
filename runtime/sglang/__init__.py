"""SGLang host: a plan in an engine of SGLang, as an attention backend around the engine's own."""
