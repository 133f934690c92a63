"""One run, assembled: its job, engines, batches, evaluation, checkpoints and folder."""
