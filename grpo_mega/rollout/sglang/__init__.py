"""SGLang servers as engines; see README.md. Only server processes import sglang."""
