"""A model behind an HTTP interface and a page."""
