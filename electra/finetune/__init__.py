"""A pre-trained encoder learns a task: rows of a table of tasks, heads, metrics."""
