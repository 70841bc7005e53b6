"""Rollouts: engines that generate, rewards that score, and the manager that runs both."""
