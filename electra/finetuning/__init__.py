"""Fine-tuning on GLUE and on files of one's own."""
