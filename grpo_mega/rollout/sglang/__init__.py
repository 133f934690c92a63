"""SGLang servers as engines; see README.md. Only the server's processes import sglang."""
