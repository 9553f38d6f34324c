"""Fine-tuning on GLUE and on users' files."""
