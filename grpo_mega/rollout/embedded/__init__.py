"""The embedded engine: samples from a Hugging Face model with the policy's weights, in the trainer's process."""
