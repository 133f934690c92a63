"""Conversations of agents: many turns of one sample, trained on exactly the tokens that the policy sampled."""
