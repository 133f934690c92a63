"""Share devices between policy and engine, and send weights from policy to engine by a plan of weights.plan."""
