"""Engines: where the one model of a run lives, and how a client's weights get in and out."""
