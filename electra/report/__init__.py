"""Tables and plots from run folders."""
