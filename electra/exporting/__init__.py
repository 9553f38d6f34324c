"""The commands `electra export` and `electra import`."""
