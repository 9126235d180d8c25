"""Federated continual learning for people who already use Lightning."""
