"""From samples to micro-batches: token budgets, balance over data-parallel ranks, packed and per-sample layouts."""
