"""Pre-training: configuration, recipes, phases, initialisation and the command."""
