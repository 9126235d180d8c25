"""The loop: trainer, client jobs, engines, guard, checkpoints."""
