"""The laboratory: tasks, Hydra configs, the trainer, records and comparisons."""
