"""The embedded engine: samples from the policy itself, in the trainer's process, by the Hugging Face model."""
