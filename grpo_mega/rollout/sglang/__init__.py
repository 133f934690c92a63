"""SGLang servers as engines; see README.md. Nothing outside the server's own processes imports sglang."""
